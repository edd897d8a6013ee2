"""The local executor: one rank in the engine's own thread, no copies and no messages between them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from quire.types import StepFailed, StepHandle, StepPlan, TokenMasks
from quire.worker.out_of_memory import is_out_of_memory
from quire.worker.runner import Runner

log = logging.getLogger("quire")

T = TypeVar("T")


class LocalExecutor:
    """Turns a lack of memory into `StepFailed` and frees what it can. Any other error ends the engine."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
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
        del self._runner

    def _carry_out(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            reason = (str(error) or type(error).__name__).split("\n")[0]
        # Behind the handler: until it ends, the traceback keeps the tensors of the step.
        self._failures += 1
        log.warning("a step ran out of memory: %s", reason)
        self._runner.recover(drop_graphs=self._failures > 1)
        raise StepFailed(f"the engine ran out of memory in this request's step ({reason})")
