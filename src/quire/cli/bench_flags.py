"""Flags of `quire bench`, some of which `quire profile` shares, and their checks."""

from __future__ import annotations

import argparse
import contextlib
import math
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from quire import __version__
from quire.bench.load.workloads import ALL_WORKLOADS, PACES
from quire.cli.flags import engine_settings, given
from quire.cli.interrupt import INTERRUPTED
from quire.cli.output_paths import output_file, output_folder
from quire.config import EngineConfig
from quire.types import ConfigError, SamplingParams

EVERY = "all"  # value of --workload that runs all workloads of `PACED`
_METRICS = ("ttft", "tpot", "itl", "e2el")
# Sampling fields without effect on answers of a fixed length that are not detokenized.
NO_TEXT = {
    "n", "max_tokens", "min_tokens", "ignore_eos", "detokenize", "stop", "stop_token_ids", "bad_words",
    "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens", "prompt_logprobs",
}  # fmt: skip


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose the requests."""
    group = parser.add_argument_group("load")
    source = group.add_mutually_exclusive_group()
    source.add_argument(
        "--workload",
        choices=[*ALL_WORKLOADS, EVERY],
        help="fixed set of requests (default: requests of equal length); some have their own pace, and `all` runs these",
    )
    source.add_argument(
        "--trace", type=Path, metavar="FILE", help="replay an Azure (CSV) or Mooncake (JSON lines) trace"
    )
    group.add_argument(
        "--trace-scale", type=float, default=1.0, help="replay the trace this many times faster (default 1)"
    )
    add_scale_argument(group)
    group.add_argument(
        "--num-prompts", type=int, help="number of requests (default: all of the workload or trace, else 64)"
    )
    group.add_argument(
        "--input-len", type=int, default=128, help="prompt tokens of requests of equal length (default 128)"
    )
    group.add_argument(
        "--output-len", type=int, default=128, help="output tokens of requests of equal length (default 128)"
    )


def add_scale_argument(group: argparse._ArgumentGroup) -> None:
    """Add the flag that shortens a workload."""
    group.add_argument(
        "--workload-scale",
        type=float,
        default=1.0,
        metavar="FACTOR",
        help="multiply the lengths of the workload, such as 0.25 for a small machine (default 1)",
    )


def settle_pace(args: argparse.Namespace) -> None:
    """Fill in the arrivals of a workload that has its own pace, where the flags leave them open."""
    pace = PACES.get(args.workload)
    if pace is None:
        return
    if math.isinf(args.request_rate):
        args.request_rate, args.burstiness = pace.rate, pace.burstiness
    if args.max_concurrency is None:
        args.max_concurrency = pace.max_concurrency


def add_arrival_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that decide when requests are sent."""
    group = parser.add_argument_group("arrivals")
    group.add_argument(
        "--request-rate", type=float, default=math.inf, help="requests per second (default inf: all at once)"
    )
    group.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        help="shape of the arrival gaps: below 1 bursts, 1 is a Poisson process, above 1 more even (default 1)",
    )
    group.add_argument(
        "--max-concurrency", type=int, help="most requests in flight at once (default: no limit)"
    )
    group.add_argument(
        "--num-warmups",
        type=int,
        default=0,
        help="warm-ups before the timed run: whole loads in `throughput`, requests in `serve` (default 0)",
    )


