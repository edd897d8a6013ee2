"""Flags of `quire bench serve`: those of `vllm bench serve` and some of `quire bench throughput`."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from quire.bench.load.workloads import ALL_WORKLOADS
from quire.cli.bench_flags import (
    EVERY,
    above_zero,
    add_arrival_arguments,
    add_figure_arguments,
    add_result_arguments,
    add_scale_argument,
    at_least_one,
    chosen_figures,
)
from quire.cli.flags import check_one_model, json_object
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
    """Add all flags of `quire bench serve`."""
    _server(parser)
    _dataset(parser)
    add_arrival_arguments(parser)
    group = parser.add_argument_group("more arrivals")
    group.add_argument(
        "--users",
        nargs="*",
        type=int,
        metavar="N",
        help="load test with N users, each of which sends a request when its last one is answered; one row of a table for "
        f"each N (without a number: {' '.join(map(str, USERS))})",
    )
    group.add_argument(
        "--ramp-up-strategy", choices=("linear", "exponential"), help="increase the request rate in this way"
    )
    group.add_argument("--ramp-up-start-rps", type=float, help="requests per second at the start")
    group.add_argument("--ramp-up-end-rps", type=float, help="requests per second at the end")
    _sampling(parser)
    add_figure_arguments(parser)
    add_result_arguments(parser)
    group = parser.add_argument_group("more results")
    group.add_argument(
        "--append-result",
        action="store_true",
        help="append a line to the result file, whose name then has no time",
    )
    group.add_argument(
        "--metadata", nargs="*", default=[], metavar="KEY=VALUE", help="fields to add to the result"
    )
    group.add_argument("--disable-tqdm", action="store_true", help="show no progress bar")


def _server(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument(
        "--backend", choices=ENDPOINTS, default="openai", help="API of the server (default openai)"
    )
    group.add_argument(
        "--base-url", help="address of the server, such as http://host:8000, instead of --host and --port"
    )
    group.add_argument("--host", default="127.0.0.1", help="host of the server (default 127.0.0.1)")
    group.add_argument("--port", type=int, default=8000, help="port of the server (default 8000)")
    group.add_argument(
        "--endpoint",
        help="path of the API (default: that of --backend); one that ends in /chat/completions gets chats",
    )
    group.add_argument(
        "--header", nargs="*", default=[], metavar="KEY=VALUE", help="HTTP headers of each request"
    )
    parser.add_argument(
        "model_name",
        nargs="?",
        metavar="MODEL",
        help="name of the model (default: the first that the server lists)",
    )
    group.add_argument("-m", "--model", help="name of the model (default: the first that the server lists)")
    group.add_argument("--served-model-name", help="model name in requests, if it differs from --model")
    group.add_argument(
        "--tokenizer",
        help="tokenizer folder or id, to write chats and count the tokens of datasets (default: --model)",
    )
    group.add_argument("--request-id-prefix", default="", help="prefix of the X-Request-Id of each request")
    group.add_argument(
        "--insecure", action="store_true", help="do not verify the TLS certificate of the server"
    )
    group.add_argument(
        "--ready-check-timeout-sec",
        type=float,
        default=0.0,
        help="seconds to wait for the server (default 0)",
    )


def _dataset(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("dataset")
    group.add_argument("--dataset-name", choices=DATASETS, help="source of the prompts (default random)")
    group.add_argument(
        "--dataset-path", type=Path, metavar="FILE", help="file of the sharegpt, custom or trace dataset"
    )
    group.add_argument(
        "--workload",
        choices=[*ALL_WORKLOADS, EVERY],
        help="fixed set of requests, as in `quire bench throughput`",
    )
    add_scale_argument(group)
    group.add_argument(
        "--trace", type=Path, metavar="FILE", help="Azure or Mooncake trace, sent at its recorded times"
    )
    group.add_argument(
        "--trace-scale", type=float, default=1.0, help="replay the trace this many times faster (default 1)"
    )
    group.add_argument(
        "--num-prompts", type=int, help="number of requests (default 100, or all of a workload or trace)"
    )
    group.add_argument("--input-len", type=int, help="prompt tokens; replaces the flag of the chosen dataset")
    group.add_argument(
        "--output-len", type=int, help="output tokens; replaces the flag of the chosen dataset"
    )
    numbers: tuple[tuple[str, Any, str], ...] = (
        ("--random-input-len", 1024, "prompt tokens"),
        ("--random-output-len", 128, "output tokens"),
        ("--random-range-ratio", 0.0, "share by which lengths vary, at least 0 and below 1"),
        ("--random-prefix-len", 0, "additional tokens that all prompts start with"),
        ("--custom-output-len", 256, "output tokens"),
        ("--prefix-repetition-prefix-len", 256, "tokens of a shared prefix"),
        ("--prefix-repetition-suffix-len", 256, "tokens of a prompt after its prefix"),
        ("--prefix-repetition-num-prefixes", 10, "number of shared prefixes"),
        ("--prefix-repetition-output-len", 128, "output tokens"),
    )
    for name, default, help in numbers:
        group.add_argument(name, type=type(default), default=default, help=f"{help} (default {default})")
    group.add_argument("--sharegpt-output-len", type=int, help="output tokens (default: as in the dataset)")
    group.add_argument("--seed", type=int, default=0, help="seed of prompts and arrival times (default 0)")


def _sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("fields of each request (not sent unless given)")
    for name, kind in _SAMPLING:
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, dest=name)
    group.add_argument(
        "--ignore-eos",
        action="store_true",
        help="generate answers of full length (always on for synthetic prompts)",
    )
    group.add_argument(
        "--extra-body", type=json_object, default={}, metavar="JSON", help="more fields of the request body"
    )


def check(args: argparse.Namespace) -> None:
    """Raise ConfigError for an impossible combination of flags, and fill in the flags that follow from others."""
    if args.model_name is not None:
        check_one_model(args.model_name, {} if args.model is None else {"model": args.model})
        args.model = args.model_name
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
    above_zero(args, "request_rate", "burstiness", "trace_scale", "workload_scale")
    if not 0 <= args.random_range_ratio < 1:
        raise ConfigError(f"random_range_ratio must be at least 0 and below 1, got {args.random_range_ratio}")
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
            raise ConfigError("a ramp has its own rates: leave out --request-rate")
    if args.dataset_name == "trace" and (rated or args.ramp_up_strategy):
        raise ConfigError("a trace has its own arrival times: use --trace-scale instead of rates")
    if args.users is not None:
        args.users = sorted(set(args.users)) or USERS
        if args.users[0] < 1:
            raise ConfigError(f"users must be at least 1, got {args.users[0]}")
        if rated or args.ramp_up_strategy or args.max_concurrency or args.dataset_name == "trace":
            raise ConfigError(
                "--users sends a request when the last one is answered: leave out rates, traces and --max-concurrency"
            )


def pairs(given: list[str], flag: str) -> dict[str, str]:
    """Parse `KEY=VALUE` strings into a dict. Raise ConfigError that names `flag` if one is malformed."""
    parsed = {}
    for pair in given:
        name, sign, value = pair.partition("=")
        if not (name and sign):
            raise ConfigError(f"{flag} must be KEY=VALUE, got {pair!r}")
        parsed[name] = value
    return parsed


def request_fields(args: argparse.Namespace, model: str) -> dict[str, Any]:
    """Return the fields that the body of every request has."""
    is_synthetic = args.dataset_name not in ("sharegpt", "custom")
    fields: dict[str, Any] = {"model": args.served_model_name or model}
    fields |= {name: value for name, _ in _SAMPLING if (value := getattr(args, name)) is not None}
    if args.ignore_eos or is_synthetic:
        fields["ignore_eos"] = True
    return fields | args.extra_body
