"""The first and the last kernel of a step: `prepare` builds the batch tensors, `advance` stores the sampled tokens.

The batch header is int32 [rows, 4]. Its columns are the request slot, the number of new tokens, the most tokens that
the row samples (1 + its draft tokens, or 0), and the number of tokens in blocks that rows share (read by attention
only). All other inputs come from the
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
_REJECTED = tl.constexpr(-3)  # as in types/plan.py


@kernel(do_not_specialize=["rows", "total", "logits", "dummy"])
def _prepare_kernel(
    header, tokens, num_tokens, num_computed, block_table, turn,
    input_ids, positions, kv_slots, query_start, seq_lens, slots, logit_index, logit_slots, lengths, first_logits,
    rows, total, logits, max_len, max_blocks, block_size, turns, dummy, table_row, kv_row,
    ONES: tl.constexpr, DRAFTS: tl.constexpr, GROUPS: tl.constexpr, ROWS_PAD: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Grid (rows + 1,): one program per row, and one for the padding after the last token.

    ONES: each row has one token.
    GROUPS: number of block tables of a slot, max_blocks apart.
    DRAFTS: rows may have several rows of logits, and rows without tokens have none.
    """
    row = tl.program_id(0)
    if row == 0:
        tl.store(turn, (tl.load(turn) + 1) % turns)
    begin = row
    if not ONES:
        before = tl.arange(0, ROWS_PAD)
        news = tl.load(header + _HEADER_WIDTH * before + _NEW_TOKENS, mask=before < row, other=0)
        begin = tl.sum(news, 0)
    first = row  # logit row
    if DRAFTS:
        samples = tl.load(header + _HEADER_WIDTH * before + _SAMPLES, mask=before < row, other=0)
        first = tl.sum(tl.where(news > 0, tl.maximum(samples, 1), 0), 0)
    tl.store(query_start + row, begin)
    if row == rows:
        for start in range(begin, total, TOKENS):
            at = start + tl.arange(0, TOKENS)
            inside = at < total
            tl.store(input_ids + at, tl.zeros([TOKENS], tl.int64), mask=inside)
            tl.store(positions + at, tl.zeros([TOKENS], tl.int64), mask=inside)
            for group in range(GROUPS):
                tl.store(kv_slots + group * kv_row + at, tl.full([TOKENS], -1, tl.int64), mask=inside)
        if DRAFTS:
            for start in range(first, logits, TOKENS):
                at = start + tl.arange(0, TOKENS)
                inside = at < logits
                tl.store(logit_index + at, tl.zeros([TOKENS], tl.int64), mask=inside)
                tl.store(logit_slots + at, tl.zeros([TOKENS], tl.int64) + dummy, mask=inside)
                tl.store(lengths + at, tl.full([TOKENS], 1, tl.int32), mask=inside)
        return
    slot = tl.load(header + _HEADER_WIDTH * row + _SLOT).to(tl.int64)
    n = tl.load(header + _HEADER_WIDTH * row + _NEW_TOKENS)
    computed = tl.load(num_computed + slot)
    tl.store(slots + row, slot)
    tl.store(seq_lens + row, tl.where(n > 0, computed + n, 0))
    known = tl.load(num_tokens + slot)
    tl.store(first_logits + row, first)
    if DRAFTS:
        samples = tl.load(header + _HEADER_WIDTH * row + _SAMPLES)
        count = tl.where(n > 0, tl.maximum(samples, 1), 0)
        for start in range(0, count, TOKENS):
            offset = start + tl.arange(0, TOKENS)
            inside = offset < count
            at = first + offset
            tl.store(logit_index + at, (begin + n - count + offset).to(tl.int64), mask=inside)
            tl.store(logit_slots + at, tl.zeros([TOKENS], tl.int64) + slot, mask=inside)
            tl.store(lengths + at, known + offset, mask=inside)
    else:
        tl.store(logit_index + row, tl.maximum(begin + n - 1, 0).to(tl.int64))
        tl.store(logit_slots + row, slot)
        tl.store(lengths + row, known)
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
    num_tokens: torch.Tensor,
    num_computed: torch.Tensor,
    block_tables: Sequence[torch.Tensor],
    block_size: int,
    turn: torch.Tensor,
    turns: int,
    dummy: int,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    kv_slots: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    slots: torch.Tensor,
    logit_index: torch.Tensor,
    logit_slots: torch.Tensor,
    lengths: torch.Tensor,
    first_logits: torch.Tensor,
) -> None:
    """Fill the batch tensors of `rows` rows and `total` tokens from `header` and the slot columns.

    A row that samples up to 1 + k tokens has as many rows of logits, for its last tokens; any other row has one, for
    its last token.

    Args:
        header: int32 [rows or more, 4], the batch header.
        rows: number of rows, padding included.
        total: number of tokens, padding included.
        ones: whether every row has exactly one token.
        tokens: int32 [slots, length], the token ids of each slot; draft tokens follow the known ones.
        num_tokens: int32 [slots], tokens of each slot that are known.
        num_computed: int32 [slots], tokens of each slot that have KV entries.
        block_tables: of each group of layers, int32 [slots, blocks]; parts of one tensor [slots, groups, blocks].
        block_size: tokens per block.
        turn: int32 [1], the step counter modulo `turns`; incremented.
        turns: number of rows of the ring of sampled tokens.
        dummy: the slot of padding rows.
        input_ids: written, int64 [total]; 0 for padding.
        positions: written, int64 [total]; 0 for padding.
        kv_slots: written, int64 [groups, total or more]: block * block_size + offset, or -1 for padding.
        query_start: written, int32 [rows + 1].
        seq_lens: written, int32 [rows]; 0 for a row without new tokens.
        slots: written, int64 [rows].
        logit_index: written, int64 [logit rows]: the token of each row of logits. There are as many as `rows` if no
            row has draft tokens. Otherwise rows without tokens have none, and rows of logits that are left over
            point to token 0.
        logit_slots: written, int64 [logit rows]; `dummy` for those left over.
        lengths: written, int32 [logit rows]: the known tokens and the drafts in front of the token to sample.
        first_logits: written, int32 [rows]: the first row of logits of each row.
    """
    logits, table = logit_index.shape[0], block_tables[0]
    _prepare_kernel[(rows + 1,)](
        header, tokens, num_tokens, num_computed, table, turn,
        input_ids, positions, kv_slots, query_start, seq_lens, slots, logit_index, logit_slots, lengths, first_logits,
        rows, total, logits, tokens.shape[1], table.shape[1], block_size, turns, dummy, table.stride(0),
        kv_slots.stride(0), ONES=ones, DRAFTS=logits != rows, GROUPS=len(block_tables),
        ROWS_PAD=triton.next_power_of_2(header.shape[0]), TOKENS=_TOKENS, num_warps=4,
    )  # fmt: skip


