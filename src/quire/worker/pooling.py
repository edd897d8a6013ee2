"""Pooling of prompts for embeddings: hidden states after the last norm, over a prompt that may come in chunks.

The pooler owns a column of sums by slot, allocated for the first request that needs it. If the mean is wanted, the
prompt is computed from its first token (no cached prefix), and the row that starts there restarts the sum. So nothing
remains of earlier owners of the slot, or of the part before a preemption.
"""

from __future__ import annotations

import numpy as np
import torch

from quire.types import EngineRequest, StepPlan
from quire.worker.staging import Staging


class Pooler:
    """Sums of hidden states by slot, and the pooling method of each slot."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._num_slots, self._device = num_slots, device
        self._sums = torch.empty(0)  # float32 [slots, hidden]
        self._takes_last: dict[int, bool] = {}  # by slot: the last token's state instead of the mean

    def admit(self, slot: int, request: EngineRequest) -> None:
        """Note the pooling of a slot's new owner."""
        if request.pooling is not None:
            self._takes_last[slot] = request.pooling == "last"

    def pool(self, plan: StepPlan, hidden: torch.Tensor, staging: Staging) -> torch.Tensor:
        """Return the pooled state of each row in `plan.pool_rows`, over its tokens so far.

        Args:
            hidden: [tokens, hidden], of all tokens of the step.

        Returns:
            float32 [rows to pool, hidden].
        """
        if not len(self._sums):
            self._sums = torch.zeros(self._num_slots, hidden.shape[1], device=self._device)
        rows = np.array(plan.pool_rows)
        ends = np.cumsum(plan.num_tokens)
        row_of_token = np.full(len(hidden), -1)
        for index, row in enumerate(rows):
            row_of_token[ends[row] - plan.num_tokens[row] : ends[row]] = index
        slots, lasts, starts, lengths, takes_last, of_token = staging.send(
            plan.slots[rows],
            ends[rows] - 1,
            plan.starts[rows],
            plan.starts[rows] + plan.num_tokens[rows],
            np.array([self._takes_last[int(slot)] for slot in plan.slots[rows]]),
            row_of_token,
        )
        # A matrix product instead of index_add_, whose order of additions changes from run to run on a GPU.
        member = of_token[None, :] == torch.arange(len(rows), device=hidden.device)[:, None]
        before = torch.where((starts > 0)[:, None], self._sums.index_select(0, slots), 0.0)
        # The product multiplies tokens of other rows by 0, and 0 * NaN is NaN.
        not_finite = ~hidden.float().sum(1).isfinite()
        sums = before + member.float() @ hidden.float().masked_fill_(not_finite[:, None], 0)
        sums.masked_fill_((member & not_finite).any(1)[:, None], torch.nan)
        self._sums.index_copy_(0, slots, sums)
        return torch.where(
            takes_last.bool()[:, None], hidden.index_select(0, lasts).float(), sums / lengths[:, None]
        )
