"""The local executor: one rank in the caller's own thread, no copies and no messages between them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol, TypeVar

import torch

from quire.types import StepFailed, StepHandle, StepPlan, TokenMasks
from quire.worker.out_of_memory import is_out_of_memory
from quire.worker.runner import Runner

log = logging.getLogger("quire")

T = TypeVar("T")


class DeviceGuard(Protocol):
    def __call__(self) -> AbstractContextManager[Any]: ...


def device_guard(device: torch.device) -> DeviceGuard:
    """Return what makes contexts in which `device` is the thread's current one.

    CUDA keeps the current device per thread, and kernels, streams, events and pinned memory go by it.
    """
    return partial(torch.cuda.device, device) if device.type == "cuda" else nullcontext


class LocalExecutor:
    """Runs steps on the device of `guard`, whichever thread calls, and leaves the thread's device as it was.

    A lack of memory becomes `StepFailed`, after freeing what can be freed. Any other error ends the engine. The
    handle of a step needs no guard: its event knows its device.
    """

    def __init__(self, runner: Runner, guard: DeviceGuard) -> None:
        self._runner, self._guard = runner, guard
        self._failures = 0  # steps in a row that ran out of memory

    def forward(self, plan: StepPlan) -> None:
        self._carry_out(lambda: self._runner.forward(plan))

    def sample(self, step: int, masks: TokenMasks | None) -> StepHandle:
        handle = self._carry_out(lambda: self._runner.sample(step, masks))
        self._failures = 0
        return handle

    def warm_up(self) -> bool:
        try:
            return self._carry_out(self._runner.warm_up)
        except StepFailed:
            return False

    def close(self) -> None:
        with self._guard():
            del self._runner

    def _carry_out(self, work: Callable[[], T]) -> T:
        try:
            with self._guard():
                return work()
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            reason = (str(error) or type(error).__name__).split("\n")[0]
        # Behind the handler: until it ends, the traceback keeps the tensors of the step.
        self._failures += 1
        log.warning("a step ran out of memory: %s", reason)
        with self._guard():
            self._runner.recover(drop_graphs=self._failures > 1)
        raise StepFailed(f"the engine ran out of memory in this request's step ({reason})")
