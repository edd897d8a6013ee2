"""The ends of a step on the device: from the header of a plan to the tensors that a model reads, and from
sampled tokens to the slot columns.

The header is int32 [rows, 4]: slot, new tokens, whether the row samples, and tokens in blocks that rows
share, which is for attention. Everything else comes from the
columns, so a captured graph serves every batch of its shape: rows without tokens are padding, and so is
every row of the last slot, the dummy, whose columns never change.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.jit import kernel

_ROWS = 128  # rows of one program of `advance`
_TOKENS = 256  # of one row at a time


@kernel(do_not_specialize=["rows", "total"])
def _prepare_kernel(
    header, tokens, num_computed, block_table, turn,
    input_ids, positions, kv_slots, query_start, seq_lens, logit_index, slots,
    rows, total, max_len, max_blocks, block_size, turns,
    ONES: tl.constexpr, ROWS_PAD: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Grid (rows + 1,): a row each, and the padding behind the last token. ONES: each row has one token."""
    row = tl.program_id(0)
    if row == 0:
        tl.store(turn, (tl.load(turn) + 1) % turns)
    begin = row
    if not ONES:
        before = tl.arange(0, ROWS_PAD)
        begin = tl.sum(tl.load(header + 4 * before + 1, mask=before < row, other=0), 0)
    tl.store(query_start + row, begin)
    if row == rows:
        for start in range(begin, total, TOKENS):
            at = start + tl.arange(0, TOKENS)
            inside = at < total
            tl.store(input_ids + at, tl.zeros([TOKENS], tl.int64), mask=inside)
            tl.store(positions + at, tl.zeros([TOKENS], tl.int64), mask=inside)
            tl.store(kv_slots + at, tl.full([TOKENS], -1, tl.int64), mask=inside)
        return
    slot = tl.load(header + 4 * row).to(tl.int64)
    n = tl.load(header + 4 * row + 1)
    computed = tl.load(num_computed + slot)
    tl.store(slots + row, slot)
    tl.store(seq_lens + row, tl.where(n > 0, computed + n, 0))
    tl.store(logit_index + row, tl.maximum(begin + n - 1, 0).to(tl.int64))
    own_tokens, own_table = tokens + slot * max_len, block_table + slot * max_blocks
    for start in range(0, n, TOKENS):
        offset = start + tl.arange(0, TOKENS)
        inside = offset < n
        position = computed + offset
        block = tl.load(own_table + position // block_size, mask=inside, other=0).to(tl.int64)
        at = begin + offset
        token = tl.load(own_tokens + position, mask=inside, other=0)
        tl.store(input_ids + at, token.to(tl.int64), mask=inside)
        tl.store(positions + at, position.to(tl.int64), mask=inside)
        tl.store(kv_slots + at, block * block_size + position % block_size, mask=inside)


def prepare(
    header: torch.Tensor,
    rows: int,
    total: int,
    ones: bool,
    tokens: torch.Tensor,
    num_computed: torch.Tensor,
    block_table: torch.Tensor,
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
    """Fill the batch tensors of `rows` rows and `total` token places from `header` and the columns.

    tokens int32 [slots, len], num_computed int32 [slots], block_table int32 [slots, blocks]. Written:
    input_ids, positions, kv_slots int64 [total] (kv slot -1: padding), query_start int32 [rows + 1],
    seq_lens int32 [rows] (0: no new token), logit_index and slots int64 [rows]. `turn` int32 [1] counts
    the steps, modulo `turns`.
    """
    _prepare_kernel[(rows + 1,)](
        header, tokens, num_computed, block_table, turn,
        input_ids, positions, kv_slots, query_start, seq_lens, logit_index, slots,
        rows, total, tokens.shape[1], block_table.shape[1], block_size, turns,
        ONES=ones, ROWS_PAD=triton.next_power_of_2(header.shape[0]), TOKENS=_TOKENS, num_warps=4,
    )  # fmt: skip


@kernel(do_not_specialize=["rows", "dummy"])
def _advance_kernel(
    header, sampled, tokens, num_tokens, num_computed, turn, ring, rows, dummy, max_len, ring_row,
    KEEPS_KV: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    slot = tl.load(header + 4 * row, mask=inside, other=0)
    real = inside & (slot != dummy)
    if KEEPS_KV:
        n = tl.load(header + 4 * row + 1, mask=real, other=0)
        computed = tl.load(num_computed + slot, mask=real, other=0)
        tl.store(num_computed + slot, computed + n, mask=real)
    samples = real & (tl.load(header + 4 * row + 2, mask=real, other=0) != 0)
    token = tl.load(sampled + row, mask=inside, other=0)
    length = tl.load(num_tokens + slot, mask=samples, other=0)
    known = tl.maximum(token, 0)  # a failure is told to the host; a step in flight reads a token all the same
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
    """After a step: its KV entries are written, and each sampling row has one more token.

    sampled int32 [rows] (negative: a failure, see types/plan.py) also goes to row `turn` of `ring` int32 [turns, most rows], which may be pinned
    memory of the host. With `keeps_kv` off the columns of KV entries stay as they are.
    """
    _advance_kernel[(triton.cdiv(rows, _ROWS),)](
        header, sampled, tokens, num_tokens, num_computed, turn, ring,
        rows, dummy, tokens.shape[1], ring.shape[1],
        KEEPS_KV=keeps_kv, ROWS=_ROWS, num_warps=1,
    )  # fmt: skip
