"""Attention over blocks for rows with many new tokens, which are tiled as well ("FlashAttention-2", Dao 2023).

A small kernel lists the tiles of a step, once for all layers, from device tensors alone; the list and the
grid have room for the most tiles there can be, so a captured graph serves any mix of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.attention.tile import MASKED, Tile, attend_tile, first_fit, load_rows, pad, score_factors
from quire.kernels.jit import kernel
from quire.kernels.target import Target, target_of

_SEARCH = tl.constexpr(256)  # rows looked at at once
# Numbers per listed tile: slot, first token in row, the row's start, n, seq_len. n is 0 where there is no tile: so
# zeros mean none, which is what a list holds that was not written (kernels/ahead.py).
_ENTRY = tl.constexpr(8)


@triton.jit
def _find_tile(query_start, rows, index, QUERIES: tl.constexpr, TOKENS: tl.constexpr):
    """(row, tile in row counted from its end, or row = rows): the index-th tile of the long rows.

    Counting tiles on the device costs one load and a scan, and keeps the batch free of host metadata.
    """
    found, before, base = 0, 0, 0
    while (found == base) & (base < rows):  # every row so far has been passed
        row = base + tl.arange(0, _SEARCH)
        begin = tl.load(query_start + row, mask=row < rows, other=0)
        n = tl.load(query_start + row + 1, mask=row < rows, other=0) - begin
        ends = before + tl.cumsum(tl.where(n > QUERIES, tl.cdiv(n, TOKENS), 0), 0)
        passed = ends <= index
        found = base + tl.sum(passed.to(tl.int32), 0)
        before = tl.maximum(before, tl.max(tl.where(passed, ends, 0), 0))
        base += _SEARCH
    return found, index - before


@kernel
def _list_kernel(
    tiles, query_start, seq_lens, slots, rows,
    QUERIES: tl.constexpr, TOKENS: tl.constexpr, LONGEST_FIRST: tl.constexpr,
):  # fmt: skip
    """Grid (most tiles). Row by row from each row's end; or over all rows those with the most keys first."""
    index = tl.program_id(0)
    row, back = _find_tile(query_start, rows, index, QUERIES, TOKENS)
    if row >= rows:
        tl.store(tiles + index * _ENTRY + 3, 0)
        return
    token = tl.load(query_start + row)
    n = tl.load(query_start + row + 1) - token
    seq_len = tl.load(seq_lens + row)
    tile = tl.cdiv(n, TOKENS) - 1 - back
    place = index
    if LONGEST_FIRST:  # after all tiles that end later, and those of rows before that end at the same place
        depth = tile + (seq_len - n) // TOKENS
        place = 0
        for base in range(0, rows, _SEARCH):
            other = base + tl.arange(0, _SEARCH)
            begin = tl.load(query_start + other, mask=other < rows, other=0)
            new = tl.load(query_start + other + 1, mask=other < rows, other=0) - begin
            older = (tl.load(seq_lens + other, mask=other < rows, other=0) - new) // TOKENS
            count = tl.where(new > QUERIES, tl.cdiv(new, TOKENS), 0)
            later = tl.minimum(tl.maximum(count - tl.maximum(depth + 1 - older, 0), 0), count)
            same = (depth >= older) & (depth - older < count) & (other < row)
            place += tl.sum(later + same.to(tl.int32), 0)
    entry = tiles + place * _ENTRY
    tl.store(entry, tl.load(slots + row).to(tl.int32))
    tl.store(entry + 1, tile * TOKENS)
    tl.store(entry + 2, token)
    tl.store(entry + 3, n)
    tl.store(entry + 4, seq_len)


def list_tiles(
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    slots: torch.Tensor,
    most: int,
    queries: int,
    per_tile: int,
    programs: int,
) -> torch.Tensor:
    """The tiles of `per_tile` tokens of all rows with more than `queries` new tokens, at most `most`. About so many
    `programs` will have work, which decides their order."""
    few = _FEW_PROGRAMS * target_of(seq_lens.device).sms
    tiles = torch.empty(most, _ENTRY.value, dtype=torch.int32, device=seq_lens.device)
    _list_kernel[(most,)](
        tiles, query_start, seq_lens, slots, seq_lens.shape[0],
        QUERIES=queries, TOKENS=per_tile, LONGEST_FIRST=programs <= few,
    )  # fmt: skip
    return tiles


