"""The executor of `quire serve --dry-run`: it answers each request with its own prompt. No model, no torch.

It serves the development and the tests of clients and the server: an answer depends only on its prompt, however
requests are batched, preempted or cached. The top-level `dry_run.py` builds the engine around it.
`constant_executor.py` is simpler and measures the host's own cost per step; `executor.py` runs a real model.
"""

from __future__ import annotations

import time
from array import array
from typing import Any

import numpy as np

from quire.types import LogprobArrays, StepHandle, StepPlan, StepResult

_HIDDEN = 32


class _DelayedHandle:
    """Handle whose result is ready at `ready_s` of the monotonic clock."""

    is_timed = False

    def __init__(self, result: StepResult, ready_s: float) -> None:
        self._result, self._ready_s = result, ready_s

    def ready(self) -> bool:
        return time.monotonic() >= self._ready_s

    def wait(self) -> StepResult:
        if (left := self._ready_s - time.monotonic()) > 0:
            time.sleep(left)
        return self._result


class EchoExecutor:
    """Executor whose answers are the tokens of the prompt except those in `left_out`, then `eos` repeatedly.

    A step takes `step_s` seconds. Log-probabilities are artificial: -0.1 for the chosen token (rank 1), then -1, -2 ...
    for the ids that follow it. Hidden states are artificial too, one fixed state for each token id.
    """

    def __init__(self, vocab_size: int, eos: int, left_out: frozenset[int], step_s: float = 0.0) -> None:
        self._vocab_size, self._eos, self._left_out, self._step_s = vocab_size, eos, left_out, step_s
        self._answers: dict[int, tuple[int, array[int]]] = {}  # slot -> prompt length, answer
        self._prompts: dict[int, array[int]] = {}
        self._tops: dict[int, int] = {}  # slot -> number of log-probabilities per token
        self._takes_last: dict[int, bool] = {}  # slot -> pooling is the last token instead of the mean
        self._plans: dict[int, StepPlan] = {}
        self._busy_until_s = 0.0  # steps run one after the other, as on a device

    def forward(self, plan: StepPlan) -> None:
        for admit in plan.admissions:
            prompt = admit.tokens[: admit.prompt_len]
            params = admit.request.params
            answer = array("i", [t for t in prompt if t not in self._left_out])
            self._answers[admit.slot] = admit.prompt_len, answer
            self._prompts[admit.slot] = prompt
            self._takes_last[admit.slot] = admit.request.pooling == "last"
            self._tops[admit.slot] = max(params.logprobs or 0, params.prompt_logprobs or 0)
        self._plans[plan.step] = plan

    def drafts(self) -> np.ndarray:
        raise AssertionError("the steps of this executor have no draft tokens")

    def sample(self, step: int, masks: Any) -> StepHandle:
        plan = self._plans.pop(step)
        ends = plan.starts + plan.num_tokens
        rows = [
            (slot, end) for slot, end, samples in zip(plan.slots.tolist(), ends.tolist(), plan.samples.tolist())
            if samples
        ]  # fmt: skip
        tokens = [self._token(slot, end) for slot, end in rows]
        scored = {row: self._score(plan, row) for row in plan.score_rows}
        top = max((self._tops[slot] for slot, _ in rows), default=0)
        pooled = {row: self._pooled(plan, row) for row in plan.pool_rows}
        result = StepResult(
            step,
            np.array(tokens, np.int32).reshape(-1, 1),
            self._logprobs(tokens, top),
            scored or None,
            pooled or None,
        )
        self._busy_until_s = max(self._busy_until_s, time.monotonic()) + self._step_s
        return _DelayedHandle(result, self._busy_until_s)

    def _token(self, slot: int, position: int) -> int:
        prompt_len, answer = self._answers[slot]
        index = position - prompt_len
        return answer[index] if index < len(answer) else self._eos

    def _score(self, plan: StepPlan, row: int) -> LogprobArrays:
        """Return the log-probabilities of the prompt tokens that follow the tokens of this row."""
        slot, start = int(plan.slots[row]), int(plan.starts[row])
        given = self._prompts[slot][start + 1 : start + 1 + int(plan.num_tokens[row])]
        return self._logprobs(given.tolist(), self._tops[slot])

    def _pooled(self, plan: StepPlan, row: int) -> np.ndarray:
        """Return the pooled state of the whole prompt."""
        slot = int(plan.slots[row])
        tokens = np.array(self._prompts[slot], np.float32)
        states = np.cos((1 + tokens[:, None]) * np.arange(1, 1 + _HIDDEN, dtype=np.float32))
        return states[-1] if self._takes_last[slot] else states.mean(0)

    def _logprobs(self, tokens: list[int], top: int) -> LogprobArrays:
        steps = np.arange(top, dtype=np.int32)
        chosen = np.array(tokens, np.int32).reshape(-1, 1)
        ids = np.concatenate([chosen, (chosen + steps) % self._vocab_size], axis=1)
        values = np.concatenate([[-0.1, -0.1], -np.arange(1, max(top, 1))])[: 1 + top].astype(np.float32)
        ranks = np.ones(len(tokens), np.int32)
        return LogprobArrays(ids, np.broadcast_to(values, ids.shape), ranks)

    def warm_up(self) -> bool:
        return False

    def close(self) -> None:
        self._answers.clear()
        self._plans.clear()
