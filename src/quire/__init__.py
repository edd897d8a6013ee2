"""Quire, a fast LLM inference engine that you can read.

>>> from quire import LLM, SamplingParams
>>> LLM("demo").generate(["Once upon a time"], SamplingParams(temperature=0))[0].outputs[0].text
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.llm import LLM
    from quire.types import SamplingParams, StructuredOutputsParams

__version__ = "0.1.0"
__all__ = ["LLM", "EngineConfig", "SamplingParams", "StructuredOutputsParams"]

_HOMES = {
    "LLM": "quire.llm",
    "EngineConfig": "quire.config",
    "SamplingParams": "quire.types",
    "StructuredOutputsParams": "quire.types",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `import quire` needs no torch and helper processes start fast."""
    if name not in _HOMES:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
