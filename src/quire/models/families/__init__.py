"""Model families: one file for each, with the parser of its config.json and what documents say about it.

A file of this folder defines `FAMILY`. Most families are the decoder of models/decoder.py with other options, so
their file is all there is; a family with a class of its own is also listed in models/registry.py.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from quire.models.config.keys import ConfigKeys
from quire.models.spec import ModelSpec

Parser = Callable[[str, ConfigKeys], ModelSpec]  # from the architecture and the config


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model family.

    Attributes:
        title: names of its models.
        architectures: names in `architectures` of a config.json, with and without a head, and of `model_type`.
        parse: the parser of its config.json.
        special: what differs from Llama, for documents.
        gguf: architectures of GGUF files.
        tools: tool format, a key of TOOL_PARSERS.
        reasoning: reasoning format, a key of REASONING_PARSERS.
        heads: methods of speculative decoding with a draft head. All families have the other methods.
    """

    title: str
    architectures: tuple[str, ...]
    parse: Parser
    special: str
    gguf: tuple[str, ...] = ()
    tools: str = "json"
    reasoning: str = "none"
    heads: tuple[str, ...] = ("eagle", "eagle3")


def names(stem: str, *more: str) -> tuple[str, ...]:
    """Return the architectures of a family in transformers: StemForCausalLM, StemModel, and further names."""
    return (f"{stem}ForCausalLM", f"{stem}Model", *more)


@cache
def catalogue() -> tuple[Family, ...]:
    """Return the families of this folder, by file name."""
    modules = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return tuple(importlib.import_module(f"{__name__}.{name}").FAMILY for name in modules)
