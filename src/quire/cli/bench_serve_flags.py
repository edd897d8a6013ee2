"""Flags of `quire bench serve`: those of `vllm bench serve`, and a few of `quire bench throughput`."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from quire.bench.load.workloads import WORKLOADS
from quire.cli.bench_flags import (
    add_arrival_arguments,
    add_figure_arguments,
    add_result_arguments,
    at_least_one,
    chosen_figures,
)
from quire.types import ConfigError

ENDPOINTS = {
    "openai": "/v1/completions",
    "vllm": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
}
DATASETS = ("random", "sharegpt", "custom", "prefix_repetition", "workload", "trace")
FILE_DATASETS = ("sharegpt", "custom", "trace")
USERS = [1, 2, 4, 8, 16, 32, 64, 128]
_SAMPLING = (
    ("temperature", float),
    ("top_p", float),
    ("top_k", int),
    ("min_p", float),
    ("frequency_penalty", float),
    ("presence_penalty", float),
    ("repetition_penalty", float),
    ("logprobs", int),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _server(parser)
    _dataset(parser)
    add_arrival_arguments(parser)
    group = parser.add_argument_group("more arrivals")
    group.add_argument(
        "--users",
        nargs="*",
        type=int,
        metavar="N",
        help="load test: so many users, each sending a request when its last one is answered; a table and a plot "
        f"of each number (without numbers: {' '.join(map(str, USERS))})",
    )
    group.add_argument("--ramp-up-strategy", choices=("linear", "exponential"), help="let the rate grow")
    group.add_argument("--ramp-up-start-rps", type=float, help="requests a second at first")
    group.add_argument("--ramp-up-end-rps", type=float, help="requests a second at last")
    _sampling(parser)
    add_figure_arguments(parser)
    add_result_arguments(parser)
    group = parser.add_argument_group("more results")
    group.add_argument("--append-result", action="store_true", help="add a line to the result file")
    group.add_argument(
        "--metadata", nargs="*", default=[], metavar="KEY=VALUE", help="stands in the result file"
    )
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def _server(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--backend", choices=ENDPOINTS, default="openai", help="which API (default openai)")
    group.add_argument("--base-url", help="such as http://host:8000; instead of --host and --port")
    group.add_argument("--host", default="127.0.0.1", help="default 127.0.0.1")
    group.add_argument("--port", type=int, default=8000, help="default 8000")
    group.add_argument(
        "--endpoint", help="path of the route (default: of --backend); .../chat/completions: chats"
    )
    group.add_argument("--header", nargs="*", default=[], metavar="KEY=VALUE", help="sent with each request")
    group.add_argument("--model", help="name of the model (default: the server's first)")
    group.add_argument("--served-model-name", help="name in requests, if another than --model")
    group.add_argument(
        "--tokenizer", help="makes texts for chats, and counts those of files (default: --model)"
    )
    group.add_argument("--request-id-prefix", default="", help="of the X-Request-Id of each request")
    group.add_argument("--insecure", action="store_true", help="do not check the server's certificate")
    group.add_argument(
        "--ready-check-timeout-sec",
        type=float,
        default=0.0,
        help="how long to wait for the server (default 0)",
    )


def _dataset(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("dataset")
    group.add_argument("--dataset-name", choices=DATASETS, help="default random")
    group.add_argument("--dataset-path", type=Path, metavar="FILE", help="of sharegpt, custom and trace")
    group.add_argument("--workload", choices=WORKLOADS, help="a fixed set, as in `quire bench throughput`")
    group.add_argument(
        "--trace", type=Path, metavar="FILE", help="an Azure or Mooncake trace, with its times"
    )
    group.add_argument(
        "--trace-scale", type=float, default=1.0, help="replay so many times faster (default 1)"
    )
    group.add_argument("--num-prompts", type=int, help="requests (default 1000, or all of the set)")
    group.add_argument("--input-len", type=int, help="tokens in, whatever the dataset calls them")
    group.add_argument("--output-len", type=int, help="tokens out, whatever the dataset calls them")
    numbers: tuple[tuple[str, Any, str], ...] = (
        ("--random-input-len", 1024, "tokens in"),
        ("--random-output-len", 128, "tokens out"),
        ("--random-range-ratio", 0.0, "lengths vary by this share, below 1"),
        ("--random-prefix-len", 0, "tokens that all prompts begin with, besides"),
        ("--custom-output-len", 256, "tokens out"),
        ("--prefix-repetition-prefix-len", 256, "tokens of a shared prefix"),
        ("--prefix-repetition-suffix-len", 256, "tokens of a prompt's own"),
        ("--prefix-repetition-num-prefixes", 10, "shared prefixes"),
        ("--prefix-repetition-output-len", 128, "tokens out"),
    )
    for name, default, help in numbers:
        group.add_argument(name, type=type(default), default=default, help=f"{help} (default {default})")
    group.add_argument("--sharegpt-output-len", type=int, help="tokens out (default: as recorded)")
    group.add_argument("--seed", type=int, default=0, help="of prompts and arrivals (default 0)")


def _sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("fields of each request (not sent unless given)")
    for name, kind in _SAMPLING:
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, dest=name)
    group.add_argument(
        "--ignore-eos", action="store_true", help="answers of full length (always so for made-up prompts)"
    )
    group.add_argument("--extra-body", type=json.loads, default={}, metavar="JSON", help="further fields")


def check(args: argparse.Namespace) -> None:
    """Raise ConfigError for what cannot be run; settle what follows from other flags."""
    if args.workload or args.trace:
        args.dataset_name = "workload" if args.workload else "trace"
        args.dataset_path = args.trace
    args.dataset_name = args.dataset_name or "random"
    if args.dataset_name in FILE_DATASETS and args.dataset_path is None:
        raise ConfigError(f"--dataset-name {args.dataset_name} needs --dataset-path FILE")
    if args.dataset_name == "workload" and not args.workload:
        raise ConfigError("--dataset-name workload needs --workload NAME")
    at_least_one(args, "num_prompts", "max_concurrency", "input_len", "output_len", "random_input_len")
    at_least_one(args, "random_output_len", "prefix_repetition_num_prefixes", "prefix_repetition_output_len")
    for name in ("request_rate", "burstiness", "trace_scale"):
        if not getattr(args, name) > 0:
            raise ConfigError(f"{name} must be above 0, got {getattr(args, name)}")
    if not 0 <= args.random_range_ratio < 1:
        raise ConfigError(f"random_range_ratio must be at least 0 and below 1, got {args.random_range_ratio}")
    if not isinstance(args.extra_body, dict):
        raise ConfigError("extra_body must be a JSON object")
    chosen_figures(args)
    pairs(args.header, "header"), pairs(args.metadata, "metadata")
    _check_arrivals(args)


def _check_arrivals(args: argparse.Namespace) -> None:
    ramp = (args.ramp_up_strategy, args.ramp_up_start_rps, args.ramp_up_end_rps)
    rated = not math.isinf(args.request_rate)
    if any(part is not None for part in ramp):
        if None in ramp or min(args.ramp_up_start_rps, args.ramp_up_end_rps) <= 0:
            raise ConfigError(
                "a ramp needs --ramp-up-strategy, --ramp-up-start-rps and --ramp-up-end-rps, both above 0"
            )
        if rated:
            raise ConfigError("a ramp has rates of its own: leave --request-rate out")
    if args.dataset_name == "trace" and (rated or args.ramp_up_strategy):
        raise ConfigError("a trace has arrival times of its own: --trace-scale instead of rates")
    if args.users is not None:
        args.users = sorted(set(args.users)) or USERS
        if args.users[0] < 1:
            raise ConfigError(f"users must be at least 1, got {args.users[0]}")
        if rated or args.ramp_up_strategy or args.max_concurrency or args.dataset_name == "trace":
            raise ConfigError(
                "users send when they have their answers: leave rates, traces and --max-concurrency out"
            )


def pairs(given: list[str], flag: str) -> dict[str, str]:
    """`["a=b"]` -> {"a": "b"}."""
    found = {}
    for pair in given:
        name, sign, value = pair.partition("=")
        if not (name and sign):
            raise ConfigError(f"{flag} must be KEY=VALUE, got {pair!r}")
        found[name] = value
    return found


def request_fields(args: argparse.Namespace, model: str) -> dict[str, Any]:
    """What every request's body carries."""
    made_up = args.dataset_name not in ("sharegpt", "custom")
    fields: dict[str, Any] = {"model": args.served_model_name or model}
    fields |= {name: value for name, _ in _SAMPLING if (value := getattr(args, name)) is not None}
    if args.ignore_eos or made_up:
        fields["ignore_eos"] = True
    return fields | args.extra_body
