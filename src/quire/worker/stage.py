"""The device side of a pipeline's stages before the last one: steps without logits, and tokens that arrive later.

Such a stage runs the same plans as the last one, on columns with the same content. It counts KV entries at once, because
the next chunk of a prompt follows in the next step. Sampled tokens arrive from the last stage, and are appended before
the first step that may read them, as many steps later as there are stages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from quire.parallel.pipeline import Link
from quire.types import REJECTED, StepHandle, StepPlan, TokenMasks
from quire.worker.memory.states import StateMemory
from quire.worker.results import StepOutput
from quire.worker.runner import Runner
from quire.worker.staging import Staging
from quire.worker.state import SlotState


class ArrivedTokens(NamedTuple):
    """The sampled tokens of a step."""

    plan: StepPlan
    tokens: torch.Tensor  # int32 [rows, 1 + most drafts], REJECTED behind the last token of a row
    rows: np.ndarray  # the rows that sampled, and whose slots still have the same owner


class TokenRelay:
    """The steps whose tokens have not arrived yet, oldest first. One relay serves all runners of a worker."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._steps: deque[tuple[int, StepPlan]] = deque()
        self._count = 0  # steps so far
        self._owned_since: dict[int, int] = {}  # by slot: the step in which it got its owner

    def before(self, plan: StepPlan) -> Iterator[ArrivedTokens]:
        """Receive the tokens that a step may read, and note the step. Call this before each step.

        The scheduler leaves as many steps between two rows of a request as there are stages, unless it has seen the
        result of the first one. So the tokens are there or on their way.
        """
        if self._link.is_muted:
            return
        for _ in range(self._number_due(plan)):
            number, past = self._steps.popleft()
            tokens = self._link.collect(len(past.slots), 1 + past.max_drafts)
            keeps = [self._owned_since.get(slot, 0) <= number for slot in past.slots.tolist()]
            yield ArrivedTokens(past, tokens, np.flatnonzero(past.samples & np.array(keeps)))
        self._count += 1
        for admit in plan.admissions:
            self._owned_since[admit.slot] = self._count
        if plan.samples.any():
            self._steps.append((self._count, plan))

    def _number_due(self, plan: StepPlan) -> int:
        """Return how many steps have tokens that `plan` reads, or are so old that nobody should wait to send them."""
        slots = set(plan.slots.tolist()) - {admit.slot for admit in plan.admissions}
        due = 0
        for place, (number, past) in enumerate(self._steps, 1):
            is_old = number <= self._count + 1 - self._link.stage.count
            if is_old or not slots.isdisjoint(past.slots[past.samples].tolist()):
                due = place
        return due


class StageRunner(Runner):
    """Runner of a stage before the last one."""

    def __init__(self, relay: TokenRelay, **parts: Any) -> None:
        super().__init__(**parts)
        self._relay = relay
        self._no_tokens = torch.zeros(self.state.dummy, 1, dtype=torch.int32)

    def apply(self, plan: StepPlan) -> None:
        for arrived in self._relay.before(plan):
            append_tokens(self.state, self._states, arrived, self._staging)
        super().apply(plan)

    def sample(self, step_id: int, masks: TokenMasks | None) -> StepHandle:
        """Return a handle without results, whose `wait` ends with the step."""
        samples = self._take(step_id)[1].samples
        return self._results.handle(StepOutput(step_id, samples, self._no_tokens[: len(samples)]))


def append_tokens(state: SlotState, states: StateMemory, arrived: ArrivedTokens, staging: Staging) -> None:
    """Append the tokens of a step to the columns, and take back the KV entries and states of rejected drafts."""
    plan, rows = arrived.plan, arrived.rows
    if not len(rows):
        return
    columns = plan.slots[rows], rows, plan.num_drafts[rows], plan.num_tokens[rows]
    slots, at, drafts, counts = staging.send(*columns)
    tokens, known = arrived.tokens.index_select(0, at), state.num_tokens.index_select(0, slots)
    kept = (tokens != REJECTED).sum(1)
    column = state.tokens.view(-1)
    for j in range(tokens.shape[1]):
        place = slots * state.token_row + (known + j).clamp_(max=state.token_row - 1)
        before = column.index_select(0, place)
        # A negative token tells the host of a failure; a step in flight still reads this column, so it needs an id.
        column.index_copy_(0, place, torch.where(kept > j, tokens[:, j].clamp(min=0), before))
    state.num_tokens.index_add_(0, slots, kept.int())
    if plan.max_drafts:
        states.accept(slots, drafts > 0, counts - (drafts + 1 - kept))
    if state.keeps_kv:
        state.num_computed.index_add_(0, slots, (kept - 1 - drafts).int())
