"""Flags of `quire bench`, some of `quire profile`, and what they mean."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from quire.bench.load.workloads import WORKLOADS
from quire.cli.flags import given
from quire.config import EngineConfig
from quire.types import ConfigError, SamplingParams

MOST_IDS = 100_000  # random token ids are below this: those above are often special
_METRICS = ("ttft", "tpot", "itl", "e2el")
# What an answer of a given length, without text, has no use for.
NO_TEXT = {
    "n", "max_tokens", "min_tokens", "ignore_eos", "detokenize", "stop", "stop_token_ids", "bad_words",
    "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens", "prompt_logprobs",
}  # fmt: skip


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    """Which requests."""
    group = parser.add_argument_group("load")
    source = group.add_mutually_exclusive_group()
    source.add_argument(
        "--workload", choices=WORKLOADS, help="a fixed set of requests (default: uniform lengths)"
    )
    source.add_argument(
        "--trace", type=Path, metavar="FILE", help="replay an Azure (CSV) or Mooncake (JSON lines) trace"
    )
    group.add_argument(
        "--trace-scale", type=float, default=1.0, help="replay so many times faster (default 1)"
    )
    group.add_argument(
        "--num-prompts", type=int, help="requests (default: those of the workload or trace, or 64)"
    )
    group.add_argument(
        "--input-len", type=int, default=128, help="tokens in, of uniform lengths (default 128)"
    )
    group.add_argument(
        "--output-len", type=int, default=128, help="tokens out, of uniform lengths (default 128)"
    )


def add_arrival_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("arrivals")
    group.add_argument(
        "--request-rate", type=float, default=math.inf, help="requests a second (default inf: all at once)"
    )
    group.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        help="of the gaps: below 1 bursts, 1 Poisson, above even (default 1)",
    )
    group.add_argument("--max-concurrency", type=int, help="most requests open at once (default: no limit)")
    group.add_argument("--num-warmups", type=int, default=0, help="runs before the timed one (default 0)")


def add_figure_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("figures")
    group.add_argument(
        "--percentile-metrics",
        default="ttft,tpot,itl",
        help="of ttft, tpot, itl, e2el (default ttft,tpot,itl)",
    )
    group.add_argument("--metric-percentiles", default="99", help="e.g. 50,90,99 (default 99)")
    group.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="METRIC:MS",
        help="count requests within limits: ttft:500 tpot:50",
    )
    group.add_argument(
        "--save-detailed", action="store_true", help="add lengths and times of each request to the result"
    )


def add_result_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("results")
    group.add_argument("--output-json", type=Path, metavar="FILE", help="write the figures to this file")
    group.add_argument(
        "--save-result", action="store_true", help="write the figures to a file named after the run"
    )
    group.add_argument(
        "--result-dir", type=Path, default=Path(), help="folder of --save-result (default: here)"
    )
    group.add_argument("--result-filename", help="file name of --save-result, instead of one after the run")
    group.add_argument("--label", help="begins the file name of --save-result, and stands in the result")
    group.add_argument("--plot", type=Path, metavar="FILE", help="draw the result: .png, .svg or .pdf")


def engine_config(args: argparse.Namespace) -> EngineConfig:
    return EngineConfig(**{"skip_tokenizer_init": True, **given(args, EngineConfig)})


def sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Greedy, unless the flags say otherwise."""
    return {"temperature": 0.0, **given(args, SamplingParams)}


def at_least_one(args: argparse.Namespace, *names: str) -> None:
    """Raise ConfigError for a flag that was given as less than 1, or holds such a number."""
    for name in names:
        given = getattr(args, name)
        for value in given if isinstance(given, list) else [given]:
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")


def check_load(args: argparse.Namespace) -> None:
    """Raise ConfigError for a load that cannot be, before anything is built for it."""
    at_least_one(args, "num_prompts", "max_concurrency", "input_len", "output_len")
    for name in ("request_rate", "burstiness", "trace_scale"):
        if not getattr(args, name) > 0:
            raise ConfigError(f"{name} must be above 0, got {getattr(args, name)}")
    if args.trace and not math.isinf(args.request_rate):
        raise ConfigError("a trace has arrival times of its own: --trace-scale instead of --request-rate")


def chosen_figures(args: argparse.Namespace) -> tuple[list[str], list[float]]:
    """Metrics to print and percentiles to compute."""
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
