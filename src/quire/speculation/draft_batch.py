"""The batch of a drafter's own forward pass: a few tokens of each slot, with the slots' block tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from quire.attention.base import AttentionBackend, ForwardBatch
from quire.speculation.drafter import DraftContext


@dataclass(slots=True)
class DraftTokens:
    """Tokens to run, `width` of each row."""

    ids: Tensor  # integers [rows, width]
    positions: Tensor  # int64 [rows, width], consecutive in a row
    writes: Tensor  # bool [rows, width]: the tokens whose keys and values are kept
    wanted: Tensor  # int64 [rows]: index in its row of the token whose hidden state is wanted
    bound: int  # upper bound of the positions, plus 1


def draft_batch(
    context: DraftContext, backend: AttentionBackend, slots: Tensor, tokens: DraftTokens
) -> ForwardBatch:
    """Return the batch of `tokens`, int64 [rows] of which belong to the slots of equal index.

    Keys and values that are not kept go to the block of the dummy slot.
    """
    columns, size = context.columns, context.block_size
    count, width = tokens.positions.shape
    device, rows = slots.device, slots.unsqueeze(1)

    def kv_slots(table: Tensor) -> Tensor:
        blocks = (tokens.positions // size).clamp_(max=table.shape[1] - 1)
        places = table[rows, blocks].long() * size + tokens.positions % size
        return torch.where(tokens.writes, places, table[-1, 0].long() * size).flatten()

    return batch_of(
        context,
        backend,
        slots,
        ids=tokens.ids.flatten().long(),
        positions=tokens.positions.flatten(),
        kv_slots=[kv_slots(table) for table in columns.block_tables],
        query_start=torch.arange(0, count * width + 1, width, dtype=torch.int32, device=device),
        seq_lens=(tokens.positions[:, -1] + 1).int(),
        last=torch.arange(0, count * width, width, device=device) + tokens.wanted,
        bound=tokens.bound,
    )


def batch_of(
    context: DraftContext,
    backend: AttentionBackend,
    slots: Tensor,
    *,
    ids: Tensor,
    positions: Tensor,
    kv_slots: Sequence[Tensor],
    query_start: Tensor,
    seq_lens: Tensor,
    last: Tensor,
    bound: int,
) -> ForwardBatch:
    """Return a batch of equally many tokens of each slot.

    Args:
        context, backend: of the drafter.
        slots: int64 [rows].
        ids, positions: int64 [rows * width].
        kv_slots: by group of layers, int64 [rows * width].
        query_start, seq_lens, last: see `ForwardBatch`; `last` are the tokens whose states are wanted.
        bound: upper bound of the positions, plus 1.
    """
    count, tables = len(slots), context.columns.block_tables
    width = len(ids) // count
    batch = ForwardBatch(
        input_ids=ids,
        positions=positions,
        kv_slots=kv_slots[0],
        query_start=query_start,
        seq_lens=seq_lens,
        block_table=tables[0],
        slots=slots,
        logit_index=last,
        kv=context.kv,
        num_tokens=np.full(count, width, np.int32),
        seq_bounds=np.full(count, max(bound, width), np.int32),
        block_size=context.block_size,
        wanted=None if width == 1 else last,
        group_of=context.group_of,
    )
    for table, others in zip(tables[1:], kv_slots[1:]):
        batch.add_group(table, others)
    batch.plan(backend)
    return batch


def draw(context: DraftContext, logits: Tensor, slots: Tensor, lengths: Tensor) -> Tensor:
    """Draw a token for each row with the seed, the position and the filters of its request, int32 [rows].

    A negative number stands for a failed choice.

    So a draft equals the model's token as often as the two distributions overlap (Gumbel coupling, Daliri et al.,
    arXiv:2408.07978). Penalties and other edits of logits are left out.

    Args:
        context: the parts of the worker.
        logits: [rows, vocab]; missing columns count as impossible tokens.
        slots: int64 [rows].
        lengths: integers [rows], the number of tokens in front of the one to draw.
    """
    if missing := context.vocab_size - logits.shape[1]:
        logits = pad(logits, (0, missing), value=float("-inf"))  # or cut, if it is longer
    drafts = torch.empty(len(slots), dtype=torch.int32, device=slots.device)
    context.choose(logits.contiguous(), slots, drafts, True, lengths.int())
    return drafts
