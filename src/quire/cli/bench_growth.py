"""`quire bench growth`: how step time and time to first token grow, beside the machine's limit."""

from __future__ import annotations

import argparse
import sys

from quire.cli.bench_flags import at_least_one, engine_config, keep_finished
from quire.cli.bench_results import conditions_of, plot_title, save_result

_BATCH_SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
_CONTEXTS = [128, 512, 2048, 8192, 32768, 131072]
_PROMPT_LENS = [32, 128, 512, 2048, 8192, 32768, 131072]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose the points of the curves."""
    group = parser.add_argument_group(
        "curves", "Points that do not fit the engine are left out, with a line each."
    )

    def add(name: str, default: list[int], text: str) -> None:
        shown = " ".join(map(str, default))
        group.add_argument(
            f"--{name}", type=int, nargs="*", default=default, metavar="N", help=f"{text} (default {shown})"
        )

    add("batch-sizes", _BATCH_SIZES, "rows that decode at once")
    group.add_argument(
        "--base-context", type=int, default=128, help="context of these rows, in tokens (default 128)"
    )
    add("contexts", _CONTEXTS, "contexts of decoding rows, in tokens")
    add("context-batch-sizes", [1, 8], "rows that decode at each of these contexts")
    add("prompt-lens", _PROMPT_LENS, "tokens of a prompt whose first token is timed")


def run(args: argparse.Namespace) -> int:
    """Measure the curves, print each point when it is done, and return the exit code."""
    at_least_one(args, "batch_sizes", "base_context", "contexts", "context_batch_sizes", "prompt_lens")
    from quire.bench.drive import Bench
    from quire.bench.growth import GrowthPlan, GrowthPoint, measure_growth, medians
    from quire.bench.report import print_growth_point, print_medians

    points: list[GrowthPoint] = []
    with Bench(engine_config(args)) as bench, keep_finished(points) as outcome:
        conditions = {**conditions_of(args, bench.info), "machine": bench.machine.device}
        batches, contexts, rows, prompts = (
            sorted(set(values))
            for values in (args.batch_sizes, args.contexts, args.context_batch_sizes, args.prompt_lens)
        )
        plan, skipped = GrowthPlan(batches, args.base_context, contexts, rows, prompts).fitted(bench.info)
        for line in skipped:
            print(f"quire: {line}", file=sys.stderr)
        for point in measure_growth(bench, plan):
            points.append(point)
            print_growth_point(point, first=len(points) == 1)
    print_medians(medians(points))
    if args.plot:
        from quire.bench.growth_plot import plot_growth

        plot_growth(points, plot_title(conditions, "growth", bench.machine.device), args.plot)
    save_result(args, {**conditions, "points": [point.as_dict() for point in points]})
    return outcome.code
