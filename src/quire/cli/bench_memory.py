"""`quire bench memory`: KV memory that is reserved, used and wasted, by layout and batch size."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from quire.cli.bench_flags import at_least_one, engine_config, keep_finished
from quire.cli.bench_results import conditions_of, plot_title, save_result

if TYPE_CHECKING:
    from quire.config import EngineConfig

_BATCH_SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256]
_REQUESTS = 8  # of the longest length, that fit into the KV cache unless kv_cache_memory says otherwise


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose the load."""
    parser.add_argument(
        "--batch-sizes",
        type=int,
        nargs="+",
        default=_BATCH_SIZES,
        metavar="N",
        help=f"requests sent at once, up to the first that do not fit (default {' '.join(map(str, _BATCH_SIZES))})",
    )
    parser.add_argument("--input-len", type=int, default=128, help="longest prompt, in tokens (default 128)")
    parser.add_argument("--output-len", type=int, default=128, help="longest answer, in tokens (default 128)")


def run(args: argparse.Namespace) -> int:
    """Measure both layouts, print each batch size when it is done, and return the exit code."""
    at_least_one(args, "batch_sizes", "input_len", "output_len")
    from quire.bench.drive import Bench
    from quire.bench.kv_use import LAYOUTS, KVUse, measure_kv_use
    from quire.bench.report import print_kv_use

    config = _with_memory(engine_config(args), args.input_len + args.output_len)
    found: list[KVUse] = []
    machine = None
    with keep_finished(found) as outcome:
        for layout in LAYOUTS:
            with Bench(replace(config, kv_layout=layout, prefix_caching=False), machine) as bench:
                machine = bench.machine
                conditions = conditions_of(args, bench.info)
                sizes = sorted({size for size in args.batch_sizes if size <= bench.info.max_num_seqs})
                for use in measure_kv_use(bench, sizes, args.input_len, args.output_len):
                    found.append(use)
                    print_kv_use(use, first=len(found) == 1)
    if args.plot and machine is not None:
        from quire.bench.kv_use_plot import plot_kv_use

        load = f"up to {args.input_len} tokens in, {args.output_len} out"
        plot_kv_use(found, plot_title(conditions, load, machine.device), args.plot)
    save_result(args, {**conditions, "layouts": [use.as_dict() for use in found]})
    return outcome.code


def _with_memory(config: EngineConfig, tokens: int) -> EngineConfig:
    """Return the settings with a context, and a KV cache in which some requests of `tokens` tokens fit."""
    from quire.assembly.device import pick_device, pick_dtype
    from quire.frontend.location import locate_model
    from quire.models.config.load import load_spec

    length = config.max_model_len or tokens
    if config.kv_cache_memory is not None:
        return replace(config, max_model_len=length)
    spec = load_spec(locate_model(config.model, config.revision).path)
    dtype = str(pick_dtype(config.dtype, spec, pick_device(config.device))).removeprefix("torch.")
    token_bytes = sum(layout.token_bytes for layout in spec.kv_layouts(dtype))
    return replace(config, max_model_len=length, kv_cache_memory=_REQUESTS * length * token_bytes)
