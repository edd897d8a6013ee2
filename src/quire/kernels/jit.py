"""`kernel`, the decorator of Triton kernels that are launched. Functions that kernels call stay `triton.jit`.

Triton keeps compiled kernels in one table per process. Here threads may share it: one can generate while another
builds an engine, which launches kernels only to have them compiled (kernels/ahead.py).
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import triton
from triton import knobs
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime.jit import JITFunction

_loading = threading.Lock()
_thread = threading.local()  # its `compile_only`: whether launches of this thread only compile


def kernel(function: Any = None, **options: Any) -> Any:
    """Make a kernel as `triton.jit` does, with the same options."""
    if function is None:
        return functools.partial(kernel, **options)
    make = triton.jit if knobs.runtime.interpret else Kernel
    return make(function, **options)


def compile_only(on: bool) -> None:
    """Choose whether kernels that this thread launches are compiled and not run."""
    _thread.compile_only = on


class Kernel(JITFunction):
    """A kernel whose launches only compile it in threads that ask for that."""

    def create_binder(self) -> Any:
        binder = super().create_binder()
        self.ASTSource, self.compile = Source, _compile
        return binder

    def run(self, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        warmup = warmup or getattr(_thread, "compile_only", False)
        return super().run(*args, grid=grid, warmup=warmup, **options)


class Source(ASTSource):
    """The source of a kernel for one set of argument types."""

    compiled = False  # True: it was not found on disk

    def make_ir(self, *args: Any, **kwargs: Any) -> Any:
        self.compiled = True
        return super().make_ir(*args, **kwargs)


class _SharedKernel(CompiledKernel):
    """Compiled code that several threads may launch for the first time at once."""

    @property
    def run(self) -> Any:
        if self.function is None:  # set after `_run`, which a second thread would find without it
            with _loading:
                self._init_handles()
        return self._run


def _compile(*args: Any, **kwargs: Any) -> CompiledKernel:
    compiled = triton.compile(*args, **kwargs)
    compiled.__class__ = _SharedKernel
    return compiled
