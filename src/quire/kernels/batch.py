"""The first and the last kernel of a step: `prepare` builds the batch tensors, `advance` stores the sampled tokens.

The batch header is int32 [rows, 4]. Its columns are the request slot, the number of new tokens, whether the row
samples, and the number of tokens in blocks that rows share (read by attention only). All other inputs come from the
slot columns, so a captured graph serves every batch of its shape. Rows without tokens are padding, and so is every
row of the last slot, the dummy slot, whose columns never change.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from quire.kernels.jit import kernel

_ROWS = 128  # rows per program of `advance`
_TOKENS = 256  # tokens of a row per iteration of `prepare`

# Columns of the batch header; the fourth one is read by attention.
_HEADER_WIDTH = tl.constexpr(4)
_SLOT = tl.constexpr(0)
_NEW_TOKENS = tl.constexpr(1)
_SAMPLES = tl.constexpr(2)


@kernel(do_not_specialize=["rows", "total"])
def _prepare_kernel(
    header, tokens, num_computed, block_table, turn,
    input_ids, positions, kv_slots, query_start, seq_lens, logit_index, slots,
    rows, total, max_len, max_blocks, block_size, turns, table_row, kv_row,
    ONES: tl.constexpr, GROUPS: tl.constexpr, ROWS_PAD: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Grid (rows + 1,): one program per row, and one for the padding after the last token.

    ONES: each row has one token.
    GROUPS: number of block tables of a slot, max_blocks apart.
    """
    row = tl.program_id(0)
    if row == 0:
        tl.store(turn, (tl.load(turn) + 1) % turns)
    begin = row
    if not ONES:
        before = tl.arange(0, ROWS_PAD)
        begin = tl.sum(tl.load(header + _HEADER_WIDTH * before + _NEW_TOKENS, mask=before < row, other=0), 0)
    tl.store(query_start + row, begin)
    if row == rows:
        for start in range(begin, total, TOKENS):
            at = start + tl.arange(0, TOKENS)
            inside = at < total
            tl.store(input_ids + at, tl.zeros([TOKENS], tl.int64), mask=inside)
            tl.store(positions + at, tl.zeros([TOKENS], tl.int64), mask=inside)
            for group in range(GROUPS):
                tl.store(kv_slots + group * kv_row + at, tl.full([TOKENS], -1, tl.int64), mask=inside)
        return
    slot = tl.load(header + _HEADER_WIDTH * row + _SLOT).to(tl.int64)
    n = tl.load(header + _HEADER_WIDTH * row + _NEW_TOKENS)
    computed = tl.load(num_computed + slot)
    tl.store(slots + row, slot)
    tl.store(seq_lens + row, tl.where(n > 0, computed + n, 0))
    tl.store(logit_index + row, tl.maximum(begin + n - 1, 0).to(tl.int64))
    own_tokens, own_table = tokens + slot * max_len, block_table + slot * table_row
    for start in range(0, n, TOKENS):
        offset = start + tl.arange(0, TOKENS)
        inside = offset < n
        position = computed + offset
        at = begin + offset
        token = tl.load(own_tokens + position, mask=inside, other=0)
        tl.store(input_ids + at, token.to(tl.int64), mask=inside)
        tl.store(positions + at, position.to(tl.int64), mask=inside)
        for group in range(GROUPS):
            entry = own_table + group * max_blocks + position // block_size
            block = tl.load(entry, mask=inside, other=0).to(tl.int64)
            place = block * block_size + position % block_size
            tl.store(kv_slots + group * kv_row + at, place, mask=inside)


