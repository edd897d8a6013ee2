"""`quire plan`: the rate that this machine sustains within latency targets, and how many of them a load needs."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.bench_flags import above_zero, add_result_arguments, at_least_one, engine_config
from quire.cli.bench_results import conditions_of, save_result
from quire.cli.flags import add_flags, add_model
from quire.config import EngineConfig
from quire.serve.settings import served_config
from quire.types import ConfigError

if TYPE_CHECKING:
    from quire.bench.capacity import LatencyTargets

_TARGET = re.compile(r"(ttft|itl)=(\d+(?:\.\d+)?)(ms|s)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the plan, of the results and of the engine."""
    add_model(parser)
    group = parser.add_argument_group("plan")
    group.add_argument(
        "--trace", type=Path, metavar="FILE", help="an Azure (CSV) or Mooncake (JSON lines) trace"
    )
    group.add_argument(
        "--input-len", type=int, default=512, help="prompt tokens without a trace (default 512)"
    )
    group.add_argument(
        "--output-len", type=int, default=128, help="output tokens without a trace (default 128)"
    )
    group.add_argument(
        "--request-rate",
        type=float,
        default=1.0,
        help="requests per second to serve without a trace (default 1)",
    )
    group.add_argument("--num-prompts", type=int, default=200, help="requests of a simulation (default 200)")
    group.add_argument(
        "--target",
        default="ttft=1s,itl=50ms",
        help="limits such as ttft=1s,itl=40ms (default ttft=1s,itl=50ms)",
    )
    group.add_argument("--percentile", type=float, default=99.0, help="of the latencies (default 99)")
    group.add_argument("--gpus", type=int, default=1, help="engines that share the load (default 1)")
    group.add_argument(
        "--check", action="store_true", help="replay the planned rate on the engine and compare"
    )
    add_result_arguments(parser)
    add_flags(parser, "engine", EngineConfig)


def run(args: argparse.Namespace) -> int:
    """Learn step times, search for the rate of each setting, print them and return the exit code."""
    at_least_one(args, "input_len", "output_len", "num_prompts", "gpus")
    above_zero(args, "request_rate")
    targets, config = _targets(args.target, args.percentile), served_config(engine_config(args))
    if config.spec_method != "off":
        raise ConfigError("plan cannot simulate draft tokens: leave spec_method off")
    from quire.bench.capacity import CapacityPlanner, engines_for, figures, learn_step_times
    from quire.bench.cost import Machine
    from quire.bench.drive import Bench

    rows: list[dict[str, Any]] = []
    with Bench(config, Machine("not measured", 1.0, 1.0)) as bench:
        work, arrivals = _load(args, bench)
        print(f"Learning step times from {min(len(work), 64)} requests ...", flush=True)
        learned = learn_step_times(bench, work)
        planner = CapacityPlanner(bench, learned, work, arrivals, targets)
        print(f"Median error of predicted step times: {100 * (learned.model.median_error or 0):.1f} %")
        print(f"{'settings':<34}{'req/s':>9}{'out tok/s':>11}{'TTFT ms':>10}{'ITL ms':>9}{'engines':>9}")
        best = None
        for settings in planner.alternatives():
            name = ", ".join(f"{k} {v:g}" for k, v in settings.items() if v is not None) or "as given"
            if (found := planner.capacity(settings)) is None:
                print(f"{name:<34}  misses the targets even when idle")
                continue
            needed = engines_for(planner.recorded_rate, found)
            print(
                f"{name:<34}{found.requests_per_s:>9.2f}{found.output_tokens_per_s:>11.0f}{found.ttft_ms:>10.0f}"
                f"{found.itl_ms:>9.1f}{needed:>9}",
                flush=True,
            )
            rows.append({**found.as_dict(), "engines_for_load": needed})
            best = found if best is None or found.requests_per_s > best.requests_per_s else best
        result = {**conditions_of(args, bench.info), "recorded_rate": planner.recorded_rate, "plans": rows}
        if best is None:
            print("No setting meets the targets: raise them, or use a faster machine or a smaller model.")
        else:
            print(
                f"The load has {planner.recorded_rate:.2f} requests/s: {engines_for(planner.recorded_rate, best)} "
                f"engine(s) are needed; {args.gpus} sustain {args.gpus * best.requests_per_s:.2f} requests/s."
            )
    if best is not None and args.check:
        from dataclasses import replace

        with Bench(replace(config, **best.settings), Machine("not measured", 1.0, 1.0)) as bench:
            bench.run(work[:8], {"temperature": 0.0})
            times = [at * planner.recorded_rate / best.requests_per_s for at in arrivals]
            ttft, itl = figures(bench.run(work, {"temperature": 0.0}, times), targets)
        result["checked"] = {"ttft_ms": ttft, "itl_ms": itl}
        print(f"Replayed at {best.requests_per_s:.2f} requests/s: TTFT {ttft:.0f} ms, ITL {itl:.1f} ms")
    save_result(args, result)
    return 0 if best is not None else 1


def _load(args: argparse.Namespace, bench: Any) -> tuple[Any, list[float]]:
    from quire.bench.load.arrivals import arrival_times
    from quire.bench.load.traces import read_trace, replay
    from quire.bench.load.workloads import MAX_RANDOM_ID, uniform

    vocab = min(bench.info.vocab_size, MAX_RANDOM_ID)
    if args.trace:
        work, times, _ = replay(read_trace(args.trace), vocab, bench.info.max_model_len, args.num_prompts)
        return work, times
    work = uniform(vocab, args.num_prompts, args.input_len, args.output_len)
    return work, arrival_times(len(work), args.request_rate, 1.0, 0)


def _targets(text: str, percentile: float) -> LatencyTargets:
    """Return the limits of a text such as `ttft=1s,itl=40ms`. Raise ConfigError for any other."""
    from quire.bench.capacity import LatencyTargets

    if not 0 < percentile <= 100:
        raise ConfigError(f"percentile must be above 0 and at most 100, got {percentile:g}")
    found: dict[str, float] = {}
    for part in text.split(","):
        if (match := _TARGET.fullmatch(part.strip())) is None:
            raise ConfigError(f"target must be such as ttft=1s,itl=40ms, got {text!r}")
        found[f"{match[1]}_ms"] = float(match[2]) * (1e3 if match[3] == "s" else 1.0)
    return LatencyTargets(**found, percentile=percentile)
