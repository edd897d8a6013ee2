"""`quire bench throughput`: rates and latencies of a load on an engine in this process."""

from __future__ import annotations

import argparse
import copy
import math
import sys
from typing import TYPE_CHECKING, Any

from quire.bench.load.arrivals import arrival_times
from quire.bench.load.workloads import ALL_WORKLOADS, MAX_RANDOM_ID, PACED, WARM_REQUESTS, scaled, uniform
from quire.cli.bench_flags import (
    EVERY,
    check_load,
    chosen_figures,
    engine_config,
    keep_finished,
    sampling,
    settle_pace,
)
from quire.cli.bench_results import conditions_of, plot_title, save_result
from quire.types import ConfigError, EngineInfo

if TYPE_CHECKING:
    from quire.bench.drive import Bench
    from quire.bench.load.traces import TraceRequest
    from quire.bench.offline import OfferedLoad
    from quire.bench.run import Run


def run(args: argparse.Namespace) -> int:
    """Serve the load, or each of several workloads, and return the exit code."""
    check_load(args)
    if args.workload == EVERY and args.plot:
        raise ConfigError("a plot shows one workload, but --workload all runs several: leave out --plot")
    metrics, percentiles = chosen_figures(args)
    from quire.bench.drive import Bench
    from quire.bench.load.traces import read_trace
    from quire.bench.metrics import parse_goodput
    from quire.bench.report import details, print_serving, print_throughput

    parse_goodput(args.goodput)
    trace = read_trace(args.trace) if args.trace else []
    with Bench(engine_config(args)) as bench:
        if args.workload == EVERY:
            return _every(args, bench, percentiles)
        done, result = _serve(args, bench, percentiles, trace)
    print_serving(result, metrics, percentiles)
    print_throughput(result)
    if args.plot:
        from quire.bench.plots import plot_serving

        load_name = args.trace.name if args.trace else args.workload or "uniform lengths"
        plot_serving(done, plot_title(result, load_name, bench.machine.device), args.plot)
    save_result(args, {**result, **details(done)} if args.save_detailed else result)
    return 0


def _every(args: argparse.Namespace, bench: Bench, percentiles: list[float]) -> int:
    """Serve the workloads with a pace of their own one after the other, and print a line for each."""
    from quire.bench.report import print_workload

    results: list[dict[str, Any]] = []
    with keep_finished(results) as outcome:
        for name in PACED:
            one = copy.copy(args)
            one.workload = name
            results.append(_serve(one, bench, sorted({*percentiles, 99.0}), [])[1])
            print_workload(results[-1], first=len(results) == 1)
    save_result(args, {**conditions_of(args, bench.info), "workloads": results})
    return outcome.code


def _serve(
    args: argparse.Namespace, bench: Bench, percentiles: list[float], trace: list[TraceRequest]
) -> tuple[Run, dict[str, Any]]:
    """Serve the load that the flags describe, and return its run and its result."""
    from quire.bench.metrics import limits, serving
    from quire.bench.offline import throughput

    settle_pace(args)
    load = _load(args, bench.info, trace)
    warm_requests = WARM_REQUESTS if args.workload in PACED else 0
    done = throughput(
        bench, load, sampling(args), args.num_warmups, sys.stderr.isatty(), warm_requests=warm_requests
    )
    return done, {
        **conditions_of(args, bench.info),
        "workload": args.workload,
        "workload_scale": args.workload_scale,
        "num_prompts": len(load.work),
        "request_rate": "inf" if math.isinf(args.request_rate) else args.request_rate,
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        **serving(done, percentiles, args.goodput),
        **limits(done.steps, done.duration_s, bench.costs, bench.machine),
        **done.energy.figures(sum(one.output_len for one in done.completed)),
    }


def _load(args: argparse.Namespace, info: EngineInfo, trace: list[TraceRequest]) -> OfferedLoad:
    """Return the requests that the flags describe, and their arrival times."""
    from quire.bench.load.traces import replay
    from quire.bench.offline import OfferedLoad

    vocab = min(info.vocab_size, MAX_RANDOM_ID)
    if trace:
        longest = info.max_model_len
        work, times, too_long = replay(trace, vocab, longest, args.num_prompts, args.trace_scale)
        if too_long:
            print(f"Skipped {too_long} requests longer than max_model_len {longest}", file=sys.stderr)
        return OfferedLoad(work, times, args.max_concurrency)
    if args.workload:
        work = scaled(ALL_WORKLOADS[args.workload](vocab, args.num_prompts), args.workload_scale)
    else:
        work = uniform(vocab, args.num_prompts or 64, args.input_len, args.output_len)
    times = arrival_times(len(work), args.request_rate, args.burstiness, getattr(args, "seed", 0))
    return OfferedLoad(work, times, args.max_concurrency)
