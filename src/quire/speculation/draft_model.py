"""Drafts of a smaller model with the same vocabulary.

The draft model has layers of its own in the same KV blocks: a block of a request holds the entries of both models for
the same tokens. Steps with prompts run both models on the same batch (`follow`), so the draft model's entries are there
when a request begins to decode, and where the prefix cache finds the blocks.

A draft model whose entries are stale, after steps without drafts, drafts worse tokens but changes no output.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quire.attention.base import AttentionBackend, ForwardBatch
from quire.models.decoder import Model
from quire.speculation.draft_batch import DraftTokens, draft_batch, draw
from quire.speculation.drafter import DraftContext, Drafter, DraftRows


class ModelDrafter(Drafter):
    """A `Drafter` that runs `model` once per draft token, over all rows of the step.

    The first run takes the last two known tokens: the entries of the last draft of the step before are missing, because
    no draft followed it.
    """

    def __init__(self, model: Model, backend: AttentionBackend, context: DraftContext) -> None:
        self._model, self._backend, self._context = model, backend, context
        self._columns = context.columns

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
            logits = self._logits(slots, length, wanted, rows.reach + j, 1 if j else 2)
            drafts = draw(self._context, logits, slots, length)
            tokens[slots, length] = torch.where(wanted, drafts, tokens[slots, length])

    def _logits(self, slots: Tensor, length: Tensor, wanted: Tensor, reach: int, width: int) -> Tensor:
        """Run the last `width` of `length` tokens of each slot, and return the logits behind them, [rows, vocab].

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
        return self._model.logits(self._model(batch))
