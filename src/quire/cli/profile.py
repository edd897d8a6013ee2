"""`quire profile`: show where the time of a step and the memory go."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from quire.bench.load.workloads import ALL_WORKLOADS, MAX_RANDOM_ID, Workload, uniform
from quire.cli.bench_flags import NO_TEXT, at_least_one, engine_config, sampling
from quire.cli.flags import add_flags, add_model
from quire.cli.output_paths import output_file
from quire.config import EngineConfig
from quire.types import ConfigError, EngineInfo, SamplingParams

if TYPE_CHECKING:
    from quire.bench.cost import Machine
    from quire.bench.kernel_table import KernelRow
    from quire.bench.profiling import Profile, StartCondition


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `quire profile`."""
    add_model(parser)
    group = parser.add_argument_group("what to profile")
    group.add_argument(
        "--phase",
        choices=("decode", "prefill"),
        default="decode",
        help="phase of the batch to profile (default decode)",
    )
    group.add_argument("--batch-size", type=int, default=1, help="requests in the batch (default 1)")
    group.add_argument("--input-len", type=int, default=128, help="prompt tokens of a request (default 128)")
    group.add_argument(
        "--workload", choices=ALL_WORKLOADS, help="fixed set of requests to profile instead of a batch"
    )
    group.add_argument("--num-prompts", type=int, help="number of requests of the workload (default: all)")
    group.add_argument(
        "--skip-steps", type=int, default=0, help="steps of the workload to skip before profiling (default 0)"
    )
    group.add_argument("--steps", type=int, default=32, help="steps to profile (default 32)")
    group = parser.add_argument_group("results")
    group.add_argument(
        "--trace-file", type=output_file, default=Path("quire-profile.json.gz"), metavar="FILE",
        help="trace for ui.perfetto.dev or chrome://tracing, .json or .json.gz (default quire-profile.json.gz)",
    )  # fmt: skip
    group.add_argument(
        "--output-json", type=output_file, metavar="FILE", help="write the tables to this file"
    )
    group.add_argument("--top", type=int, default=15, help="number of kernels to list (default 15)")
    add_flags(parser, "engine", EngineConfig)
    add_flags(parser, "sampling", SamplingParams, skip=NO_TEXT)


def run(args: argparse.Namespace) -> int:
    """Profile, print the tables and return the exit code."""
    _check(args)
    from quire.bench.drive import Bench
    from quire.bench.memory import memory_map
    from quire.bench.profiling import run_profile
    from quire.bench.report import save

    with Bench(engine_config(args)) as bench:
        work, ready, subject = _load(args, bench.info)
        profile = run_profile(bench, work, sampling(args), ready, args.steps, args.trace_file)
        memory = memory_map(bench.info)
        title = f"{bench.info.model}, {bench.info.dtype} on {bench.machine.device}: {subject}"
    print(title)
    _print_step(profile, bench.machine)
    _print_rows("part", profile.parts, profile)
    _print_rows("matrix product", profile.products, profile)
    _print_rows("kernel" if profile.on_gpu else "operator", profile.kernels[: args.top], profile)
    _print_memory(memory)
    print(f"\nTrace: {args.trace_file} (open it in ui.perfetto.dev)")
    if args.output_json:
        save(args.output_json, {"title": title, **asdict(profile), "memory": memory})
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raise ConfigError for mistakes that would otherwise show only after the engine has been built."""
    at_least_one(args, "batch_size", "input_len", "num_prompts", "steps")
    if not args.trace_file.name.endswith((".json", ".json.gz")):
        raise ConfigError(f"trace_file must end in .json or .json.gz, got {args.trace_file.name!r}")
    try:
        args.trace_file.parent.mkdir(parents=True, exist_ok=True)
        args.trace_file.touch()
    except OSError as error:
        raise ConfigError(f"cannot write {args.trace_file}: {error.strerror}") from None


def _load(args: argparse.Namespace, info: EngineInfo) -> tuple[Workload, StartCondition, str]:
    """Return the requests, the condition that starts the profile, and a title.

    Raises:
        ConfigError: if the batch does not fit into the engine.
    """
    from quire.bench.profiling import SETTLING, after, decoding

    vocab = min(info.vocab_size, MAX_RANDOM_ID)
    if args.workload:
        work = ALL_WORKLOADS[args.workload](vocab, args.num_prompts)
        return work, after(args.skip_steps), f"{args.workload} from step {args.skip_steps}"
    size, length = args.batch_size, args.input_len
    if length >= info.max_model_len:
        raise ConfigError(
            f"input_len {length} leaves no room for output in max_model_len {info.max_model_len}; lower it"
        )
    if args.phase == "prefill":
        return uniform(vocab, size, length, 1), after(0), f"prefill of {size} x {length} tokens"
    if size > info.max_num_seqs:
        raise ConfigError(f"batch_size {size} exceeds max_num_seqs {info.max_num_seqs}; raise it")
    # The first requests decode while the prompts of the last are still computed, at worst one prompt a step.
    most = size + -(-size * length // info.max_num_batched_tokens) + SETTLING + args.steps + 8
    work = uniform(vocab, size, length, min(most, info.max_model_len - length))
    return work, decoding(size), f"decode of {size} rows after {length} tokens"


def _print_step(profile: Profile, machine: Machine) -> None:
    timed = profile.timed
    print(
        f"  step         {profile.step_s * 1e3:.3f} ms, mean of {timed['steps']} without the profiler\n"
        f"  floor        {timed['floor_s'] / timed['steps'] * 1e3:.3f} ms at {machine.bytes_per_s / 1e9:,.1f} GB/s and "
        f"{machine.flops_per_s / 1e12:,.1f} TFLOP/s, as measured here\n"
        f"  of limit     {100 * timed['share_of_limit']:.1f} % (MBU {100 * timed['mbu']:.1f} %, "
        f"MFU {100 * timed['mfu']:.1f} %)\n"
        f"  {'GPU' if profile.on_gpu else 'operators':<13}busy {profile.busy_s * 1e3:.3f} ms a step, "
        f"idle {100 * profile.idle_share:.1f} % of the time, with the profiler\n"
        "  host         "
        + ", ".join(f"{name} {us / 1e3:.3f} ms" for name, us in timed["median_step_us"].items())
        + " (medians)"
    )


def _print_rows(heading: str, rows: list[KernelRow], profile: Profile) -> None:
    if not rows:
        return
    print(
        f"\n{heading:<44}{'calls':>7}{'us each':>9}{'us a step':>11}{'share':>7}{'GB/s':>8}{'TFLOP/s':>9}{'of limit':>10}"
    )
    for row in rows:
        counted = f"{'-':>8}{'-':>9}{'-':>10}"
        if row.least_us and row.busy_us:
            counted = (
                f"{row.bytes / row.busy_us / 1e3:>8,.1f}{row.flops / row.busy_us / 1e6:>9.1f}"
                f"{100 * row.least_us / row.busy_us:>8.1f} %"
            )
        print(
            f"{row.name[:43]:<44}{row.calls / profile.steps:>7.1f}{row.busy_us / row.calls:>9.1f}"
            f"{row.busy_us / profile.steps:>11.1f}{100 * row.busy_us / profile.total_us:>5.1f} %{counted}"
        )


def _print_memory(memory: dict[str, int]) -> None:
    print("\nmemory")
    for name, size in memory.items():
        print(f"  {name:<32}{size / 2**30:>9.3f} GiB")
