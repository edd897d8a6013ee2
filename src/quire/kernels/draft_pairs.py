"""Kernels around a draft head: which pairs it runs, where its drafts go, and the states that are kept for it.

In plain PyTorch each of these is ten to forty operations on a few numbers per row, and a step with three drafts spends
more time on launching those than on the products of the head. `speculation/head_pairs.py` has the same in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from quire.kernels.jit import kernel

_COLUMNS = 1024  # of a state or of logits, per program


class PairBuffers(NamedTuple):
    """The pairs of a token and a hidden state that a head runs, `width` of each row."""

    ids: torch.Tensor  # int64 [rows * width]
    positions: torch.Tensor  # int64 [rows * width]
    places: torch.Tensor  # int64 [rows * width]: of the states in the ring
    kv_slots: torch.Tensor  # int64 [groups, rows * width]
    slots: torch.Tensor  # int64 [rows]
    last: torch.Tensor  # int64 [rows]: index of the pair whose state is wanted
    query_start: torch.Tensor  # int32 [rows + 1]
    seq_lens: torch.Tensor  # int32 [rows]
    lengths: torch.Tensor  # int32 [rows]: tokens in front of the draft


@kernel(do_not_specialize=["draft", "rows", "slots_stride", "counts_stride", "dummy"])
def _pairs_kernel(
    tokens, num_tokens, begins, slots, counts, table,
    ids, positions, places, kv_slots, slots_out, last, query_start, seq_lens, lengths,
    draft, rows, slots_stride, counts_stride, dummy, max_len, token_row, table_row, max_blocks, block_size, reach,
    WIDTH: tl.constexpr, PAD: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Grid (rows,)."""
    row = tl.program_id(0)
    slot = tl.load(slots + row * slots_stride).to(tl.int64)
    count = tl.load(counts + row * counts_stride).to(tl.int32)
    length = tl.load(num_tokens + slot) + tl.minimum(count, draft)
    first = tl.maximum(length - 1 - WIDTH, 0)
    offset = tl.arange(0, PAD)
    inside, position, at = offset < WIDTH, first + offset, row * WIDTH + offset
    token = tl.load(tokens + slot * token_row + tl.minimum(position + 1, max_len - 1), mask=inside, other=0)
    tl.store(ids + at, token.to(tl.int64), mask=inside)
    tl.store(positions + at, position.to(tl.int64), mask=inside)
    tl.store(places + at, slot * reach + position % reach, mask=inside)
    writes = (position < length - 1) & (position >= tl.load(begins + slot)) & ((draft == 0) | (count > draft))
    for group in range(GROUPS):
        own, spare = table + slot * table_row, table + tl.cast(dummy, tl.int64) * table_row
        entry = group * max_blocks + tl.minimum(position // block_size, max_blocks - 1)
        block = tl.load(own + entry, mask=inside, other=0).to(tl.int64)
        nowhere = tl.load(spare + group * max_blocks).to(tl.int64) * block_size
        place = tl.where(writes, block * block_size + position % block_size, nowhere)
        tl.store(kv_slots + group * rows * WIDTH + at, place, mask=inside)
    tl.store(slots_out + row, slot)
    tl.store(last + row, (row * WIDTH + tl.maximum(length - 2 - first, 0)).to(tl.int64))
    tl.store(query_start + row, row * WIDTH)
    if row == rows - 1:
        tl.store(query_start + rows, rows * WIDTH)
    tl.store(seq_lens + row, first + WIDTH)
    tl.store(lengths + row, length)


def make_pairs(
    tokens: torch.Tensor,
    num_tokens: torch.Tensor,
    begins: torch.Tensor,
    block_tables: Sequence[torch.Tensor],
    slots: torch.Tensor,
    counts: torch.Tensor,
    draft: int,
    width: int,
    block_size: int,
    reach: int,
) -> PairBuffers:
    """Return the newest `width` pairs of each row, once `draft` draft tokens have been written.

    Args:
        tokens: int32 [slots, length].
        num_tokens: int32 [slots], known tokens.
        begins: int64 [slots], first position with a state; entries in front of it are not written.
        block_tables: by group, int32 [slots, blocks], next to each other; the last slot is the dummy.
        slots: integers [rows].
        counts: integers [rows], drafts of each row. Rows without draft number `draft` write no entries.
        draft: number of the draft, from 0.
        width: pairs of each row.
        block_size: tokens of a block.
        reach: states that the ring holds of a slot.
    """
    rows, groups, device, table = len(slots), len(block_tables), slots.device, block_tables[0]
    long, short = (
        [torch.empty(size, dtype=dtype, device=device) for size in sizes]
        for dtype, sizes in (
            (torch.int64, (rows * width, rows * width, rows * width, (groups, rows * width), rows, rows)),
            (torch.int32, (rows + 1, rows, rows)),
        )
    )
    pairs = PairBuffers(*long, *short)
    _pairs_kernel[(rows,)](
        tokens, num_tokens, begins, slots, counts, table, pairs.ids, pairs.positions, pairs.places, pairs.kv_slots,
        pairs.slots, pairs.last, pairs.query_start, pairs.seq_lens, pairs.lengths,
        draft, rows, slots.stride(0), counts.stride(0), len(table) - 1, tokens.shape[1], tokens.stride(0),
        table.stride(0), table.shape[1], block_size, reach,
        WIDTH=width, PAD=triton.next_power_of_2(width), GROUPS=groups, num_warps=1,
    )  # fmt: skip
    return pairs


@kernel(do_not_specialize=["draft", "counts_stride"])
def _write_kernel(tokens, slots, counts, lengths, drafts, draft, counts_stride, max_len, token_row):
    """Grid (rows,)."""
    row = tl.program_id(0)
    if tl.load(counts + row * counts_stride).to(tl.int32) > draft:
        place = tl.minimum(tl.load(lengths + row), max_len - 1)
        token = tl.maximum(tl.load(drafts + row), 0)
        tl.store(tokens + tl.load(slots + row) * token_row + place, token)


def write_drafts(
    tokens: torch.Tensor,
    slots: torch.Tensor,
    counts: torch.Tensor,
    lengths: torch.Tensor,
    drafts: torch.Tensor,
    draft: int,
) -> None:
    """Write `drafts`, int32 [rows], at `lengths` of the slots' tokens, for rows with more than `draft` drafts.

    Negative drafts, which stand for a failed choice, become token 0. Other arguments are those of `make_pairs`.
    """
    _write_kernel[(len(slots),)](
        tokens, slots, counts, lengths, drafts, draft, counts.stride(0), tokens.shape[1], tokens.stride(0), num_warps=1
    )  # fmt: skip


@kernel(do_not_specialize=["rows"])
def _keep_kernel(
    states, ring, positions, kv_slots, query_start, seq_lens, slots, rows, width, reach,
    ROWS_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, blocks of columns)."""
    token = tl.program_id(0)
    number = tl.arange(0, ROWS_PAD)
    ends = tl.load(query_start + 1 + number, mask=number < rows, other=2147483647)
    row = tl.minimum(tl.sum((ends <= token).to(tl.int32), 0), rows - 1)
    position = tl.load(positions + token)
    if (position >= tl.load(seq_lens + row) - reach) & (tl.load(kv_slots + token) >= 0):
        place = tl.load(slots + row) * reach + position % reach
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        state = tl.load(states + token.to(tl.int64) * width + column, mask=column < width)
        tl.store(ring + place * width + column, state, mask=column < width)


def keep_states(
    states: torch.Tensor,
    ring: torch.Tensor,
    positions: torch.Tensor,
    kv_slots: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    slots: torch.Tensor,
    reach: int,
) -> None:
    """Keep the newest `reach` states of each row of a step in its slot's part of `ring`, by position.

    Args:
        states: [tokens, width], contiguous.
        ring: updated, [slots * reach, width].
        positions, kv_slots, query_start, seq_lens, slots: of the step (`ForwardBatch`). Tokens with a negative KV slot
            are padding.
        reach: states of a slot.
    """
    count, width = states.shape
    if not count:
        return
    _keep_kernel[(count, triton.cdiv(width, _COLUMNS))](
        states, ring, positions, kv_slots, query_start, seq_lens, slots, len(slots), width, reach,
        ROWS_PAD=triton.next_power_of_2(len(slots)), BLOCK=_COLUMNS, num_warps=4,
    )  # fmt: skip


@kernel
def _spread_kernel(logits, row_of, full, rows, vocab, BLOCK: tl.constexpr):
    """Grid (n, blocks of tokens)."""
    n = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    row = tl.load(row_of + token, mask=inside, other=-1)
    logit = tl.load(logits + n * rows + row, mask=inside & (row >= 0), other=-float("inf"))
    tl.store(full + n * vocab + token, logit, mask=inside)


def spread(logits: torch.Tensor, row_of: torch.Tensor) -> torch.Tensor:
    """Return logits over a vocabulary from those of a part of its tokens; the others are impossible.

    Args:
        logits: [n, rows], contiguous.
        row_of: int32 [vocab], the row of each token, or -1.
    """
    (n, rows), vocab = logits.shape, len(row_of)
    full = logits.new_empty(n, vocab)
    _spread_kernel[(n, triton.cdiv(vocab, _COLUMNS))](
        logits, row_of, full, rows, vocab, BLOCK=_COLUMNS, num_warps=4
    )
    return full
