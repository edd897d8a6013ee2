"""`quire rm`: delete downloaded models from the local cache."""

from __future__ import annotations

import argparse
import sys

from quire.cli.hub_cache import delete_models, stored_models
from quire.cli.loading import size_text
from quire.frontend.location import BUILT_IN
from quire.types import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `quire rm`."""
    parser.add_argument(
        "models", nargs="+", metavar="MODEL", help="downloaded model, as `quire models` lists it"
    )
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask (needed without a terminal)")


def run(args: argparse.Namespace) -> int:
    """Delete the models, after a question on a terminal, and return the exit code."""
    sizes = {model.name: model.size_bytes for model in stored_models() if model.name not in BUILT_IN}
    for name in args.models:
        if name in BUILT_IN:
            raise ConfigError(f"{name} is built in and cannot be deleted")
        if name not in sizes:
            raise ConfigError(
                f"{name} is not in the local cache; `quire models` lists what is{_similar(name, sizes)}"
            )
    names = list(dict.fromkeys(args.models))
    total = size_text(sum(sizes[name] for name in names))
    if not args.yes:
        if not sys.stdin.isatty():
            raise ConfigError(
                f"nothing was deleted ({', '.join(names)}, {total}): add --yes to delete without a question"
            )
        if input(f"Delete {', '.join(names)} ({total})? [y/N] ").strip().lower() not in ("y", "yes"):
            print("Nothing was deleted.")
            return 0
    print(f"Deleted {', '.join(names)}: {size_text(delete_models(names))} are free.")
    return 0


def _similar(name: str, sizes: dict[str, int]) -> str:
    near = [other for other in sizes if name.lower() in other.lower()]
    return f"; did you mean {near[0]}?" if near else ""
