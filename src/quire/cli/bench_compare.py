"""`quire bench compare`: what one setting gains, each variant in turns with the first one."""

from __future__ import annotations

import argparse

from quire.cli.bench_flags import at_least_one, engine_config, keep_finished, machine_line
from quire.types import ConfigError

_NAMES = ("parts", "chunked-prefill", "prefix-caching", "graphs", "split-decoding", "users", "latent-prefill")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose the comparison."""
    parser.add_argument("comparison", choices=_NAMES, metavar="NAME", help=f"one of {', '.join(_NAMES)}")
    parser.add_argument("--full", action="store_true", help="lengths for a real model")
    parser.add_argument("--repeats", type=int, default=3, help="pairs of runs per load (default 3)")


def run(args: argparse.Namespace) -> int:
    """Measure the comparison, print each figure when it is known, and return the exit code."""
    at_least_one(args, "repeats")
    from quire.assembly.device import pick_device, pick_dtype
    from quire.bench.comparison import COMPARISONS, ComparedFigure, measure_comparison
    from quire.bench.ladder.rungs import LadderScale
    from quire.bench.load.workloads import MAX_RANDOM_ID
    from quire.bench.machine import measure
    from quire.bench.report import save
    from quire.frontend.location import locate_model
    from quire.models.config.load import load_spec

    config = engine_config(args)
    device = pick_device(config.device)
    spec = load_spec(locate_model(config.model, config.revision).path)
    dtype = pick_dtype(config.dtype, spec, device)
    longest = min(config.max_model_len or spec.max_model_len, spec.max_model_len)
    on_gpu = device.type == "cuda"
    scale = LadderScale(config.model, longest, min(spec.vocab_size, MAX_RANDOM_ID), args.full, on_gpu)
    comparison = COMPARISONS[args.comparison](scale)
    if clash := set().union(*comparison.variants.values()) & {
        name
        for name in config.__dataclass_fields__
        if getattr(config, name) != config.__dataclass_fields__[name].default
    }:
        raise ConfigError(f"{args.comparison} chooses {', '.join(sorted(clash))} itself; leave out the flag")
    token_bytes = sum(layout.token_bytes for layout in spec.kv_layouts(str(dtype).removeprefix("torch.")))
    machine = measure(device, dtype)
    found: list[ComparedFigure] = []
    print(f"{comparison.name}: {comparison.question} Base: {next(iter(comparison.variants))}")
    print(f"{'variant':<38}{'load':<26}{'unit':<19}{'base':>10}{'with it':>10}{'gain':>8}")
    with keep_finished(found) as outcome:
        for one in measure_comparison(comparison, config, machine, token_bytes, args.repeats):
            found.append(one)
            print(
                f"{one.variant:<38}{one.load:<26}{one.unit:<19}{one.base:>10.3f}{one.value:>10.3f}{one.gain:>7.2f}x",
                flush=True,
            )
    where = machine_line(machine.device if on_gpu else None)
    if args.plot:
        from quire.bench.comparison_plot import plot_comparison

        title = (
            f"{config.model} on {machine.device if on_gpu else device.type}: {comparison.question}\n{where}"
        )
        plot_comparison(comparison, found, title, args.plot)
    if args.output_json:
        figures = [one.as_dict() for one in found]
        save(args.output_json, {"model_id": config.model, "machine": where, "comparison": comparison.name,
                                "variants": comparison.variants, "figures": figures})  # fmt: skip
    return outcome.code
