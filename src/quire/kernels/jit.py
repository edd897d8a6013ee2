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
from triton.runtime.jit import DependenciesFinder, JITFunction

# One for all kernels: up to Triton 3.6 loading a kernel imports an extension module, whose name is that of all others.
# Two at once can get each other's function.
_loading = threading.Lock()
# Attributes: `compile_only`, whether launches of this thread only compile, and `on_miss`, of `call_on_miss`.
_thread = threading.local()


def _merge_after_hashing() -> None:
    """Make names of kernels in the cache on disk independent of the kernels that were launched before.

    Triton adds the constants that a called function uses to its caller's name, but computes them afterwards. So they
    are missing unless the function was called by an earlier kernel, and another process finds another name.
    """
    merge = DependenciesFinder._update_hash

    def hash_and_merge(self: DependenciesFinder, function: Any) -> None:
        _ = function.cache_key  # computes the constants
        merge(self, function)

    DependenciesFinder._update_hash = hash_and_merge


_merge_after_hashing()


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


def call_on_miss(on_miss: Callable[[Source, dict[str, Any]], None]) -> None:
    """Have `on_miss` called before this thread compiles a kernel that is not on disk.

    It gets the source and the other arguments of `triton.compile`. It may have another process compile the kernel:
    afterwards this thread looks on the disk again.
    """
    _thread.on_miss = on_miss


class Kernel(JITFunction):
    """A Triton kernel that respects `compile_only`."""

    def create_binder(self) -> Any:
        binder = super().create_binder()
        self.ASTSource, self.compile = Source, _compile
        return binder

    def run(self, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        warmup = warmup or compiles_only()
        return super().run(*args, grid=grid, warmup=warmup, **options)


class _NotOnDisk(Exception):
    """The cache on disk does not hold a kernel."""


class Source(ASTSource):
    """The source of a kernel for one set of argument types."""

    missed = False  # the cache on disk did not hold the kernel

    def make_ir(
        self, *args: Any, **kwargs: Any
    ) -> Any:  # called if the cache on disk does not hold the kernel
        if hasattr(_thread, "on_miss") and not self.missed:
            self.missed = True
            raise _NotOnDisk
        return super().make_ir(*args, **kwargs)


class _SharedKernel(CompiledKernel):
    """A compiled kernel whose first launch may happen in several threads at once."""

    @property
    def run(self) -> Any:
        if self.function is None:  # Triton sets it after `_run`, so a second thread could see `_run` alone
            with _loading:
                self._init_handles()
        return self._run


def _compile(source: Source, **options: Any) -> CompiledKernel:
    try:
        compiled = triton.compile(source, **options)
    except _NotOnDisk:
        _thread.on_miss(source, options)
        compiled = triton.compile(source, **options)
    compiled.__class__ = _SharedKernel
    return compiled
