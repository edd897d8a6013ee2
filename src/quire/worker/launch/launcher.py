"""Launching a step: the interface, and the launcher that captures nothing."""

from __future__ import annotations

from typing import Protocol

import torch

from quire.types import StepPlan
from quire.worker.staging import Staging
from quire.worker.step.batch import Batcher, DeviceStep


class Launcher(Protocol):
    """Way to put the first stages of a step on the device: those that it has captured, in one call."""

    def launch(self, plan: StepPlan, staging: Staging) -> DeviceStep:
        """Open the step of `plan`, and queue the stages that are captured, without waiting for the device.

        Returns:
            The step. The stages behind `done` remain to be run.
        """
        ...

    def warm_up(self, staging: Staging) -> bool:
        """Make one later step cheaper while the engine is idle. Return False if nothing is left to do."""
        ...

    def drop_graphs(self) -> None:
        """Release the memory of captured steps."""
        ...

    def capture_common(self) -> None:
        """Capture the steps that most requests need. They do not run, so the weights may still be undefined."""
        ...

    def run_common(self, most: int | None = None) -> None:
        """Run the steps of `capture_common` once each, with any content, so that their kernels are compiled.

        Args:
            most: number of steps, of which those whose kernels take longest to compile come first; None: all.
        """
        ...


class Threads:
    """Choice of the number of CPU threads for a step.

    The layers of a small step take microseconds. Waking more threads for each of them gains little, and costs much when
    another process uses their core. So steps of fewer than `_SMALL` multiply-adds run on one thread.
    """

    _SMALL = 64_000_000

    def __init__(self, num_parameters: int, count: int | None) -> None:
        """Use `count` threads for every step; None: all cores for large steps, one thread for small ones."""
        self._num_parameters = num_parameters
        self._for_large = count or _ALL_THREADS
        self._for_small = count or 1

    def use_for(self, tokens: int) -> None:
        """Set the number of torch's threads for a step of `tokens` tokens."""
        is_large = tokens * self._num_parameters >= self._SMALL
        torch.set_num_threads(self._for_large if is_large else self._for_small)


_ALL_THREADS = torch.get_num_threads()  # before any step has changed it


class Eager:
    """Launcher that captures nothing, so that every stage runs operation by operation. `threads` is for a CPU."""

    def __init__(self, batcher: Batcher, threads: Threads | None = None) -> None:
        self._batcher, self._threads = batcher, threads

    def launch(self, plan: StepPlan, staging: Staging) -> DeviceStep:
        if self._threads:
            self._threads.use_for(plan.total_tokens)
        return self._batcher.open(plan, staging)

    def warm_up(self, staging: Staging) -> bool:
        return False

    def drop_graphs(self) -> None:
        pass

    def capture_common(self) -> None:
        pass

    def run_common(self, most: int | None = None) -> None:
        pass
