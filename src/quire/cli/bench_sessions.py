"""`quire bench sessions`: conversations of several turns on an engine in this process."""

from __future__ import annotations

import argparse
from typing import Any, get_args

from quire.bench.load.sessions import SHAPES, Preset, sessions
from quire.bench.load.workloads import MAX_RANDOM_ID
from quire.cli.bench_flags import above_zero, engine_config, keep_finished, sampling
from quire.cli.bench_results import conditions_of, save_result

_COLUMNS = (
    ("sessions", "sessions", 9, ".0f"),
    ("turns", "turns", 7, ".0f"),
    ("mean_ttft_ms", "TTFT ms", 9, ".1f"),
    ("mean_later_ttft_ms", "later", 9, ".1f"),
    ("mean_turn_latency_ms", "turn ms", 10, ".1f"),
    ("mean_session_s", "session s", 11, ".2f"),
    ("output_throughput", "out tok/s", 11, ".1f"),
    ("cached_share", "cached", 8, ".0%"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose the sessions."""
    group = parser.add_argument_group("sessions")
    group.add_argument(
        "--kind", dest="kinds", choices=SHAPES, nargs="+", default=[*SHAPES], help="default: both"
    )
    group.add_argument(
        "--preset",
        choices=get_args(Preset),
        default="short",
        help="number and length of sessions (default short)",
    )
    group.add_argument(
        "--workload-scale",
        type=float,
        default=1.0,
        metavar="FACTOR",
        help="multiply all lengths, such as 0.5 for a short context (default 1)",
    )
    group.add_argument(
        "--num-warmups",
        type=int,
        default=1,
        help="times to serve the sessions before the timed run (default 1)",
    )


def run(args: argparse.Namespace) -> int:
    """Serve the sessions of each kind, print a line for each, and return the exit code."""
    above_zero(args, "workload_scale")
    from quire.bench.drive import Bench
    from quire.bench.sessions import run_sessions, session_figures

    results: list[dict[str, Any]] = []
    with Bench(engine_config(args)) as bench, keep_finished(results) as outcome:
        vocab = min(bench.info.vocab_size, MAX_RANDOM_ID)
        for kind in args.kinds:
            for i in range(args.num_warmups):
                warm_up = sessions(kind, args.preset, vocab, args.workload_scale, shift=i + 1)
                run_sessions(bench, warm_up, sampling(args))
            load = sessions(kind, args.preset, vocab, args.workload_scale)
            found = session_figures(run_sessions(bench, load, sampling(args)))
            results.append(
                {"kind": kind, "preset": args.preset, "workload_scale": args.workload_scale, **found}
            )
            if len(results) == 1:
                print(f"{'kind':<15}" + "".join(f"{label:>{width}}" for _, label, width, _ in _COLUMNS))
            print(
                f"{kind:<15}" + "".join(_cell(found[name], width, form) for name, _, width, form in _COLUMNS),
                flush=True,
            )
        conditions = conditions_of(args, bench.info)
    save_result(args, {**conditions, "results": results})
    return outcome.code


def _cell(value: float | None, width: int, form: str) -> str:
    return f"{'-' if value is None else format(value, form):>{width}}"
