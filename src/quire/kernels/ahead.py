"""Compiling kernels side by side: a step whose kernels are compiled in the background, and none of them run.

Compiling the kernels of a step one after the other, each when it is first launched, takes seconds; most of
that is spent outside the interpreter, so threads divide it among themselves.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from triton import knobs
from triton.runtime.jit import JITFunction

_THREADS = 16


@contextlib.contextmanager
def side_by_side(device: torch.device, threads: int = _THREADS) -> Iterator[list[str]]:
    """Within, a launch of a kernel begins to compile it, unless that is done, and does nothing else. Yields a list
    that, at the end, holds the names of the kernels that were not found on disk.

    So results mean nothing; but no index in them can be out of range, because fresh memory is zeroed. (One that
    is compiled is not run either: it would read what others, which are not, have not written.)
    Ends when all that was begun is compiled and loaded. A kernel that cannot be compiled is left for its
    first real launch, which says why. Not for use while other threads launch kernels.
    """
    before, launch_of = knobs.runtime.jit_cache_hook, JITFunction.run
    listener, missing = knobs.compilation.listener, list[str]()
    owner = threading.get_ident()
    begun: set[tuple[Any, ...]] = set()
    with ThreadPoolExecutor(threads, "compile", torch.cuda.set_device, (device,)) as pool:

        def hook(**launch: Any) -> bool:
            if threading.get_ident() != owner:  # ours, from below
                return False
            kernel, key = launch["fn"].jit_function, launch["key"]
            if (kernel, key) not in begun:
                begun.add((kernel, key))
                pool.submit(_compile, kernel, launch["compile"]["specialization_data"])
            return True  # which leaves it at that

        def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            return launch_of(self, *args, grid=grid, warmup=True, **options)

        def note(**done: Any) -> None:
            if not done["cache_hit"]:
                missing.append(done["src"].name)

        JITFunction.run = compile_only
        knobs.runtime.jit_cache_hook, knobs.compilation.listener = hook, note
        try:
            with _Zeroed():
                yield missing
        finally:
            knobs.runtime.jit_cache_hook, JITFunction.run = before, launch_of
            pool.shutdown()
            knobs.compilation.listener = listener


def _compile(kernel: Any, what: str) -> None:
    """From cache or source into `kernel`'s own table, and onto the device."""
    compiled = kernel.preload(what)
    _ = compiled.run  # reading it builds the launcher and loads the code


class _Zeroed(TorchFunctionMode):
    """Fresh memory is zeros, so that what a kernel should have written is at least valid."""

    _FRESH = (torch.empty, torch.empty_like, torch.Tensor.new_empty)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        return out.zero_() if func in self._FRESH else out
