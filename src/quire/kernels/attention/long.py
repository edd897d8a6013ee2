"""Attention over blocks for rows with many new tokens, tiled over queries and keys ("FlashAttention-2", Dao 2023).

A small kernel lists the tiles of a step, once for all layers, from device tensors alone. The list and the grid have
room for the largest possible number of tiles, so a captured graph serves any mix of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.attention.codes import fp16_queries
from quire.kernels.attention.tile import (
    MASKED,
    KVScales,
    Tile,
    add_sinks,
    attend_tile,
    first_fit,
    first_key,
    load_rows,
    pad,
    scale_pointers,
    scale_strides,
    score_factors,
    window_kind,
)
from quire.kernels.jit import kernel
from quire.kernels.target import Target, target_of

_SEARCH = tl.constexpr(256)  # rows per iteration of a search
# A listed tile is a row of _ENTRY int32. _NEW_TOKENS is 0 where there is no tile, so a list of zeros is empty; that
# is what an unwritten list holds while kernels are compiled (kernels/ahead.py).
_ENTRY = tl.constexpr(8)
_SLOT = tl.constexpr(0)
_FIRST = tl.constexpr(1)  # the tile's first token, counted within its row
_ROW_START = tl.constexpr(2)  # the row's first token, counted within the batch
_NEW_TOKENS = tl.constexpr(3)  # of the row
_SEQ_LEN = tl.constexpr(4)  # of the row, new tokens included


@triton.jit
def _find_tile(query_start, rows, index, QUERIES: tl.constexpr, TOKENS: tl.constexpr):
    """Find the index-th tile of the long rows: (row, tile in row counted from its end). The row is `rows` if none.

    Counting tiles on the device costs one load and a scan, and needs no metadata from the host.
    """
    found, before, base = 0, 0, 0
    while (found == base) & (base < rows):  # every row so far is before the tile
        row = base + tl.arange(0, _SEARCH)
        begin = tl.load(query_start + row, mask=row < rows, other=0)
        n = tl.load(query_start + row + 1, mask=row < rows, other=0) - begin
        ends = before + tl.cumsum(tl.where(n > QUERIES, tl.cdiv(n, TOKENS), 0), 0)
        passed = ends <= index
        found = base + tl.sum(passed.to(tl.int32), 0)
        before = tl.maximum(before, tl.max(tl.where(passed, ends, 0), 0))
        base += _SEARCH
    return found, index - before


@kernel(do_not_specialize=["rows"])
def _list_kernel(
    tiles, query_start, seq_lens, slots, rows,
    QUERIES: tl.constexpr, TOKENS: tl.constexpr, LONGEST_FIRST: tl.constexpr,
):  # fmt: skip
    """Grid (most tiles). Order: row by row, each from its end; with LONGEST_FIRST by descending number of keys."""
    index = tl.program_id(0)
    row, back = _find_tile(query_start, rows, index, QUERIES, TOKENS)
    if row >= rows:
        tl.store(tiles + index * _ENTRY + _NEW_TOKENS, 0)
        return
    token = tl.load(query_start + row)
    n = tl.load(query_start + row + 1) - token
    seq_len = tl.load(seq_lens + row)
    tile = tl.cdiv(n, TOKENS) - 1 - back
    place = index
    # The place is the number of tiles that end later, plus those of earlier rows that end at the same position.
    if LONGEST_FIRST:
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
    tl.store(entry + _SLOT, tl.load(slots + row).to(tl.int32))
    tl.store(entry + _FIRST, tile * TOKENS)
    tl.store(entry + _ROW_START, token)
    tl.store(entry + _NEW_TOKENS, n)
    tl.store(entry + _SEQ_LEN, seq_len)


def list_tiles(
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    slots: torch.Tensor,
    most: int,
    queries: int,
    per_tile: int,
    programs: int,
) -> torch.Tensor:
    """List the tiles of all rows with more than `queries` new tokens.

    Args:
        query_start: int32 [rows + 1].
        seq_lens: int32 [rows].
        slots: int64 [rows].
        most: length of the list, at least the number of tiles (see `most_tiles`).
        queries: rows with this many new tokens or fewer have no tiles.
        per_tile: tokens per tile.
        programs: expected number of programs with work, which decides the order of the tiles.

    Returns:
        int32 [most, 8], to pass to `attend_long`.
    """
    few = _FEW_PROGRAMS * target_of(seq_lens.device).sms
    tiles = torch.empty(most, _ENTRY.value, dtype=torch.int32, device=seq_lens.device)
    _list_kernel[(most,)](
        tiles, query_start, seq_lens, slots, seq_lens.shape[0],
        QUERIES=queries, TOKENS=per_tile, LONGEST_FIRST=programs <= few,
    )  # fmt: skip
    return tiles


@triton.jit
def load_entry(tiles, index):
    """Return the index-th tile: slot, first token in its row, row's first token in the batch, new tokens, length."""
    entry = tiles + index * _ENTRY
    slot, tile, token = tl.load(entry + _SLOT), tl.load(entry + _FIRST), tl.load(entry + _ROW_START)
    return slot, tile, token, tl.load(entry + _NEW_TOKENS), tl.load(entry + _SEQ_LEN)


