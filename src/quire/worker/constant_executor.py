"""The executor of `quire bench host`: it answers every plan at once with artificial tokens. No model, no torch.

It measures the host's own cost per step. `echo_executor.py` is the executor of `quire serve --dry-run`, whose answers
follow from the prompts and whose steps take time.
"""

from __future__ import annotations

import numpy as np

from quire.types import StepHandle, StepPlan, StepResult, TokenMasks


class _InstantHandle:
    is_timed = False

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def ready(self) -> bool:
        return True

    def wait(self) -> StepResult:
        return self._result


class ConstantExecutor:
    """Executor whose step number i samples token id `first` + i, modulo `vocab_size`, in every row."""

    def __init__(self, vocab_size: int, first: int = 10) -> None:
        self._vocab_size, self._first = vocab_size, first
        self._plans: dict[int, StepPlan] = {}

    def forward(self, plan: StepPlan) -> None:
        self._plans[plan.step] = plan

    def drafts(self) -> np.ndarray:
        raise AssertionError("the steps of this executor have no draft tokens")

    def sample(self, step: int, masks: TokenMasks | None) -> StepHandle:
        count = self._plans.pop(step).num_sampling
        token = (self._first + step) % self._vocab_size
        return _InstantHandle(StepResult(step, np.full((count, 1), token, np.int32)))

    def warm_up(self) -> bool:
        return False

    def close(self) -> None:
        self._plans.clear()
