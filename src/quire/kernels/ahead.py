"""Parallel compilation of the kernels of a step, before the first step runs.

Compiling kernels one after the other at their first launch takes seconds. Here a pool of threads compiles them side by
side. With `Compilers` each thread hands its kernels to another process, and loads them from disk. Without them the
threads compile, and share the interpreter, which takes about a quarter of a compilation.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from typing import Any

import torch
import triton
from torch.overrides import TorchFunctionMode

from quire.compilers import NO_COMPILERS, Compilers
from quire.kernels.compile_job import encode_job
from quire.kernels.jit import Source, call_on_miss, compile_only

_THREADS = 16
_TURN_S = 0.0002  # of a thread, in which it keeps the interpreter to itself
_USUAL_TURN_S = sys.getswitchinterval()
_POLL_S = 0.01


@contextlib.contextmanager
def background_compilation(
    device: torch.device, compilers: Compilers = NO_COMPILERS, threads: int = _THREADS
) -> Iterator[Compilation]:
    """Compile the kernels that this thread launches in the context, without running any of them.

    Inside this context a kernel launch only triggers its compilation in the background. Results are meaningless, but
    no index in them is out of range, because new tensors are zeroed. A kernel that is already compiled does not run
    either: its inputs were not computed. Leaving the context waits until every kernel is compiled and loaded. A kernel
    that fails to compile raises at its first real launch. Other threads launch kernels as usual, and may enter this
    context too.

    Args:
        device: the CUDA device that kernels are loaded onto.
        compilers: the processes that compile; without any, threads do.
        threads: number of compiling threads, without processes.

    Yields:
        The compilation, which tells what was missing from the cache on disk.
    """
    threads = compilers.count or threads
    with ThreadPoolExecutor(threads, "compile", torch.cuda.set_device, (device,)) as pool:
        compilation = Compilation(pool, compilers)
        with _short_turns(), compilation, _Zeroed():
            yield compilation


@contextlib.contextmanager
def _short_turns() -> Iterator[None]:
    """Let threads of the interpreter take short turns.

    The launching thread gives the interpreter away in every call of torch. With turns of the usual 5 ms it would wait
    for compiling threads most of the time, and the pool would run dry.
    """
    sys.setswitchinterval(_TURN_S)
    try:
        yield
    finally:
        sys.setswitchinterval(_USUAL_TURN_S)


class Compilation(triton.AsyncCompileMode):
    """A mode in which the launches of this thread have `pool` load their kernels, and `compilers` compile them.

    Attributes:
        missing: names of the kernels that were not in the cache on disk, as far as the pool has looked for them.
    """

    def __init__(self, pool: Executor, compilers: Compilers) -> None:
        super().__init__(pool, ignore_errors=True)
        self._compilers = compilers
        self.missing: list[str] = []

    def any_missing(self) -> bool:
        """Return whether a kernel launched so far is missing from the cache on disk. Wait until that is known."""
        pending = set(self.raw_futures)
        while pending and not self.missing:
            pending = wait(pending, timeout=_POLL_S).not_done
        return bool(self.missing)

    def __enter__(self) -> Any:
        super().__enter__()
        compile_only(True)
        return self

    def __exit__(self, *error: Any) -> None:
        compile_only(False)
        super().__exit__(*error)

    def submit(self, key: str, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]) -> Any:
        return super().submit(key, lambda: self._load(compile_fn), finalize_fn)

    def _load(self, compile_fn: Callable[[], Any]) -> Any:
        call_on_miss(self._hand_over)
        compiled = compile_fn()
        _ = compiled.run  # reading this property builds the launcher and loads the code
        return compiled

    def _hand_over(self, source: Source, options: dict[str, Any]) -> None:
        self.missing.append(source.name)
        if self._compilers.count:
            self._compilers.compile(source.name, encode_job(source, options))


class _Zeroed(TorchFunctionMode):
    """A mode in which new tensors of this thread are zeros, so that results of skipped kernels are valid indices."""

    _FRESH = (torch.empty, torch.empty_like, torch.Tensor.new_empty)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        return out.zero_() if func in self._FRESH else out
