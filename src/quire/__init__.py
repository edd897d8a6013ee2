"""Quire: an LLM inference engine that can be read in an afternoon and served the same evening.

>>> from quire import LLM, SamplingParams
>>> LLM("demo").generate(["Once upon a time"], SamplingParams(temperature=0))[0].outputs[0].text
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.config import EngineConfig
from quire.types import SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from quire.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "EngineConfig", "SamplingParams", "StructuredOutputsParams"]


def __getattr__(name: str) -> Any:
    if name == "LLM":  # imported when first used, so that `import quire` needs no torch
        from quire.llm import LLM

        return LLM
    raise AttributeError(f"module 'quire' has no attribute {name!r}")
