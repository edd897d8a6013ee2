"""Drafts of a smaller model with the same vocabulary.

The draft model has layers of its own in the same KV blocks: a block of a request holds the entries of both models for
the same tokens. Steps with prompts run both models on the same batch (`follow`), so the draft model's entries are there
when a request begins to decode, and where the prefix cache finds the blocks.

A draft is drawn with the seed, the position and the filters of its request, so that it equals the model's token as
often as the two distributions overlap (Gumbel coupling, Daliri et al., arXiv:2408.07978). Penalties and other edits of
logits are left out. A draft model whose entries are stale, after steps without drafts, drafts worse tokens but changes
no output.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from quire.attention.base import AttentionBackend, ForwardBatch
from quire.models.decoder import Model
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
            drafts = self._draw(
                self._logits(slots, length, wanted, rows.reach + j, 1 if j else 2), slots, length
            )
            tokens[slots, length] = torch.where(wanted, drafts, tokens[slots, length])

    def _logits(self, slots: Tensor, length: Tensor, wanted: Tensor, reach: int, width: int) -> Tensor:
        """Run the last `width` of `length` tokens of each slot, and return the logits behind them, [rows, vocab].

        Rows that are not `wanted` write their keys and values to the block of the dummy slot.
        """
        columns, size, count = self._columns, self._context.block_size, len(slots)
        offset = torch.arange(width, device=slots.device)
        positions = (length.unsqueeze(1) - width + offset).clamp_(min=0)  # [rows, width]
        rows = slots.unsqueeze(1)

        def kv_slots(table: Tensor) -> Tensor:
            places = table[rows, positions // size].long() * size + positions % size
            nowhere = table[-1, 0].long() * size
            return torch.where(wanted.unsqueeze(1), places, nowhere).flatten()

        last = torch.arange(width - 1, count * width, width, device=slots.device)
        batch = ForwardBatch(
            input_ids=columns.tokens[rows, positions].flatten().long(),
            positions=positions.flatten(),
            kv_slots=kv_slots(columns.block_tables[0]),
            query_start=torch.arange(0, count * width + 1, width, dtype=torch.int32, device=slots.device),
            seq_lens=length.clamp(min=width).int(),
            block_table=columns.block_tables[0],
            slots=slots,
            logit_index=last,
            kv=self._context.kv,
            num_tokens=np.full(count, width, np.int32),
            seq_bounds=np.full(count, max(reach, width), np.int32),
            block_size=size,
            wanted=None if width == 1 else last,
            group_of=self._context.group_of,
        )
        for table in columns.block_tables[1:]:
            batch.add_group(table, kv_slots(table))
        batch.plan(self._backend)
        return self._model.logits(self._model(batch))

    def _draw(self, logits: Tensor, slots: Tensor, length: Tensor) -> Tensor:
        """Return a token for each row, int32 [rows]."""
        vocab = self._context.vocab_size
        logits = pad(logits, (0, vocab - logits.shape[1]), value=float("-inf"))  # or cut, if it is longer
        drafts = torch.empty(len(slots), dtype=torch.int32, device=slots.device)
        self._context.choose(logits.contiguous(), slots, drafts, True, length.int())
        return drafts.clamp_(min=0)
