"""The local executor: one rank in the engine's own thread, no copies and no messages between them."""

from __future__ import annotations

from quire.types import StepHandle, StepPlan, TokenMasks
from quire.worker.runner import Runner


class LocalExecutor:
    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def forward(self, plan: StepPlan) -> None:
        self._runner.forward(plan)

    def sample(self, step: int, masks: TokenMasks | None) -> StepHandle:
        return self._runner.sample(step, masks)

    def warm_up(self) -> bool:
        return self._runner.warm_up()

    def close(self) -> None:
        del self._runner
