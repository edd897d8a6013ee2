"""Drafts of a smaller model with the same vocabulary.

The draft model has layers of its own in the same KV blocks: a block of a request holds the entries of both models for
the same tokens. Steps with prompts run both models on the same batch (`follow`), so the draft model's entries are there
when a request begins to decode, and where the prefix cache finds the blocks.

Steps without drafts do not run the draft model. It runs their tokens when the request drafts again (`keep_up`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from quire.attention.base import AttentionBackend, ForwardBatch
from quire.models.decoder import Model
from quire.speculation.draft_batch import DraftTokens, draft_batch, draw
from quire.speculation.drafter import DraftContext, Drafter, DraftRows
from quire.speculation.pauses import Pauses, batches
from quire.types import StepPlan

_CATCH_UP_TOKENS = (
    2048  # that the draft model runs at once outside of steps, which bounds the memory for them
)
_LONGEST_PAUSE = 1024  # tokens that it runs later at most; older ones of a longer pause stay unknown to it


class ModelDrafter(Drafter):
    """A `Drafter` that runs `model` once per draft token, over all rows of the step.

    The first run takes the last two known tokens: the entries of the last draft of the step before are missing, because
    no draft followed it.
    """

    def __init__(self, model: Model, backend: AttentionBackend, context: DraftContext) -> None:
        self._model, self._backend, self._context = model, backend, context
        self._columns = context.columns
        slots, width = self._columns.tokens.shape
        # The last draft was not run, and neither was the token that the model sampled behind it.
        self._pauses = Pauses(slots, lambda drafts: np.full_like(drafts, 2))
        # Blocks behind a window may have other owners.
        windows = [window // 2 for window in model.spec.windows if window is not None]
        self._most = min(_LONGEST_PAUSE, width, *windows)

    def keep_up(self, plan: StepPlan) -> None:
        lacking = self._pauses.begin(plan)
        late = (lacking > 2) & (plan.num_drafts > 0)
        if late.any():
            # Powers of two, because kernels are compiled for each width.
            width = min(self._most, 1 << int(lacking[late].max() - 1).bit_length())
            for slots in batches(plan.slots[late], width, _CATCH_UP_TOKENS):
                at = torch.from_numpy(slots).long().to(self._columns.tokens.device)
                known = self._columns.num_tokens[at].long()
                self._run(at, known, torch.ones_like(at, dtype=torch.bool), plan.max_seq_len, width)
        self._pauses.end(plan)

    def follow(self, batch: ForwardBatch) -> None:
        kv = self._context.kv
        others = [replace(other, kv=kv) for other in batch.others]
        own = replace(batch, kv=kv, attn=None, others=others, group_of=self._context.group_of)
        own.plan(self._backend)
        self._model(own)

    def propose(self, rows: DraftRows) -> None:
        slots, tokens = rows.slots.long(), self._columns.tokens
        known = self._columns.num_tokens[slots].long()
        for j in range(rows.most):
            # A row that drafts no more stays behind its last draft, so that it never leaves the context.
            wanted, length = rows.counts > j, known + rows.counts.clamp(max=j)
            hidden = self._run(slots, length, wanted, rows.reach + j, 1 if j else 2)
            logits = self._model.logits(hidden)
            drafts = draw(self._context, logits, slots, length).clamp_(min=0)
            tokens[slots, length] = torch.where(wanted, drafts, tokens[slots, length])

    def _run(self, slots: Tensor, length: Tensor, wanted: Tensor, reach: int, width: int) -> Tensor:
        """Run the last `width` of `length` tokens of each slot, and return the states behind them, [rows, hidden].

        Rows that are not `wanted` keep no keys and values.
        """
        first = (length - width).clamp_(min=0).unsqueeze(1)
        positions = first + torch.arange(width, device=slots.device)  # [rows, width]
        tokens = DraftTokens(
            ids=self._columns.tokens[slots.unsqueeze(1), positions],
            positions=positions,
            writes=wanted.unsqueeze(1) & (positions < length.unsqueeze(1)),
            wanted=length - 1 - first.squeeze(1),
            bound=reach,
        )
        batch = draft_batch(self._context, self._backend, slots, tokens)
        return self._model(batch)
