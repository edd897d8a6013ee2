"""The number of prompt tokens in a step that also decodes: a fixed one, or as many as a latency target allows.

Every decoding request waits for the whole step, so its inter-token latency is the time of the step. With a target the
chunk is the largest with which the step is predicted to end in time; a smaller one would only delay prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.core.step_time import StepLoad, StepTimeModel, load_of
from quire.core.steplog import StepRecord

_FIRST_TOKENS = 64  # of a chunk before the time of one is known
_LEAST_TOKENS = 32  # of a chunk, even if the target cannot be met: prompts must go on
_GROWTH = 1.5  # a chunk exceeds the largest that was observed by this factor at most: the fit ends there


class PromptBudget(Protocol):
    """The choice of the prompt tokens of steps that also decode."""

    def tokens(self, decoding: Sequence[int], context: float) -> int:
        """Return the number of prompt tokens that a step may have.

        Args:
            decoding: lengths of the rows that decode in it.
            context: computed tokens of the first prompt.
        """
        ...

    def predict(self, record: StepRecord) -> float:
        """Return the predicted seconds of a step; 0 if nothing is predicted."""
        ...

    def end_step(self, record: StepRecord) -> None:
        """Learn how long a step took; called when its results have arrived."""
        ...


class FixedBudget:
    """A `PromptBudget` of `limit` tokens in every step."""

    def __init__(self, limit: int) -> None:
        self._limit = limit

    def tokens(self, decoding: Sequence[int], context: float) -> int:
        return self._limit

    def predict(self, record: StepRecord) -> float:
        return 0.0

    def end_step(self, record: StepRecord) -> None:
        pass


class LatencyBudget:
    """A `PromptBudget` that keeps the inter-token latency within a target.

    Args:
        target_s: the target.
        most: token budget of a step.
    """

    def __init__(self, target_s: float, most: int) -> None:
        self._target_s, self._most = target_s, most
        self._model = StepTimeModel()
        self._largest = _FIRST_TOKENS  # chunk that was observed

    @property
    def median_error(self) -> float | None:
        """Return the median relative error of the predictions; None without any."""
        return self._model.median_error

    def tokens(self, decoding: Sequence[int], context: float) -> int:
        load = StepLoad(len(decoding), sum(decoding) / 1e3, 0, 0.0)
        fitting = self._model.prompt_tokens_within(load, self._target_s, context / 1e3)
        if fitting is None:
            return _FIRST_TOKENS
        return int(max(_LEAST_TOKENS, min(fitting, self._most, _GROWTH * self._largest)))

    def predict(self, record: StepRecord) -> float:
        return self._model.predict(load_of(record)) or 0.0

    def end_step(self, record: StepRecord) -> None:
        load = load_of(record)
        self._model.observe(load, record.took_s)
        if load.prompt_tokens and load.rows:
            self._largest = max(self._largest, load.prompt_tokens)