@kernel
def _long_kernel(
    q, keys, values, key_scales, value_scales, out, table, tiles, sinks,
    q_token, q_head, block_stride, head_stride, token_stride, scale_block, scale_head, scale_token,
    table_row, scale, cap, window,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, CODED: tl.constexpr, ASM: tl.constexpr, SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (kv heads, tiles). A program handles TOKENS tokens of a row, each with the GROUP heads of one KV head."""
    kv_head = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    slot, tile, token, n, seq_len = load_entry(tiles, tl.program_id(1))
    if n == 0:
        return
    old = seq_len - n  # keys before the row's new tokens

    m = tl.arange(0, ROWS)
    query, head = m // GROUP, kv_head * GROUP + m % GROUP
    valid = (tile + query < n) & (m < TOKENS * GROUP)
    query_pos = old + tile + query
    first = (token + tile).to(tl.int64)  # offsets from here fit in 32 bits, which saves registers
    real = tl.minimum(query, n - 1 - tile)  # rows past the last query repeat it and are not stored
    q_tile = load_rows(q + first * q_token, real * q_token + head * q_head, DIM, DIM_PAD)

    acc = tl.zeros([ROWS, DIM_PAD], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], MASKED, tl.float32)
    if SINKS:
        acc, total, top = add_sinks(acc, total, top, sinks, head)
    head_keys = keys + kv_head.to(tl.int64) * head_stride
    head_values = values + kv_head.to(tl.int64) * head_stride
    head_key_scales = key_scales + kv_head.to(tl.int64) * scale_head
    head_value_scales = value_scales + kv_head.to(tl.int64) * scale_head
    row_table = table + slot.to(tl.int64) * table_row

    begin, low_pos = 0, old + tile
    end = old + tl.minimum(tile + TOKENS, n)
    if WINDOW:
        begin = tl.maximum(first_key(low_pos, window, WINDOW), 0) // BLOCK_N * BLOCK_N
    q_tile, scale = fp16_queries(q_tile, scale, CODED)
    for start in range(begin, end, BLOCK_N):
        acc, total, top = attend_tile(
            acc, total, top, q_tile, query_pos, low_pos, end - 1, start, end, head_keys, head_values,
            head_key_scales, head_value_scales, row_table, scale, cap, window,
            block_stride, token_stride, scale_block, scale_token,
            DIM, DIM_PAD, BLOCK_SIZE, BLOCK_N, WINDOW, CAPPED, CODED, False, q.dtype.element_ty, ASM,
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
    sinks: torch.Tensor | None = None,
    tile: Tile | None = None,
    chunked: bool = False,
    scales: KVScales | None = None,
) -> None:
    """Compute causal attention for the listed tiles and write it to `out`.

    Args:
        q: [tokens, heads, dim], dim contiguous.
        keys: [blocks, kv heads, block size, dim], dim contiguous.
        values: the same shape and strides as `keys`.
        out: written, [tokens, heads * dim].
        table: the block table, int32 [slots, blocks].
        tiles: the list from `list_tiles`, with `long_tokens(...)` tokens per tile.
        scale: factor of the scores q k^T.
        window: number of keys that a query sees, itself included; None for all.
        soft_cap: scores x become soft_cap * tanh(x / soft_cap); None for no cap.
        sinks: float32 [heads], scores without a key that join the sum; None for none.
        tile: sizes of a program, for benchmarks; None to choose them.
        chunked: a query sees the keys of its own chunk of `window` tokens, up to itself.
        scales: of keys and values that are codes; None: they are plain numbers.
    """
    heads, dim = q.shape[1:]
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    target = target_of(q.device)
    coded = scales is not None
    used = tile or long_tile(dim, q.element_size(), group, target, coded)
    rows, block_n, warps, stages, registers = used
    factor, cap = score_factors(scale, soft_cap)
    pdl = target.has_dependent_launch
    _long_kernel[(kv_heads, tiles.shape[0])](
        q, keys, values, *scale_pointers(scales, keys), out, table, tiles, out if sinks is None else sinks,
        q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), keys.stride(2),
        *scale_strides(scales), table.stride(0),
        factor, cap, window or 0,
        GROUP=group, TOKENS=rows // group, ROWS=rows,
        DIM=dim, DIM_PAD=pad(dim), BLOCK_SIZE=keys.shape[2], BLOCK_N=block_n,
        WINDOW=window_kind(window, chunked), CAPPED=soft_cap is not None, CODED=coded, ASM=target.has_ptx, SINKS=sinks is not None,
        PDL=pdl, num_warps=warps, num_stages=stages, maxnreg=registers, launch_pdl=pdl,
    )  # fmt: skip


# ------------------------------------------------------------------------------------ sizes of the work


# Programs per multiprocessor, about five times as many as run at once. With fewer, the last programs decide the
# duration, and starting the longest first evens it out. With more, running the tiles of a row at the same time, so that
# they share its keys in the cache, is worth more.
_FEW_PROGRAMS = 10


def long_tile(dim: int, itemsize: int, group: int, target: Target, coded: bool = False) -> Tile:
    """Return the tile for a head size, or a smaller one if it does not fit in shared memory.

    The first tile of each list was tuned on an H200 (benchmarks/kernels.py).

    Args:
        dim: head size.
        itemsize: bytes per element.
        group: query heads per KV head.
        target: the GPU.
        coded: whether keys and values are codes.
    """
    tiles = [tile.with_rows(group) for tile in _tiles(pad(dim), itemsize, target, coded)]
    return first_fit(tiles, dim, itemsize, target)


def _tiles(width: int, itemsize: int, target: Target, coded: bool) -> list[Tile]:
    smallest = [Tile(32, 32, 4, 1), Tile(32, 16, 4, 1), Tile(16, 16, 4, 1)]
    if not target.has_matrix_units:
        return smallest
    if itemsize == 4:
        return [Tile(64 if width <= 128 else 32, 32, 8, 2), Tile(32, 16, 8, 2), *smallest]
    if width <= 128 and coded:  # a limit of registers would move numbers to memory while they are converted
        return [Tile(64, 128, 4, 2), *smallest]
    if width <= 128:
        # With 128 registers two programs fit on a multiprocessor: one multiplies while the other takes exponents.
        return [Tile(128, 64, 8, 3, 128), *smallest]
    return [Tile(128, 64, 8, 3), Tile(64, 32, 4, 2), *smallest]


def long_tokens(dim: int, itemsize: int, group: int, target: Target, coded: bool = False) -> int:
    """Return the number of new tokens that one tile covers; see `long_tile`."""
    return long_tile(dim, itemsize, group, target, coded).rows // group


def most_tiles(tokens: int, rows: int, queries: int, per_tile: int) -> int:
    """Return the largest number of tiles that a batch can have.

    Args:
        tokens: new tokens of the batch.
        rows: rows of the batch.
        queries: rows with this many new tokens or fewer have no tiles.
        per_tile: tokens per tile.
    """
    long_rows = min(rows, tokens // (queries + 1))
    return (tokens + long_rows * (per_tile - 1)) // per_tile
