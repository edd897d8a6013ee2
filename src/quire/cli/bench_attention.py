"""`quire bench attention`: one layer's attention on every back end, beside a plain torch loop."""

from __future__ import annotations

import argparse
import itertools

from quire.cli.bench_flags import at_least_one, engine_config, keep_finished, machine_line
from quire.cli.output_paths import output_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose the cases."""

    def add(name: str, default: list[int], text: str) -> None:
        shown = " ".join(map(str, default))
        parser.add_argument(
            f"--{name}", type=int, nargs="*", default=default, metavar="N", help=f"{text} (default {shown})"
        )

    add("batch-sizes", [1, 8, 32], "rows that decode at once")
    add("contexts", [256, 1024, 4096], "tokens of these rows")
    add("prompt-lens", [256, 1024], "tokens of a prompt")
    parser.add_argument(
        "--output-json", type=output_file, metavar="FILE", help="write the figures to this file"
    )


def run(args: argparse.Namespace) -> int:
    """Measure the cases, print each figure when it is known, and return the exit code."""
    at_least_one(args, "batch_sizes", "contexts", "prompt_lens")
    import torch

    from quire.assembly.device import pick_device, pick_dtype
    from quire.assembly.kv_codes import kv_coded_spec
    from quire.bench.attention import AttentionBench, AttentionCase, AttentionFigure
    from quire.bench.latent_attention import LatentBench
    from quire.bench.machine import measure
    from quire.bench.report import save
    from quire.frontend.location import locate_model
    from quire.models.config.load import load_spec

    config = engine_config(args)
    device = pick_device(config.device)
    path = locate_model(config.model, config.revision).path
    spec = load_spec(path)
    dtype = pick_dtype(config.dtype, spec, device)
    spec = kv_coded_spec(config, path, spec, dtype, device)
    machine = measure(device, dtype)
    decoding = itertools.product(args.contexts, args.batch_sizes)
    cases = [AttentionCase(rows, length, False) for length, rows in decoding]
    cases += [AttentionCase(1, length, True) for length in args.prompt_lens]
    found: list[AttentionFigure] = []
    print(
        f"{'kind':<9}{'rows':>5}{'tokens':>8}  {'back end':<16}{'us':>11}{'of limit':>10}{'over loop':>11}{'SMs busy':>10}"
    )
    with keep_finished(found) as outcome, torch.inference_mode():
        loop_s = 0.0
        bench = (LatentBench if spec.latent else AttentionBench)(spec, device, dtype, machine)
        for one in bench.measure(cases):
            found.append(one)
            loop_s = one.time_s if one.backend == "plain loop" else loop_s
            busy = "-" if one.sms_busy is None else f"{100 * one.sms_busy:.0f} %"
            print(
                f"{one.kind:<9}{one.rows:>5}{one.length:>8}  {one.backend:<16}{1e6 * one.time_s:>11.1f}"
                f"{100 * one.share_of_limit:>9.1f}%{loop_s / one.time_s:>10.2f}x{busy:>10}",
                flush=True,
            )
    if args.output_json:
        where = machine_line(machine.device if device.type == "cuda" else None)
        save(
            args.output_json,
            {
                "model_id": config.model,
                "kv_cache_dtype": config.kv_cache_dtype,
                "machine": where,
                "figures": [one.as_dict() for one in found],
            },
        )
    return outcome.code
