"""`quire models`: list the models on this machine."""

from __future__ import annotations

import argparse
import json

from quire.cli.hub_cache import stored_models
from quire.cli.loading import size_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `quire models`."""
    parser.add_argument("--json", action="store_true", help="print one JSON list")
    parser.add_argument("-q", "--quiet", action="store_true", help="print only the names, one per line")


def run(args: argparse.Namespace) -> int:
    """Print the list and return the exit code."""
    models = stored_models()
    if args.json:
        print(json.dumps([model.as_json() for model in models], indent=1))
        return 0
    if args.quiet:
        print("\n".join(model.name for model in models))
        return 0
    width = max(len(model.name) for model in models)
    print(f"{'NAME':<{width}}  {'SIZE':>9}  {'LAST USED':<11}FORMAT")
    for model in models:
        used = "" if model.used is None else f"{model.used:%Y-%m-%d}"
        print(f"{model.name:<{width}}  {size_text(model.size_bytes):>9}  {used:<11}{model.format}")
    return 0
