"""`quire bench`: measurements on this machine, with the flags and metrics of `vllm bench`."""

from __future__ import annotations

import argparse
import itertools
import json
from typing import Any

from quire.cli.bench_attention import add_arguments as add_attention_arguments
from quire.cli.bench_attention import run as attention
from quire.cli.bench_compare import add_arguments as add_compare_arguments
from quire.cli.bench_compare import run as compare
from quire.cli.bench_flags import (
    NO_TEXT,
    add_arrival_arguments,
    add_figure_arguments,
    add_load_arguments,
    add_result_arguments,
    at_least_one,
    engine_config,
    keep_finished,
    sampling,
)
from quire.cli.bench_growth import add_arguments as add_growth_arguments
from quire.cli.bench_growth import run as growth
from quire.cli.bench_memory import add_arguments as add_memory_arguments
from quire.cli.bench_memory import run as memory
from quire.cli.bench_results import conditions_of, plot_title, save_result
from quire.cli.bench_serve import run as serve
from quire.cli.bench_serve_flags import add_arguments as add_serve_arguments
from quire.cli.bench_sessions import add_arguments as add_sessions_arguments
from quire.cli.bench_sessions import run as sessions
from quire.cli.bench_throughput import run as throughput
from quire.cli.flags import add_flags, add_model, engine_settings
from quire.cli.output_paths import output_file
from quire.config import EngineConfig
from quire.types import ConfigError, SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the kinds of benchmarks, each with its flags."""
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    host = kinds.add_parser("host", help="time per step of the scheduler and the step loop, without a model")
    host.add_argument("--rows", type=int, default=256, help="requests that decode at once (default 256)")
    host.add_argument("--steps", type=int, default=1000, help="steps to time (default 1000)")
    host.add_argument("--json", action="store_true", help="print one JSON object")
    throughput = kinds.add_parser(
        "throughput", help="rates and latencies of a load, sent at once or by arrival times"
    )
    add_load_arguments(throughput)
    add_arrival_arguments(throughput)
    add_figure_arguments(throughput)
    serve = kinds.add_parser("serve", help="rates and latencies of any server with an OpenAI API")
    add_serve_arguments(serve)
    latency = kinds.add_parser("latency", help="seconds per batch, one batch after the other")
    _add_latency_arguments(latency)
    growth = kinds.add_parser("growth", help="time over batch size, context and prompt length, and its limit")
    add_growth_arguments(growth)
    memory = kinds.add_parser("memory", help="KV memory reserved, used and wasted, by layout and batch size")
    add_memory_arguments(memory)
    sessions = kinds.add_parser("sessions", help="conversations of several turns: agents and chats")
    add_sessions_arguments(sessions)
    attention = kinds.add_parser(
        "attention", help="one layer's attention on each back end, and in a plain loop"
    )
    add_attention_arguments(attention)
    compare = kinds.add_parser(
        "compare", help="what one setting gains: parts, chunks, prefix cache, graphs, ..."
    )
    add_compare_arguments(compare)
    startup = kinds.add_parser("startup", help="seconds to the first token in fresh processes, by phase")
    startup.add_argument("--num-iters", type=int, default=3, help="processes to start (default 3)")
    startup.add_argument(
        "--output-json", type=output_file, metavar="FILE", help="write the figures to this file"
    )
    add_flags(startup, "engine", EngineConfig)
    shape = {"device", "dtype", "kv_cache_dtype"}
    add_flags(attention, "engine", EngineConfig, skip=set(EngineConfig.__dataclass_fields__) - shape)
    for kind in (throughput, latency, growth, memory, sessions, attention, compare, startup):
        add_model(kind)
    for kind in (throughput, latency, growth, memory, sessions, compare):
        add_result_arguments(kind)
        add_flags(kind, "engine", EngineConfig)
    for kind in (throughput, latency, sessions):
        add_flags(kind, "sampling", SamplingParams, skip=NO_TEXT)


def _add_latency_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--batch-size",
        type=int,
        nargs="+",
        default=[8],
        help="requests in a batch; several values make a sweep (default 8)",
    )
    for name, default, text in (("input", 32, "prompt"), ("output", 128, "output")):
        parser.add_argument(
            f"--{name}-len",
            type=int,
            nargs="+",
            default=[default],
            metavar="N",
            help=f"{text} tokens of a request; several values make a sweep (default {default})",
        )
    parser.add_argument(
        "--num-iters-warmup", type=int, default=3, help="batches to run before the timed ones (default 3)"
    )
    parser.add_argument("--num-iters", type=int, default=10, help="timed batches (default 10)")


def run(args: argparse.Namespace) -> int:
    """Run the chosen benchmark and return the exit code."""
    if getattr(args, "plot", None):
        from quire.bench.plots import check_plot

        check_plot(args.plot)
    kinds = {
        "host": _host,
        "throughput": throughput,
        "serve": serve,
        "latency": _latency,
        "growth": growth,
        "memory": memory,
        "sessions": sessions,
        "attention": attention,
        "compare": compare,
        "startup": _startup,
    }
    return kinds[args.kind](args)


def _latency(args: argparse.Namespace) -> int:
    at_least_one(args, "num_iters", "input_len", "output_len", "batch_size")
    if args.num_iters_warmup < 0:
        raise ConfigError(f"num_iters_warmup must be at least 0, got {args.num_iters_warmup}")
    from quire.bench.drive import Bench
    from quire.bench.offline import latency
    from quire.bench.report import print_batch, print_latency

    points = list(itertools.product(args.input_len, args.output_len, args.batch_size))
    lengths = len(args.input_len) * len(args.output_len)
    if args.plot and lengths > 1:
        raise ConfigError("plot takes one input_len and one output_len; several batch sizes make its curve")
    rounds = args.num_iters_warmup, args.num_iters
    batches: list[dict[str, Any]] = []
    sweeps = len(points) > 1
    with Bench(engine_config(args)) as bench, keep_finished(batches) as outcome:
        conditions = conditions_of(args, bench.info)
        for input_len, output_len, size in points:
            batches.append(latency(bench, size, input_len, output_len, *rounds, sampling(args)))
            if sweeps:
                print_batch(batches[-1], first=len(batches) == 1)
    if not sweeps:
        print_latency(batches[0])
    if args.plot:
        from quire.bench.plots import plot_sweep

        title = f"{args.input_len[0]} tokens in, {args.output_len[0]} out"
        plot_sweep(
            sorted(batches, key=lambda one: one["batch_size"]),
            plot_title(conditions, title, bench.machine.device),
            args.plot,
        )
    save_result(args, {**conditions, **({"batches": batches} if sweeps else batches[0])})
    return outcome.code


def _startup(args: argparse.Namespace) -> int:
    at_least_one(args, "num_iters")
    from quire.bench.report import save
    from quire.bench.startup import start_up

    settings = {"skip_tokenizer_init": True, **engine_settings(args)}
    starts = [start_up(settings) for _ in range(args.num_iters)]
    print(f"Seconds to the first token in {args.num_iters} fresh processes:")
    for phase in starts[0]:
        print(f"  {phase:<12}" + "".join(f"{one[phase]:>9.2f}" for one in starts))
    if args.output_json:
        save(args.output_json, {"engine": settings, "startups": starts})
    return 0


def _host(args: argparse.Namespace) -> int:
    at_least_one(args, "rows", "steps")
    from quire.bench.host import host_cost

    figures = host_cost(args.rows, args.steps)
    if args.json:
        print(json.dumps(figures))
        return 0
    print(
        f"Host time of a step with {figures['rows']:.0f} decode rows, median of {figures['steps']:.0f} steps:"
    )
    for name in ("step", "schedule", "retire", "message"):
        print(f"  {name:<9} {figures[f'{name}_us']:7.0f} us")
    print(f"  99 % of steps take at most {figures['step_p99_us']:.0f} us")
    return 0
