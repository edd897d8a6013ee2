"""Compilation of a Triton kernel in another process, as a message.

A job names the kernel, which the other process imports, and holds the types and constants that it is compiled for. The
result is in Triton's cache on disk.
"""

from __future__ import annotations

import importlib
import io
import pickle
from typing import Any

import triton
from triton.compiler import ASTSource
from triton.runtime.cache import triton_key
from triton.runtime.jit import JITFunction


def encode_job(source: ASTSource, options: dict[str, Any]) -> bytes:
    """Return the job that compiles `source`.

    Args:
        source: a kernel, and the types and constants of its arguments.
        options: the other arguments of `triton.compile`.

    Raises:
        pickle.PicklingError, TypeError, AttributeError: if a constant cannot be sent.
    """
    buffer = io.BytesIO()
    parts = source.fn, source.signature, source.constants, source.attrs, options
    _JobPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(parts)
    return buffer.getvalue()


def run_job(job: bytes) -> None:
    """Compile a kernel, unless it is on disk. The job must come from a process of this engine."""
    kernel, signature, constants, attributes, options = pickle.loads(job)
    triton.compile(ASTSource(kernel, signature, constants, attributes), **options)


def prepare() -> None:
    """Compute what all compilations need, so that processes forked from this one do not."""
    triton_key()


class _JobPickler(pickle.Pickler):
    """A pickler that writes a function of a kernel as its place in the code."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, JITFunction):
            return _function_at, (value.fn.__module__, value.fn.__qualname__)
        return NotImplemented


def _function_at(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)
