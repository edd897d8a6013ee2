"""Parallel compilation of the kernels of a step, before the first step runs.

Compiling kernels one after the other at their first launch takes seconds. Most of that time is spent outside the
Python interpreter, so a pool of threads shortens it.
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
    """Compile the kernels that this thread launches in the context, without running any of them.

    Inside this context a kernel launch only triggers its compilation in the background. Results are meaningless, but
    no index in them is out of range, because new tensors are zeroed. A kernel that is already compiled does not run
    either: its inputs were not computed. Leaving the context waits until every kernel is compiled and loaded. A kernel
    that fails to compile raises at its first real launch. Other threads launch kernels as usual, and may enter this
    context too.

    Args:
        device: the CUDA device that kernels are loaded onto.
        threads: number of compiling threads.

    Yields:
        A list that holds, after the context, the names of the kernels that were not in the cache on disk.
    """
    with ThreadPoolExecutor(threads, "compile", torch.cuda.set_device, (device,)) as pool:
        compiling = _Compiling(pool)
        with compiling, _Zeroed():
            yield compiling.missing


class _Compiling(triton.AsyncCompileMode):
    """A mode in which the launches of this thread have `pool` compile and load their kernels."""

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
        _ = compiled.run  # reading this property builds the launcher and loads the code
        return compiled


class _Zeroed(TorchFunctionMode):
    """A mode in which new tensors of this thread are zeros, so that results of skipped kernels are valid indices."""

    _FRESH = (torch.empty, torch.empty_like, torch.Tensor.new_empty)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        return out.zero_() if func in self._FRESH else out
