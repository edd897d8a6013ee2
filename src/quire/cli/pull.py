"""`quire pull`: download a model from Hugging Face into the local cache."""

from __future__ import annotations

import argparse
import time

from quire.cli.hub_cache import offline
from quire.cli.loading import size_text, weight_bytes
from quire.frontend.location import BUILT_IN, locate_model, names_a_path
from quire.types import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `quire pull`."""
    parser.add_argument("models", nargs="+", metavar="MODEL", help="Hugging Face id, such as Qwen/Qwen3-0.6B")
    parser.add_argument("--revision", metavar="STR", help="branch, tag or commit (default: main)")


def run(args: argparse.Namespace) -> int:
    """Download each model and return the exit code. A terminal shows one progress bar for each file."""
    for name in args.models:
        if name in BUILT_IN or names_a_path(name):
            raise ConfigError(f"{name} is on this machine already: quire pull takes a Hugging Face id")
        if offline():
            raise ConfigError(f"{name} cannot be downloaded while HF_HUB_OFFLINE is set: unset it")
    for name in args.models:
        begin = time.perf_counter()
        path = locate_model(name, args.revision).path
        size = size_text(weight_bytes(path))
        print(f"{name}: {size} of weights in {path} ({time.perf_counter() - begin:.1f} s)", flush=True)
    return 0