def add_figure_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose the metrics to report."""
    group = parser.add_argument_group("figures")
    group.add_argument(
        "--percentile-metrics",
        default="ttft,tpot,itl",
        help="metrics with percentiles, out of ttft, tpot, itl, e2el (default ttft,tpot,itl)",
    )
    group.add_argument(
        "--metric-percentiles", default="99", help="percentiles to print, such as 50,90,99 (default 99)"
    )
    group.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="METRIC:MS",
        help="count the requests within these limits, such as ttft:500 tpot:50",
    )
    group.add_argument(
        "--save-detailed", action="store_true", help="add the lengths and times of each request to the result"
    )


def add_result_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say where the result is written."""
    group = parser.add_argument_group("results")
    group.add_argument(
        "--output-json", type=output_file, metavar="FILE", help="write the result to this file"
    )
    group.add_argument(
        "--save-result", action="store_true", help="write the result to a file named after the run"
    )
    group.add_argument(
        "--result-dir", type=output_folder, default=Path(), help="folder of --save-result (default: here)"
    )
    group.add_argument("--result-filename", help="file name of --save-result (default: named after the run)")
    group.add_argument(
        "--label",
        help="label of the run: prefix of the file name of --save-result, and a field of the result",
    )
    group.add_argument(
        "--plot", type=output_file, metavar="FILE", help="plot the result to this .png, .svg or .pdf file"
    )


@dataclass(slots=True)
class SweepOutcome:
    """The exit code of a measurement of several levels."""

    code: int = 0


@contextlib.contextmanager
def keep_finished(levels: Sequence[object]) -> Iterator[SweepOutcome]:
    """End this context on Ctrl-C, so that the finished `levels` are reported; without one, pass Ctrl-C on."""
    outcome = SweepOutcome()
    try:
        yield outcome
    except KeyboardInterrupt:
        if not levels:
            raise
        outcome.code = INTERRUPTED
        print(f"quire: interrupted; the results hold the {len(levels)} finished levels", file=sys.stderr)


def machine_line(device: str | None = None) -> str:
    """Return the line below the title of a plot: machine, version and date.

    Args:
        device: name of the GPU or CPU; None for the machine that this process runs on.
    """
    return f"{device or _processor()}, Quire {__version__}, {datetime.now():%Y-%m-%d}"


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """Return the engine settings that were given, without a tokenizer."""
    return EngineConfig(**{"skip_tokenizer_init": True, **engine_settings(args)})


def sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling fields that were given; decoding is greedy by default."""
    return {"temperature": 0.0, **given(args, SamplingParams)}


def at_least_one(args: argparse.Namespace, *names: str) -> None:
    """Raise ConfigError if one of the flags `names` is, or holds, a number below 1."""
    for name in names:
        given = getattr(args, name)
        for value in given if isinstance(given, list) else [given]:
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")


def above_zero(args: argparse.Namespace, *names: str) -> None:
    """Raise ConfigError if one of the flags `names` is not above 0, or is a scale that is not finite."""
    for name in names:
        value = getattr(args, name)
        if not value > 0:
            raise ConfigError(f"{name} must be above 0, got {value}")
        if name.endswith("_scale") and math.isinf(value):
            raise ConfigError(f"{name} must be finite, got {value}")


def check_load(args: argparse.Namespace) -> None:
    """Raise ConfigError for an impossible load, before an engine is built for it."""
    at_least_one(args, "num_prompts", "max_concurrency", "input_len", "output_len")
    above_zero(args, "request_rate", "burstiness", "trace_scale", "workload_scale")
    if args.trace and not math.isinf(args.request_rate):
        raise ConfigError("a trace has its own arrival times: use --trace-scale instead of --request-rate")


def chosen_figures(args: argparse.Namespace) -> tuple[list[str], list[float]]:
    """Return the metrics to print and the percentiles to compute.

    Raises:
        ConfigError: for an unknown metric or a percentile outside of 0 to 100.
    """
    metrics = args.percentile_metrics.split(",")
    if unknown := set(metrics) - set(_METRICS):
        raise ConfigError(f"percentile_metrics must be of {', '.join(_METRICS)}, got {', '.join(unknown)}")
    try:
        percentiles = [float(p) for p in args.metric_percentiles.split(",")]
    except ValueError:
        percentiles = [-1.0]
    if not all(0 <= p <= 100 for p in percentiles):
        raise ConfigError(
            f"metric_percentiles must be numbers from 0 to 100, got {args.metric_percentiles!r}"
        )
    return metrics, percentiles
