"""The local executor: one rank in the caller's own thread, no copies and no messages between them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch

from quire.types import StepHandle, StepPlan, TokenMasks
from quire.worker.runner import Runner


class DeviceGuard(Protocol):
    def __call__(self) -> AbstractContextManager[Any]: ...


def device_guard(device: torch.device) -> DeviceGuard:
    """Return what makes contexts in which `device` is the thread's current one.

    CUDA keeps the current device per thread, and kernels, streams, events and pinned memory go by it.
    """
    return partial(torch.cuda.device, device) if device.type == "cuda" else nullcontext


class LocalExecutor:
    """Runs steps on the device of `guard`, whichever thread calls, and leaves the thread's device as it was.

    The handle of a step needs no guard: its event knows its device.
    """

    def __init__(self, runner: Runner, guard: DeviceGuard) -> None:
        self._runner, self._guard = runner, guard

    def forward(self, plan: StepPlan) -> None:
        with self._guard():
            self._runner.forward(plan)

    def sample(self, step: int, masks: TokenMasks | None) -> StepHandle:
        with self._guard():
            return self._runner.sample(step, masks)

    def warm_up(self) -> bool:
        with self._guard():
            return self._runner.warm_up()

    def close(self) -> None:
        with self._guard():
            del self._runner
