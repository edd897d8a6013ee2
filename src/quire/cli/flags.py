"""Command-line flags made from dataclass fields: the field's name, type, default and help are the flag's.

`--max-num-seqs` and `--max_num_seqs` are the same flag. Only flags that were given end up in the result,
so defaults live in one place, the dataclass.
"""

from __future__ import annotations

import argparse
import json
import types
from collections.abc import Callable, Collection
from dataclasses import fields
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def add_flags(parser: argparse.ArgumentParser, title: str, cls: type, skip: Collection[str] = ()) -> None:
    """Add a group of flags, one for each field of the dataclass `cls` that is not in `skip`."""
    group = parser.add_argument_group(title)
    hints = get_type_hints(cls)
    for f in fields(cls):
        if f.name in skip:
            continue
        names = [f"--{f.name.replace('_', '-')}"]
        if "_" in f.name:
            names.append(f"--{f.name}")
        group.add_argument(
            *names, dest=f.name, default=argparse.SUPPRESS, help=f.metadata.get("help", ""), **_options(hints[f.name])
        )


def given(args: argparse.Namespace, cls: type) -> dict[str, Any]:
    """The fields of `cls` for which a flag was given."""
    return {f.name: getattr(args, f.name) for f in fields(cls) if hasattr(args, f.name)}


def _options(hint: Any) -> dict[str, Any]:
    """argparse's view of a type."""
    origin = get_origin(hint)
    if origin in (types.UnionType, Union):
        (inner,) = (a for a in get_args(hint) if a is not type(None))
        return _options(inner)
    if origin is Literal:
        return {"choices": get_args(hint)}
    if origin is list:
        (item,) = get_args(hint)
        return {"action": "append", "type": item, "metavar": item.__name__.upper()}
    if origin is dict:
        return {"type": json.loads, "metavar": "JSON"}
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    parse: Callable[[str], Any] = _integer if hint is int else hint
    return {"type": parse, "metavar": hint.__name__.upper()}


def _integer(text: str) -> int:
    """An integer; k, m and g mean thousands of 1024: `--max-model-len 32k`, `--kv-cache-memory 8g`."""
    suffix = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}.get(text[-1:].lower())
    try:
        return int(float(text[:-1]) * suffix) if suffix else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be an integer, got {text!r}") from None
