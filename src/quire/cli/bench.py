"""`quire bench`: measurements on this machine."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.bench.workloads import WORKLOADS, Work, uniform
from quire.cli.flags import add_flags, given
from quire.config import EngineConfig
from quire.types import ConfigError, SamplingParams

if TYPE_CHECKING:
    from quire.types import EngineInfo


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    host = kinds.add_parser("host", help="scheduler and step loop without a model")
    host.add_argument("--rows", type=int, default=256, help="requests decoding at once (default 256)")
    host.add_argument("--steps", type=int, default=1000, help="steps to time (default 1000)")
    host.add_argument("--json", action="store_true", help="print one JSON object")
    throughput = kinds.add_parser("throughput", help="all requests at once: tokens per second")
    throughput.add_argument(
        "--workload", choices=WORKLOADS, help="a fixed set of requests (default: uniform lengths)"
    )
    throughput.add_argument("--num-prompts", type=int, help="requests (default: the workload's, or 64)")
    throughput.add_argument(
        "--input-len", type=int, default=128, help="tokens in, without --workload (default 128)"
    )
    throughput.add_argument(
        "--output-len", type=int, default=128, help="tokens out, without --workload (default 128)"
    )
    throughput.add_argument(
        "--num-warmups", type=int, default=0, help="runs before the timed one (default 0)"
    )
    latency = kinds.add_parser("latency", help="one batch after the other: seconds per batch")
    latency.add_argument("--batch-size", type=int, default=8, help="requests in a batch (default 8)")
    latency.add_argument("--input-len", type=int, default=32, help="tokens in (default 32)")
    latency.add_argument("--output-len", type=int, default=128, help="tokens out (default 128)")
    latency.add_argument(
        "--num-iters-warmup", type=int, default=10, help="batches before the timed ones (default 10)"
    )
    latency.add_argument("--num-iters", type=int, default=30, help="timed batches (default 30)")
    for kind in (throughput, latency):
        kind.add_argument("--output-json", type=Path, help="write the figures to this file")
        add_flags(kind, "engine", EngineConfig)
        add_flags(kind, "sampling", SamplingParams, skip={"max_tokens", "ignore_eos", "detokenize"})


def run(args: argparse.Namespace) -> int:
    return {"host": _host, "throughput": _throughput, "latency": _latency}[args.kind](args)


def _throughput(args: argparse.Namespace) -> int:
    from quire.bench.offline import throughput
    from quire.llm import LLM

    with LLM(**_engine(args)) as llm:
        work = _work(args, llm.info)
        params = _sampling(args)
        for _ in range(args.num_warmups):
            throughput(llm, work, params, use_tqdm=False)
        found = throughput(llm, work, params, use_tqdm=sys.stderr.isatty())
    print(
        f"Throughput: {found['requests_per_second']:.2f} requests/s, {found['tokens_per_second']:.2f} total tokens/s, "
        f"{found['output_throughput']:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {found['total_input_tokens']}")
    print(f"Total num output tokens:  {found['total_output_tokens']}")
    print(f"Prompt tokens from the prefix cache:  {found['cached_tokens']}")
    return _save(args, found)


def _latency(args: argparse.Namespace) -> int:
    from quire.bench.offline import latency
    from quire.llm import LLM

    if args.num_iters < 1:
        raise ConfigError(f"num_iters must be at least 1, got {args.num_iters}")
    with LLM(**_engine(args)) as llm:
        found = latency(
            llm,
            args.batch_size,
            args.input_len,
            args.output_len,
            args.num_iters_warmup,
            args.num_iters,
            _sampling(args),
        )
    print(f"Avg latency: {found['avg_latency']} seconds")
    for p, seconds in found["percentiles"].items():
        print(f"{p}% percentile latency: {seconds} seconds")
    return _save(args, found)


def _engine(args: argparse.Namespace) -> dict[str, Any]:
    return {"skip_tokenizer_init": True, **given(args, EngineConfig)}


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
    return {"temperature": 0.0, **given(args, SamplingParams)}


def _work(args: argparse.Namespace, info: EngineInfo) -> Work:
    vocab = min(info.vocab_size, 100_000)
    if args.workload:
        work = WORKLOADS[args.workload](vocab, args.num_prompts)
    else:
        work = uniform(vocab, args.num_prompts or 64, args.input_len, args.output_len)
    longest = max(len(ids) + n for ids, n in work)
    if longest > info.max_model_len:
        raise ConfigError(
            f"the longest request has {longest} tokens, but max_model_len is {info.max_model_len}; "
            "choose another workload, or --input-len and --output-len that fit"
        )
    return work


def _save(args: argparse.Namespace, found: dict[str, Any]) -> int:
    if args.output_json:
        try:
            args.output_json.write_text(json.dumps(found, indent=1) + "\n")
        except OSError as error:
            raise ConfigError(f"cannot write {args.output_json}: {error.strerror}") from None
    return 0


def _host(args: argparse.Namespace) -> int:
    from quire.bench.host import host_cost

    figures = host_cost(args.rows, args.steps)
    if args.json:
        print(json.dumps(figures))
        return 0
    print(f"Host cost of one step with {figures['rows']:.0f} decode rows, median of {figures['steps']:.0f}:")
    for name in ("step", "schedule", "retire"):
        print(f"  {name:<9} {figures[f'{name}_us']:7.0f} us")
    print(f"  99 % of steps take at most {figures['step_p99_us']:.0f} us")
    return 0
