"""Sparse attention over latent entries: index scores, the choice of the largest, attention over what was chosen.

The choice is made token by token (layers/indexer.py). `score_tokens` computes the index scores of all keys that a token
may see, `choose_largest` selects from them by radix, and `attend_chosen` gathers the chosen entries. All of them find
the keys of a token by its position and its row of the block table (`owners`), so prompts and decoding rows are the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.attention.latent import latent_splits, latent_tile
from quire.kernels.attention.short import merge_splits
from quire.kernels.attention.tile import MASKED, load_rows, pad, score_factors
from quire.kernels.jit import kernel
from quire.kernels.target import target_of

_KEYS = 64  # index keys of a program
_SELECT = 1024  # scores that a program of the selection handles at once
_MOST_SCORES = 1 << 26  # in memory at once


def token_owners(query_start: torch.Tensor, slots: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return each token's row of the block table, int64 [tokens]; for tokens behind the last row, any row.

    Args:
        query_start: int32 [rows + 1].
        slots: int64 [rows], the row of the block table of each row.
        tokens: number of tokens.
    """
    number = torch.arange(tokens, dtype=torch.int32, device=slots.device)
    rows = torch.searchsorted(query_start[1:].contiguous(), number, right=True)
    return slots[rows.clamp(max=len(slots) - 1)]


