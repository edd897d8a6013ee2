"""`kernel`, the decorator of Triton kernels. Functions that kernels call are decorated with `triton.jit`.

Triton keeps the compiled kernels of a process in one table. These classes let threads share it: one thread can
generate while another builds an engine, which launches kernels only to compile them (kernels/ahead.py).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import triton
from triton import knobs
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime.jit import JITFunction

_loading = threading.Lock()
# Attributes: `compile_only`, whether launches of this thread only compile, and `note`, what is called with the name of
# each kernel that this thread begins to compile.
_thread = threading.local()


def kernel(function: Any = None, **options: Any) -> Any:
    """Compile a function as a launchable kernel; takes the options of `triton.jit`."""
    if function is None:
        return functools.partial(kernel, **options)
    make = triton.jit if knobs.runtime.interpret else Kernel
    return make(function, **options)


def compile_only(on: bool) -> None:
    """Set whether launches of this thread compile their kernels without running them."""
    _thread.compile_only = on


def compiles_only() -> bool:
    """Return whether launches of this thread only compile their kernels."""
    return getattr(_thread, "compile_only", False)


def note_compilations(note: Callable[[str], None]) -> None:
    """Have `note` called with the name of each kernel that this thread compiles from now on, when it begins."""
    _thread.note = note


class Kernel(JITFunction):
    """A Triton kernel that respects `compile_only`."""

    def create_binder(self) -> Any:
        binder = super().create_binder()
        self.ASTSource, self.compile = Source, _compile
        return binder

    def run(self, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        warmup = warmup or compiles_only()
        return super().run(*args, grid=grid, warmup=warmup, **options)


class Source(ASTSource):
    """The source of a kernel for one set of argument types."""

    def make_ir(
        self, *args: Any, **kwargs: Any
    ) -> Any:  # called if the cache on disk does not hold the kernel
        if note := getattr(_thread, "note", None):
            note(self.name)
        return super().make_ir(*args, **kwargs)


class _SharedKernel(CompiledKernel):
    """A compiled kernel whose first launch may happen in several threads at once."""

    @property
    def run(self) -> Any:
        if self.function is None:  # Triton sets it after `_run`, so a second thread could see `_run` alone
            with _loading:
                self._init_handles()
        return self._run


def _compile(*args: Any, **kwargs: Any) -> CompiledKernel:
    compiled = triton.compile(*args, **kwargs)
    compiled.__class__ = _SharedKernel
    return compiled
