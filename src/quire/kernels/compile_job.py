"""Compilation of a Triton kernel in another process, as a message.

A job is JSON. It names the kernel, which the other process imports, and holds the types and constants that it is
compiled for. The result is in Triton's cache on disk.
"""

from __future__ import annotations

import importlib
import json
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime.jit import JITFunction


def encode_job(source: ASTSource, options: dict[str, Any]) -> bytes:
    """Return the job that compiles `source`.

    Args:
        source: a kernel, and the types and constants of its arguments.
        options: the other arguments of `triton.compile`.

    Raises:
        TypeError: if a constant cannot be sent.
    """
    parts = [source.fn, source.signature, source.constants, source.attrs, options]
    return json.dumps([_encode(part) for part in parts]).encode()


def run_job(job: bytes) -> None:
    """Compile a kernel and its launcher, unless they are on disk."""
    kernel, signature, constants, attributes, options = (_decode(part) for part in json.loads(job))
    build_launcher(triton.compile(ASTSource(kernel, signature, constants, attributes), **options))


def build_launcher(compiled: CompiledKernel) -> None:
    """Build the launcher of a kernel, which Triton keeps on disk as well.

    Up to Triton 3.6 it is an extension module in C for each combination of argument types. The engine would build one
    after the other, because it can load only one at a time (kernels/jit.py).
    """
    from triton.backends.nvidia import driver

    if hasattr(driver, "make_launcher"):
        driver.CudaLauncher(compiled.src, compiled.metadata)


def _encode(value: Any) -> Any:
    """Return JSON for a value: itself if it is plain, otherwise [kind, content]."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, JITFunction):
        return ["function", [value.fn.__module__, value.fn.__qualname__]]
    if isinstance(value, tl.dtype):
        return ["dtype", value.name]
    if isinstance(value, tl.constexpr):
        return ["constexpr", _encode(value.value)]
    if isinstance(value, GPUTarget):
        return ["target", [value.backend, value.arch, value.warp_size]]
    if isinstance(value, dict):
        return ["dict", [[_encode(key), _encode(item)] for key, item in value.items()]]
    if isinstance(value, tuple | list):
        return [type(value).__name__, [_encode(item) for item in value]]
    raise TypeError(f"a {type(value).__name__} cannot be sent to a compiling process")


def _decode(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    kind, content = value
    match kind:
        case "function":
            module, name = content
            return getattr(importlib.import_module(module), name)
        case "dtype":
            return tl.dtype(content)
        case "constexpr":
            return tl.constexpr(_decode(content))
        case "target":
            return GPUTarget(*content)
        case "dict":
            return {_decode(key): _decode(item) for key, item in content}
        case "tuple":
            return tuple(_decode(item) for item in content)
        case _:
            return [_decode(item) for item in content]