@kernel
def _long_kernel(
    q, keys, values, out, table, tiles,
    q_token, q_head, block_stride, head_stride, token_stride, table_row, scale, cap, window,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (kv heads, tiles): TOKENS queries of a row, each with the GROUP heads of one KV head."""
    kv_head = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    entry = tiles + tl.program_id(1) * _ENTRY
    slot, tile, token = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    n, seq_len = tl.load(entry + 3), tl.load(entry + 4)
    if n == 0:
        return
    old = seq_len - n  # keys before the row's new tokens

    m = tl.arange(0, ROWS)
    query, head = m // GROUP, kv_head * GROUP + m % GROUP
    valid = (tile + query < n) & (m < TOKENS * GROUP)
    query_pos = old + tile + query
    first = (token + tile).to(tl.int64)  # offsets from the first token fit in 32 bits: fewer registers
    real = tl.minimum(query, n - 1 - tile)  # a row past the last query repeats it and is not stored
    q_tile = load_rows(q + first * q_token, real * q_token + head * q_head, DIM, DIM_PAD)

    acc = tl.zeros([ROWS, DIM_PAD], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], MASKED, tl.float32)
    head_keys = keys + kv_head.to(tl.int64) * head_stride
    head_values = values + kv_head.to(tl.int64) * head_stride
    row_table = table + slot.to(tl.int64) * table_row

    begin, low_pos = 0, old + tile
    end = old + tl.minimum(tile + TOKENS, n)
    if WINDOW:
        begin = tl.maximum(low_pos + 1 - window, 0) // BLOCK_N * BLOCK_N
    for start in range(begin, end, BLOCK_N):
        acc, total, top = attend_tile(
            acc, total, top, q_tile, query_pos, low_pos, end - 1, start, end, head_keys, head_values,
            row_table, scale, cap, window, block_stride, token_stride,
            DIM, DIM_PAD, BLOCK_SIZE, BLOCK_N, WINDOW, CAPPED,
        )  # fmt: skip

    dim, heads = tl.arange(0, DIM_PAD), tl.num_programs(0) * GROUP
    to = out + first * heads * DIM
    at = (query * heads + head) * DIM
    result = acc / total[:, None]
    mask = valid[:, None] & (dim < DIM)[None, :]
    tl.store(to + at[:, None] + dim[None, :], result.to(out.dtype.element_ty), mask=mask)


def attend_long(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    table: torch.Tensor,
    tiles: torch.Tensor,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    tile: Tile | None = None,
) -> None:
    """The rows of `tiles`: a list, by `list_tiles`, of tiles of `long_tokens(...)` tokens.

    q [tokens, heads, dim] (dim contiguous), out [tokens, heads * dim], table int32 [slots, blocks].
    """
    heads, dim = q.shape[1:]
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    target = target_of(q.device)
    rows, block_n, warps, stages, registers = tile or long_tile(dim, q.element_size(), group, target)
    factor, cap = score_factors(scale, soft_cap)
    pdl = target.has_dependent_launch
    _long_kernel[(kv_heads, tiles.shape[0])](
        q, keys, values, out, table, tiles,
        q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), keys.stride(2), table.stride(0),
        factor, cap, window or 0,
        GROUP=group, TOKENS=rows // group, ROWS=rows,
        DIM=dim, DIM_PAD=pad(dim), BLOCK_SIZE=keys.shape[2], BLOCK_N=block_n,
        WINDOW=window is not None, CAPPED=soft_cap is not None,
        PDL=pdl, num_warps=warps, num_stages=stages, maxnreg=registers, launch_pdl=pdl,
    )  # fmt: skip


# ------------------------------------------------------------------------------------ sizes of the work


# Below so many programs per multiprocessor, about five for each that runs at a time, the last ones decide how long
# it takes, and the order evens them out; above, tiles of one row that run side by side and share its keys are worth
# more.
_FEW_PROGRAMS = 10


def long_tile(dim: int, itemsize: int, group: int, target: Target) -> Tile:
    """The first of each list was measured on an H200 (benchmarks/kernels.py); the others need less shared memory."""
    tiles = [tile.with_rows(group) for tile in _tiles(pad(dim), itemsize, target)]
    return first_fit(tiles, dim, itemsize, target)


def _tiles(width: int, itemsize: int, target: Target) -> list[Tile]:
    smallest = [Tile(32, 32, 4, 1), Tile(32, 16, 4, 1), Tile(16, 16, 4, 1)]
    if not target.has_matrix_units:
        return smallest
    if itemsize == 4:
        return [Tile(64 if width <= 128 else 32, 32, 8, 2), Tile(32, 16, 8, 2), *smallest]
    if width <= 128:  # so few registers that two programs fit on a multiprocessor: one multiplies
        return [Tile(128, 64, 8, 3, 128), *smallest]  # while the other takes exponents
    return [Tile(128, 64, 8, 3), Tile(64, 32, 4, 2), *smallest]


def long_tokens(dim: int, itemsize: int, group: int, target: Target) -> int:
    """New tokens of a row that one tile covers."""
    return long_tile(dim, itemsize, group, target).rows // group


def most_tiles(tokens: int, rows: int, queries: int, per_tile: int) -> int:
    """The most tiles of `per_tile` tokens that rows with more than `queries` of `tokens` in all can have."""
    long_rows = min(rows, tokens // (queries + 1))
    return (tokens + long_rows * (per_tile - 1)) // per_tile
