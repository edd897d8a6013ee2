"""The executor of a real engine: one rank in the caller's thread, without copies or messages."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from quire.types import StepFailed, StepHandle, StepPlan, TokenMasks
from quire.worker.memory.out_of_memory import is_out_of_memory
from quire.worker.runner import Runner

log = logging.getLogger("quire")

T = TypeVar("T")


class DeviceGuard(Protocol):
    """Factory of contexts in which one device is the thread's current device."""

    def __call__(self) -> AbstractContextManager[Any]: ...


def device_guard(device: torch.device) -> DeviceGuard:
    """Return a factory of contexts in which `device` is the thread's current device.

    CUDA keeps the current device per thread, and kernels, streams, events and pinned memory depend on it.
    """
    return partial(torch.cuda.device, device.index) if device.type == "cuda" else nullcontext


class LocalExecutor:
    """Executor that runs steps on the device of `guard`, in any thread, and restores the thread's current device.

    If a step runs out of memory, the executor frees what it can and raises `StepFailed`. Any other error ends the
    engine. The handle of a step needs no guard, because its event knows its device.
    """

    def __init__(self, runner: Runner, guard: DeviceGuard) -> None:
        self.runner = runner
        self._guard = guard
        self._failures = 0  # steps in a row that ran out of memory

    def forward(self, plan: StepPlan) -> None:
        self._guarded(lambda: self.runner.forward(plan))

    def drafts(self) -> np.ndarray:
        return self._guarded(self.runner.drafts)

    def sample(self, step: int, masks: TokenMasks | None) -> StepHandle:
        handle = self._guarded(lambda: self.runner.sample(step, masks))
        self._failures = 0
        return handle

    def warm_up(self) -> bool:
        try:
            return self._guarded(self.runner.warm_up)
        except StepFailed:
            return False

    def close(self) -> None:
        with self._guard():
            del self.runner

    def _guarded(self, work: Callable[[], T]) -> T:
        """Return the result of `work` on the device. Raise StepFailed if it runs out of memory."""
        try:
            with self._guard():
                return work()
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            reason = (str(error) or type(error).__name__).split("\n")[0]
        # After the handler, because until it ends the traceback keeps the tensors of the step alive.
        self._failures += 1
        log.warning("a step ran out of memory: %s", reason)
        with self._guard():
            self.runner.recover(drop_graphs=self._failures > 1)
        raise StepFailed(f"the engine ran out of memory in this request's step ({reason})")
