"""`quire quantize`: write a quantised copy of a checkpoint, which transformers and vLLM load too."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from quire.cli.flags import MODEL_HELP
from quire.types import ConfigError

_FORMATS = ("fp8", "fp8-block", "int8", "int4")
_GROUP_SIZE = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `quire quantize`."""
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("out", metavar="OUT", help="folder to write, which must be empty or missing")
    parser.add_argument(
        "--format",
        choices=_FORMATS,
        required=True,
        help="fp8 (scales per row), fp8-block (scales per 128x128 block), int8 (W8A8) or int4 (weights only)",
    )
    parser.add_argument(
        "--group-size",
        type=int,
        default=_GROUP_SIZE,
        help=f"columns with a common scale, for int4 (default: {_GROUP_SIZE}); fewer are more precise and larger",
    )
    parser.add_argument("--device", default="auto", help="where to compute: auto, cpu, cuda or cuda:N")


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint, with a progress bar on a terminal, and return the exit code."""
    from tqdm import tqdm

    from quire.assembly.device import pick_device
    from quire.frontend.location import locate_model
    from quire.models.checkpoint.quantize import matrices_of, quantise_checkpoint

    folder = locate_model(args.model, None).path
    if folder.suffix == ".gguf":
        raise ConfigError(f"{folder} is a GGUF file; `quire quantize` reads folders of safetensors files")
    out = Path(args.out)
    count = len(matrices_of(folder))
    with tqdm(total=count, unit="matrix", disable=not sys.stderr.isatty()) as bar:
        quantise_checkpoint(
            folder,
            out,
            args.format,
            args.group_size,
            pick_device(args.device),
            lambda name: bar.update() and None,
        )
    before, after = (sum(f.stat().st_size for f in p.glob("*.safetensors")) for p in (folder, out))
    print(
        f"{out}: {count} matrices in {args.format}, {after / 1e6:,.1f} MB instead of {before / 1e6:,.1f} MB"
    )
    return 0