@kernel
def _write_keys(
    keys, blocks, slots, key_token, block_stride, token_stride,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Grid (tokens). Write the token's index key into its block."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    dim = tl.arange(0, DIM_PAD)
    key = tl.load(keys + token * key_token + dim, mask=dim < DIM)
    to = blocks + slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * token_stride
    tl.store(to + dim, key.to(blocks.dtype.element_ty), mask=dim < DIM)


def write_keys(keys: torch.Tensor, blocks: torch.Tensor, slots: torch.Tensor) -> None:
    """Write index keys into their blocks.

    Args:
        keys: [tokens, dim], the last dimension contiguous.
        blocks: [blocks, block size, dim], the last dimension contiguous.
        slots: int64 [tokens]: block * block size + offset in block; negative to store nothing.
    """
    dim = keys.shape[1]
    _write_keys[(keys.shape[0],)](
        keys, blocks, slots, keys.stride(0), blocks.stride(0), blocks.stride(1),
        DIM=dim, DIM_PAD=triton.next_power_of_2(dim), BLOCK_SIZE=blocks.shape[1],
    )  # fmt: skip


@kernel
def _score_kernel(
    q, weights, blocks, scores, positions, owners, table, block_stride, token_stride, table_row, scores_row,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, tiles of keys). Scores behind the token's position are not written."""
    token, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * KEYS
    position = tl.load(positions + token).to(tl.int32)
    if start > position:
        return
    key = start + tl.arange(0, KEYS)
    there = tl.minimum(key, position)
    block = tl.load(table + tl.load(owners + token) * table_row + there // BLOCK_SIZE)
    offsets = block.to(tl.int64) * block_stride + there % BLOCK_SIZE * token_stride
    k = load_rows(blocks, offsets, DIM, DIM_PAD)
    head = tl.arange(0, HEADS_PAD)
    q_tile = load_rows(q + token * HEADS * DIM, tl.minimum(head, HEADS - 1) * DIM, DIM, DIM_PAD)
    weight = tl.load(weights + token * HEADS + head, mask=head < HEADS, other=0.0)
    products = tl.maximum(
        tl.dot(q_tile, tl.trans(k), input_precision="ieee"), 0.0, propagate_nan=tl.PropagateNan.ALL
    )
    total = tl.sum(products * weight[:, None], 0)
    tl.store(scores + token * scores_row + key, total, mask=key <= position)


@triton.jit
def _ordered(x):
    """Return unsigned integers in the order of the floats x; the two zeros are equal."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000).to(tl.uint32)


@triton.jit
def _next_digit(row, length, limit, wanted, SHIFT: tl.constexpr, TILE: tl.constexpr):
    """Find the next eight bits of the `wanted`-th largest score that begins like `limit`; return both, updated."""
    lane = tl.arange(0, TILE)
    counts = tl.zeros([256], tl.int32)
    for start in range(0, length, TILE):
        inside = start + lane < length
        key = _ordered(tl.load(row + start + lane, mask=inside, other=0.0))
        if SHIFT < 24:
            inside = inside & ((key >> (SHIFT + 8)) == (limit >> (SHIFT + 8)))
        counts += tl.histogram(((key >> SHIFT) & 255).to(tl.int32), 256, mask=inside)
    above = tl.sum(counts, 0) - tl.cumsum(counts, 0)
    is_digit = (above < wanted) & (above + counts >= wanted)
    digit = tl.sum(tl.where(is_digit, tl.arange(0, 256), 0), 0)
    wanted -= tl.sum(tl.where(is_digit, above, 0), 0)
    return limit | (digit.to(tl.uint32) << SHIFT), wanted


@kernel
def _choose_kernel(
    scores, chosen, positions, scores_row,
    TOP_K: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (tokens). Write the positions of the largest scores in ascending order, then -1.

    Four passes find the TOP_K-th largest score, eight bits at a time. Of equal scores the first ones are chosen.
    """
    token = tl.program_id(0).to(tl.int64)
    length = tl.load(positions + token).to(tl.int32) + 1
    row, to = scores + token * scores_row, chosen + token * TOP_K
    lane = tl.arange(0, TILE)
    if length <= TOP_K:
        for start in range(0, TOP_K, TILE):
            place = start + lane
            tl.store(to + place, tl.where(place < length, place, -1), mask=place < TOP_K)
    else:
        limit, wanted = (length * 0).to(tl.uint32), length * 0 + TOP_K
        limit, wanted = _next_digit(row, length, limit, wanted, 24, TILE)
        limit, wanted = _next_digit(row, length, limit, wanted, 16, TILE)
        limit, wanted = _next_digit(row, length, limit, wanted, 8, TILE)
        limit, wanted = _next_digit(row, length, limit, wanted, 0, TILE)
        written, equal = length * 0, length * 0
        for start in range(0, length, TILE):
            inside = start + lane < length
            key = _ordered(tl.load(row + start + lane, mask=inside, other=0.0))
            same = (inside & (key == limit)).to(tl.int32)
            before = equal + tl.cumsum(same, 0) - same
            take = (inside & (key > limit)) | ((same > 0) & (before < wanted))
            number = take.to(tl.int32)
            tl.store(to + written + tl.cumsum(number, 0) - number, start + lane, mask=take)
            written += tl.sum(number, 0)
            equal += tl.sum(same, 0)


def choose_tokens(
    q: torch.Tensor,
    weights: torch.Tensor,
    blocks: torch.Tensor,
    positions: torch.Tensor,
    owners: torch.Tensor,
    table: torch.Tensor,
    top_k: int,
    reach: int,
) -> torch.Tensor:
    """Return the positions with the largest index scores, ascending, then -1: int32 [tokens, top_k].

    Args:
        q: [tokens, heads, dim], contiguous.
        weights: float32 [tokens, heads], contiguous.
        blocks: index keys [blocks, block size, dim], the last dimension contiguous.
        positions: int64 [tokens].
        owners: int64 [tokens], each token's row of `table`.
        table: the block table, int32 [slots, blocks].
        top_k: number of positions.
        reach: upper bound of positions, exclusive.
    """
    tokens, heads, dim = q.shape
    chosen = torch.empty(tokens, top_k, dtype=torch.int32, device=q.device)
    at_once = max(1, min(tokens, _MOST_SCORES // reach))
    scores = torch.empty(at_once, reach, dtype=torch.float32, device=q.device)
    for start in range(0, tokens, at_once):
        part = slice(start, min(start + at_once, tokens))
        count = part.stop - part.start
        _score_kernel[(count, triton.cdiv(reach, _KEYS))](
            q[part], weights[part], blocks, scores, positions[part], owners[part], table,
            blocks.stride(0), blocks.stride(1), table.stride(0), scores.stride(0),
            HEADS=heads, HEADS_PAD=max(16, triton.next_power_of_2(heads)), DIM=dim, DIM_PAD=pad(dim),
            BLOCK_SIZE=blocks.shape[1], KEYS=_KEYS,
        )  # fmt: skip
        _choose_kernel[(count,)](
            scores, chosen[part], positions[part], scores.stride(0), TOP_K=top_k, TILE=_SELECT
        )
    return chosen


@kernel
def _chosen_kernel(
    q, blocks, out, sums, stats, chosen, counts, owners, table, block_stride, token_stride, table_row, scale, splits,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    RANK: tl.constexpr, RANK_PAD: tl.constexpr, ROTARY: tl.constexpr, ROTARY_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, TOP_K: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Grid (parts of the heads, tokens, splits). A program handles GROUP heads of a token."""
    part, token, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    begin, end = 0, tl.load(counts + token)
    if SPLIT:
        each = tl.cdiv(tl.cdiv(end, BLOCK_N), splits) * BLOCK_N
        begin = split * each
        end = tl.minimum(begin + each, end)
        if begin >= end:  # a split without entries, which the merge does not read
            return
    m = tl.arange(0, ROWS)
    head = part * GROUP + m
    valid = (m < GROUP) & (head < NUM_HEADS)
    q_offsets = (token * NUM_HEADS + tl.minimum(head, NUM_HEADS - 1)) * (RANK + ROTARY)
    q_tile = load_rows(q, q_offsets, RANK, RANK_PAD)
    q_rotary = load_rows(q + RANK, q_offsets, ROTARY, ROTARY_PAD)
    row_table = table + tl.load(owners + token) * table_row
    acc = tl.zeros([ROWS, RANK_PAD], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], MASKED, tl.float32)
    for start in range(begin, end, BLOCK_N):
        number = start + tl.arange(0, BLOCK_N)
        position = tl.load(chosen + token * TOP_K + tl.minimum(number, end - 1))
        block = tl.load(row_table + position // BLOCK_SIZE)
        offsets = block.to(tl.int64) * block_stride + position % BLOCK_SIZE * token_stride
        latent = load_rows(blocks, offsets, RANK, RANK_PAD)
        rotary = load_rows(blocks + RANK, offsets, ROTARY, ROTARY_PAD)
        scores = tl.dot(q_tile, tl.trans(latent), input_precision="ieee")
        scores = tl.dot(q_rotary, tl.trans(rotary), scores, input_precision="ieee")
        scores = tl.where((number < end)[None, :], scores, MASKED)
        new_top = tl.maximum(top, tl.max(scores, 1) * scale)
        p = tl.exp2(scores * scale - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(latent.dtype), latent, acc * shrink[:, None], input_precision="ieee")
        top = new_top

    dim = tl.arange(0, RANK_PAD)
    mask = valid[:, None] & (dim < RANK)[None, :]
    if SPLIT:  # sums [token, head, split, rank]; stats [..., 2]: sum of exponentials, and top score
        to = (token * NUM_HEADS + head) * splits + split
        tl.store(sums + to[:, None] * RANK + dim[None, :], acc, mask=mask)
        tl.store(stats + to * 2, total, mask=valid)
        tl.store(stats + to * 2 + 1, top, mask=valid)
    else:
        at = (token * NUM_HEADS + head) * RANK
        tl.store(out + at[:, None] + dim[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)


def attend_chosen(
    q: torch.Tensor,
    blocks: torch.Tensor,
    out: torch.Tensor,
    chosen: torch.Tensor,
    positions: torch.Tensor,
    owners: torch.Tensor,
    table: torch.Tensor,
    scale: float,
) -> None:
    """Compute attention of each token over its chosen entries and write it to `out`.

    Args:
        q: [tokens, heads, rank + rotary dim], contiguous.
        blocks: [blocks, block size, rank + rotary dim], the last dimension contiguous.
        out: written, [tokens, heads * rank].
        chosen: int32 [tokens, top_k], contiguous: as many positions as the token sees, at most `top_k`, then -1.
        positions, owners, table: as in `choose_tokens`.
        scale: factor of the scores.
    """
    (tokens, heads, dim), top_k = q.shape, chosen.shape[1]
    rank, target = out.shape[1] // heads, target_of(q.device)
    tile = latent_tile(heads, dim, q.element_size(), target)
    splits = latent_splits(tokens, heads, top_k, dim, q.element_size(), target)
    counts = (positions + 1).clamp(max=top_k).int()
    sums = stats = out
    if splits > 1:
        sums = torch.empty(tokens * heads * splits * rank, dtype=torch.float32, device=q.device)
        stats = torch.empty(tokens * heads * splits * 2, dtype=torch.float32, device=q.device)
    group = min(heads, tile.rows)
    _chosen_kernel[(triton.cdiv(heads, group), tokens, splits)](
        q, blocks, out, sums, stats, chosen, counts, owners, table, blocks.stride(0), blocks.stride(1), table.stride(0),
        score_factors(scale, None)[0], splits,
        NUM_HEADS=heads, GROUP=group, ROWS=tile.rows, RANK=rank, RANK_PAD=pad(rank), ROTARY=dim - rank,
        ROTARY_PAD=pad(dim - rank), BLOCK_SIZE=blocks.shape[1], BLOCK_N=tile.keys, TOP_K=top_k, SPLIT=splits > 1,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if splits > 1:
        merge_splits(sums, stats, out, counts, None, heads, splits, tile.keys)
