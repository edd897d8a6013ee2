"""`quire ladder`: climb from naive decoding to the full engine, and measure what every idea buys on this machine."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from quire.cli.bench_flags import at_least_one, engine_config, keep_finished, machine_line
from quire.cli.flags import add_flags, add_model
from quire.cli.output_paths import output_file
from quire.config import EngineConfig
from quire.types import ConfigError

if TYPE_CHECKING:
    from quire.bench.ladder.climb import RungResult, SkippedRung

# Settings that the rungs choose themselves.
_CHOSEN = {
    "batching", "max_num_seqs", "kv_layout", "kv_cache_memory", "chunked_prefill", "mixed_prefill_tokens", "attention",
    "prefix_caching", "shared_prefix", "cuda_graphs", "capture_at_start", "cpu_kernels", "cpu_replay", "overlap",
    "skip_tokenizer_init", "quantization", "spec_method", "spec_model", "spec_quantization", "spec_tokens", "spec_adaptive", "speculative_config",
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `quire ladder`."""
    add_model(parser)
    group = parser.add_argument_group("climb")
    group.add_argument(
        "--full",
        action="store_true",
        help="loads for a real model: longer prompts and more requests (default: about two minutes on the demo "
        "model and two cores)",
    )
    group.add_argument("--repeats", type=int, default=3, help="pairs of runs per rung (default 3)")
    group = parser.add_argument_group("results")
    group.add_argument(
        "--output-json", type=output_file, metavar="FILE", help="write the figures to this file"
    )
    group.add_argument(
        "--report", type=output_file, metavar="FILE", help="write a self-contained page to this .html file"
    )
    group.add_argument(
        "--plot", type=output_file, metavar="FILE", help="plot the gains to this .png, .svg or .pdf file"
    )
    add_flags(parser, "engine", EngineConfig, skip=_CHOSEN)


def run(args: argparse.Namespace) -> int:
    """Climb, print each rung when it is done, write the results, and return the exit code."""
    at_least_one(args, "repeats")
    if args.report and args.report.suffix != ".html":
        raise ConfigError(f"report must end in .html, got {args.report.name!r}")
    if args.plot:
        from quire.bench.plots import check_plot

        check_plot(args.plot)
    from quire.assembly.device import pick_device, pick_dtype
    from quire.bench.ladder.baseline import transformers_baseline
    from quire.bench.ladder.climb import Ladder
    from quire.bench.ladder.report import ladder_page, plot_ladder, print_baseline, print_rung
    from quire.bench.ladder.rungs import RUNGS
    from quire.bench.machine import measure
    from quire.bench.report import save
    from quire.frontend.location import locate_model
    from quire.models.config.load import load_spec

    config = engine_config(args)
    device = pick_device(config.device)
    machine = measure(device, pick_dtype(config.dtype, load_spec(locate_model(config.model).path), device))
    done: list[RungResult | SkippedRung] = []
    with keep_finished(done) as outcome:
        from tqdm import tqdm

        ladder = Ladder(config, machine, args.full, device.type == "cuda", args.repeats)
        baseline = transformers_baseline(config, ladder.scale)
        print_baseline(baseline)
        climb = ladder.climb()
        with tqdm(total=len(RUNGS), desc="Climbing", unit="rung", disable=None, leave=False) as bar:
            for found in climb:
                done.append(found)
                with bar.external_write_mode(file=sys.stdout):
                    print_rung(found, first=len(done) == 1)
                bar.update()
    title = f"{config.model} on {machine.device if device.type == 'cuda' else device.type}"
    where = machine_line(machine.device if device.type == "cuda" else None)
    result = {
        "model_id": config.model,
        "machine": where,
        "baselines": [baseline.as_dict()],
        "rungs": [one.as_dict() for one in done],
    }
    if args.output_json:
        save(args.output_json, result)
    if args.report:
        ladder_page(done, title, where, args.report, baseline)
    if args.plot:
        plot_ladder(done, f"{title}\n{where}", args.plot)
    return outcome.code