@kernel(do_not_specialize=["rows", "dummy"])
def _advance_kernel(
    header, sampled, first_logits, tokens, num_tokens, num_computed, turn, ring, rows, dummy, max_len, ring_turn,
    ring_row, KEEPS_KV: tl.constexpr, ROWS: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """MOST: tokens that a row samples at most."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    slot = tl.load(header + _HEADER_WIDTH * row + _SLOT, mask=inside, other=0)
    real = inside & (slot != dummy)
    most = tl.load(header + _HEADER_WIDTH * row + _SAMPLES, mask=real, other=0)
    samples = real & (most != 0)
    first = row
    if MOST > 1:
        first = tl.load(first_logits + row, mask=inside, other=0)
    length = tl.load(num_tokens + slot, mask=samples, other=0)
    own = tokens + slot.to(tl.int64) * max_len + length
    result = ring + tl.load(turn) * ring_turn + row * ring_row
    kept = tl.zeros([ROWS], tl.int32)
    keeps = samples
    for j in tl.static_range(MOST):
        token = tl.load(sampled + first + j, mask=keeps, other=_REJECTED)
        draft = tl.load(own + j, mask=keeps & (j + 1 < most), other=_REJECTED)
        tl.store(result + j, token, mask=inside)
        # The host learns of a failure, but a step in flight still reads a valid token.
        tl.store(own + j, tl.maximum(token, 0), mask=keeps)
        kept += keeps.to(tl.int32)
        keeps = keeps & (token == draft) & (j + 1 < most)
    tl.store(num_tokens + slot, length + kept, mask=samples)
    if KEEPS_KV:
        n = tl.load(header + _HEADER_WIDTH * row + _NEW_TOKENS, mask=real, other=0)
        computed = tl.load(num_computed + slot, mask=real, other=0)
        tl.store(num_computed + slot, computed + n - (most - kept), mask=real)


def advance(
    header: torch.Tensor,
    rows: int,
    drafts: bool,
    sampled: torch.Tensor,
    first_logits: torch.Tensor,
    tokens: torch.Tensor,
    num_tokens: torch.Tensor,
    num_computed: torch.Tensor,
    turn: torch.Tensor,
    ring: torch.Tensor,
    dummy: int,
    keeps_kv: bool,
) -> None:
    """Update the slot columns after a step: count its KV entries, and append the tokens of each row that samples.

    Of a row with draft tokens, the tokens up to the first one that differs from its draft are appended, and the KV
    entries of the other drafts are not counted (`accepted_counts` in worker/step/torch_batch.py says why).

    Args:
        header: int32 [rows or more, 4], the batch header.
        rows: number of rows.
        drafts: whether rows may have draft tokens, as many as `ring` has columns for.
        sampled: int32 [logit rows]; negative for a failure (types/plan.py).
        first_logits: int32 [rows], the first logit row of each row; read if there are drafts.
        tokens: updated, int32 [slots, length]; draft tokens follow the known ones.
        num_tokens: updated, int32 [slots], tokens of each slot that are known.
        num_computed: updated, int32 [slots], tokens of each slot that have KV entries.
        turn: int32 [1], the row of `ring` to write.
        ring: written, int32 [turns, most rows, 1 + most drafts], the appended tokens, and REJECTED behind them; may
            be pinned host memory.
        dummy: the slot of padding rows, whose columns are not updated.
        keeps_kv: whether the step wrote KV entries; if not, `num_computed` stays unchanged.
    """
    _advance_kernel[(triton.cdiv(rows, _ROWS),)](
        header, sampled, first_logits, tokens, num_tokens, num_computed, turn, ring,
        rows, dummy, tokens.shape[1], ring.stride(0), ring.stride(1),
        KEEPS_KV=keeps_kv, ROWS=_ROWS, MOST=ring.shape[2] if drafts else 1, num_warps=1,
    )  # fmt: skip
