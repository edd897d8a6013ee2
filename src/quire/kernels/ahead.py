"""Compiling kernels side by side: a step whose kernels are compiled in the background, and none of them run.

Compiling the kernels of a step one after the other, each when it is first launched, takes seconds; most of
that is spent outside the interpreter, so threads divide it among themselves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import torch
import triton
from torch.overrides import TorchFunctionMode

from quire.kernels.jit import compile_only

_THREADS = 16


@contextlib.contextmanager
def background_compilation(device: torch.device, threads: int = _THREADS) -> Iterator[list[str]]:
    """Compile the kernels that this thread launches inside the context, and run none of them.

    Results inside mean nothing, but no index in them can be out of range, because fresh memory is zeroed.
    (A kernel that is already compiled is not run either: it would read what others, which are not, have not
    written.) Leaving the context waits until everything is compiled and loaded. A kernel that cannot be
    compiled is left for its first real launch, which says why. Other threads launch kernels as ever, and may
    enter a context of their own.

    Yields:
        A list that holds, at the end, the names of the kernels that were not found on disk.
    """
    with ThreadPoolExecutor(threads, "compile", torch.cuda.set_device, (device,)) as pool:
        compiling = _Compiling(pool)
        with compiling, _Zeroed():
            yield compiling.missing


class _Compiling(triton.AsyncCompileMode):
    """Launches of this thread have `pool` compile their kernels and load them onto the device."""

    def __init__(self, pool: Executor) -> None:
        super().__init__(pool, ignore_errors=True)
        self.missing: list[str] = []

    def __enter__(self) -> Any:
        super().__enter__()
        compile_only(True)
        return self

    def __exit__(self, *error: Any) -> None:
        compile_only(False)
        super().__exit__(*error)

    def submit(self, key: str, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]) -> Any:
        return super().submit(key, lambda: self._load(compile_fn()), finalize_fn)

    def _load(self, compiled: Any) -> Any:
        if compiled.src.compiled:
            self.missing.append(compiled.src.name)
        _ = compiled.run  # reading it builds the launcher and loads the code
        return compiled


class _Zeroed(TorchFunctionMode):
    """Fresh memory of this thread is zeros, so that what a kernel should have written is at least valid."""

    _FRESH = (torch.empty, torch.empty_like, torch.Tensor.new_empty)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        return out.zero_() if func in self._FRESH else out