def prepare(
    header: torch.Tensor,
    rows: int,
    total: int,
    ones: bool,
    tokens: torch.Tensor,
    num_computed: torch.Tensor,
    block_tables: Sequence[torch.Tensor],
    block_size: int,
    turn: torch.Tensor,
    turns: int,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    kv_slots: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    logit_index: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Fill the batch tensors of `rows` rows and `total` tokens from `header` and the slot columns.

    Args:
        header: int32 [rows or more, 4], the batch header.
        rows: number of rows, padding included.
        total: number of tokens, padding included.
        ones: whether every row has exactly one token.
        tokens: int32 [slots, length], the token ids of each slot.
        num_computed: int32 [slots], tokens of each slot that have KV entries.
        block_tables: of each group of layers, int32 [slots, blocks]; parts of one tensor [slots, groups, blocks].
        block_size: tokens per block.
        turn: int32 [1], the step counter modulo `turns`; incremented.
        turns: number of rows of the ring of sampled tokens.
        input_ids: written, int64 [total]; 0 for padding.
        positions: written, int64 [total]; 0 for padding.
        kv_slots: written, int64 [groups, total or more]: block * block_size + offset, or -1 for padding.
        query_start: written, int32 [rows + 1].
        seq_lens: written, int32 [rows]; 0 for a row without new tokens.
        logit_index: written, int64 [rows]: the index of each row's last token.
        slots: written, int64 [rows].
    """
    table = block_tables[0]
    _prepare_kernel[(rows + 1,)](
        header, tokens, num_computed, table, turn,
        input_ids, positions, kv_slots, query_start, seq_lens, logit_index, slots,
        rows, total, tokens.shape[1], table.shape[1], block_size, turns, table.stride(0), kv_slots.stride(0),
        ONES=ones, GROUPS=len(block_tables), ROWS_PAD=triton.next_power_of_2(header.shape[0]), TOKENS=_TOKENS, num_warps=4,
    )  # fmt: skip


@kernel(do_not_specialize=["rows", "dummy"])
def _advance_kernel(
    header, sampled, tokens, num_tokens, num_computed, turn, ring, rows, dummy, max_len, ring_row,
    KEEPS_KV: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    slot = tl.load(header + _HEADER_WIDTH * row + _SLOT, mask=inside, other=0)
    real = inside & (slot != dummy)
    if KEEPS_KV:
        n = tl.load(header + _HEADER_WIDTH * row + _NEW_TOKENS, mask=real, other=0)
        computed = tl.load(num_computed + slot, mask=real, other=0)
        tl.store(num_computed + slot, computed + n, mask=real)
    samples = real & (tl.load(header + _HEADER_WIDTH * row + _SAMPLES, mask=real, other=0) != 0)
    token = tl.load(sampled + row, mask=inside, other=0)
    length = tl.load(num_tokens + slot, mask=samples, other=0)
    # The host learns of a failure, but a step in flight still reads a valid token.
    known = tl.maximum(token, 0)
    tl.store(tokens + slot.to(tl.int64) * max_len + length, known, mask=samples)
    tl.store(num_tokens + slot, length + 1, mask=samples)
    tl.store(ring + tl.load(turn) * ring_row + row, token, mask=inside)


def advance(
    header: torch.Tensor,
    rows: int,
    sampled: torch.Tensor,
    tokens: torch.Tensor,
    num_tokens: torch.Tensor,
    num_computed: torch.Tensor,
    turn: torch.Tensor,
    ring: torch.Tensor,
    dummy: int,
    keeps_kv: bool,
) -> None:
    """Update the slot columns after a step: count its KV entries, and append the token of each row that samples.

    Args:
        header: int32 [rows or more, 4], the batch header.
        rows: number of rows.
        sampled: int32 [rows]; negative for a failure (types/plan.py).
        tokens: updated, int32 [slots, length].
        num_tokens: updated, int32 [slots], tokens of each slot that are known.
        num_computed: updated, int32 [slots], tokens of each slot that have KV entries.
        turn: int32 [1], the row of `ring` to write.
        ring: written, int32 [turns, most rows], a copy of `sampled`; may be pinned host memory.
        dummy: the slot of padding rows, whose columns are not updated.
        keeps_kv: whether the step wrote KV entries; if not, `num_computed` stays unchanged.
    """
    _advance_kernel[(triton.cdiv(rows, _ROWS),)](
        header, sampled, tokens, num_tokens, num_computed, turn, ring,
        rows, dummy, tokens.shape[1], ring.shape[1],
        KEEPS_KV=keeps_kv, ROWS=_ROWS, num_warps=1,
    )  # fmt: skip
