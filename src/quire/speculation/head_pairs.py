"""The pairs that a draft head runs, and the hidden states that are kept for it.

A pair is a token and the states of the position in front of it. The states of each slot are kept in a ring by position.
A GPU uses the kernels of kernels/draft_pairs.py, and `PlainPairs` is their reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quire.attention.base import AttentionBackend, ForwardBatch
from quire.kernels import available
from quire.speculation.draft_batch import DraftTokens, batch_of, draft_batch
from quire.speculation.drafter import DraftContext, DraftRows


@dataclass(slots=True)
class StateRing:
    """The hidden states of the model for the newest positions of each slot."""

    states: Tensor  # [slots * reach, width], by position modulo `reach`
    begins: Tensor  # int64 [slots]: the first position with states
    reach: int


@dataclass(slots=True)
class HeadPairs:
    """Pairs to run: their batch, the places of their states in the ring, and the tokens in front of the next draft."""

    batch: ForwardBatch
    places: Tensor  # int64 [pairs]
    lengths: Tensor  # int32 [rows]


class PairSource(Protocol):
    """Choice of the pairs of a drafter, whose context, back end and ring it holds."""

    def make(self, rows: DraftRows, draft: int, width: int) -> HeadPairs:
        """Return the newest `width` pairs of each row, once `draft` draft tokens have been written."""
        ...

    def write(self, rows: DraftRows, pairs: HeadPairs, drafts: Tensor, draft: int) -> None:
        """Write draft number `draft`, int32 [rows], behind the tokens of the rows that have so many."""
        ...

    def keep(self, states: Tensor, batch: ForwardBatch) -> None:
        """Keep the states of a step, [tokens, width]: of each row only the newest."""
        ...


def pick_pairs(context: DraftContext, backend: AttentionBackend, ring: StateRing) -> PairSource:
    """Return the pairs by kernels if the device has them."""
    return (KernelPairs if available(context.device) else PlainPairs)(context, backend, ring)


class PlainPairs:
    """`PairSource` in plain PyTorch."""

    def __init__(self, context: DraftContext, backend: AttentionBackend, ring: StateRing) -> None:
        self._context, self._backend, self._ring, self._columns = context, backend, ring, context.columns

    def make(self, rows: DraftRows, draft: int, width: int) -> HeadPairs:
        slots, ring, tokens = rows.slots.long(), self._ring, self._columns.tokens
        length = self._columns.num_tokens[slots].long() + rows.counts.clamp(max=draft)
        at, pairs = slots.unsqueeze(1), (length - 1).unsqueeze(1)
        first = (pairs - width).clamp_(min=0)
        positions = first + torch.arange(width, device=slots.device)  # [rows, width]
        writes = (positions < pairs) & (positions >= ring.begins[at])
        if draft:
            writes &= (rows.counts > draft).unsqueeze(1)
        chosen = DraftTokens(
            ids=tokens[at, (positions + 1).clamp_(max=tokens.shape[1] - 1)],
            positions=positions,
            writes=writes,
            wanted=(length - 2 - first.squeeze(1)).clamp_(min=0),
            bound=rows.reach + draft,
        )
        places = (at * ring.reach + positions % ring.reach).flatten()
        return HeadPairs(draft_batch(self._context, self._backend, slots, chosen), places, length.int())

    def write(self, rows: DraftRows, pairs: HeadPairs, drafts: Tensor, draft: int) -> None:
        slots, tokens = rows.slots.long(), self._columns.tokens
        place = pairs.lengths.long().clamp(max=tokens.shape[1] - 1)
        tokens[slots, place] = torch.where(rows.counts > draft, drafts.clamp(min=0), tokens[slots, place])

    def keep(self, states: Tensor, batch: ForwardBatch) -> None:
        reach, kept = self._ring.reach, self._ring.states
        row, slots = rows_of_tokens(batch)
        place = slots * reach + batch.positions % reach
        is_new = (batch.positions >= batch.seq_lens[row].long() - reach) & (batch.kv_slots >= 0)
        kept.index_copy_(0, torch.where(is_new, place, len(kept) - 1), states.to(kept.dtype))


class KernelPairs:
    """`PairSource` by the kernels of a GPU, one for each method."""

    def __init__(self, context: DraftContext, backend: AttentionBackend, ring: StateRing) -> None:
        # Imported here: an installation for CPUs has no Triton.
        from quire.kernels import draft_pairs

        self._kernels = draft_pairs
        self._context, self._backend, self._ring, self._columns = context, backend, ring, context.columns

    def make(self, rows: DraftRows, draft: int, width: int) -> HeadPairs:
        columns, context = self._columns, self._context
        made = self._kernels.make_pairs(
            columns.tokens, columns.num_tokens, self._ring.begins, columns.block_tables, rows.slots, rows.counts,
            draft, width, context.block_size, self._ring.reach,
        )  # fmt: skip
        batch = batch_of(
            context, self._backend, made.slots, ids=made.ids, positions=made.positions, kv_slots=list(made.kv_slots),
            query_start=made.query_start, seq_lens=made.seq_lens, last=made.last, bound=rows.reach + draft,
        )  # fmt: skip
        return HeadPairs(batch, made.places, made.lengths)

    def write(self, rows: DraftRows, pairs: HeadPairs, drafts: Tensor, draft: int) -> None:
        self._kernels.write_drafts(
            self._columns.tokens, pairs.batch.slots, rows.counts, pairs.lengths, drafts, draft
        )

    def keep(self, states: Tensor, batch: ForwardBatch) -> None:
        ring = self._ring
        self._kernels.keep_states(
            states.to(ring.states.dtype).contiguous(), ring.states, batch.positions, batch.kv_slots, batch.query_start,
            batch.seq_lens, batch.slots, ring.reach,
        )  # fmt: skip


def rows_of_tokens(batch: ForwardBatch) -> tuple[Tensor, Tensor]:
    """Return the row and the slot of each token of a step, int64 [tokens]."""
    index = torch.arange(len(batch.positions), device=batch.positions.device, dtype=torch.int32)
    row = torch.searchsorted(batch.query_start[1:].contiguous(), index, right=True)
    row = row.clamp_(max=len(batch.slots) - 1)
    return row, batch.slots[row]
