"""Attention over blocks for rows with few new tokens: decoding, above all, which is as fast as keys and values
can be read.

The query heads of one KV head (times the row's tokens) are the rows of one small product, so every KV byte
is read once (GQA, Ainslie et al. 2023). While rows are too few to fill the device, the keys of a row are
shared out among programs, whose partial results a second kernel merges ("Flash-Decoding", Dao et al. 2023).
All is found from device tensors: a captured graph serves any lengths.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.attention.shared import SharedPartial
from quire.kernels.attention.tile import MASKED, Tile, attend_tile, first_fit, load_rows, pad, score_factors
from quire.kernels.jit import kernel
from quire.kernels.target import Target, target_of

SHORT_ROWS = 16  # query rows of one program: the least that a matrix unit takes
_TILE_BYTES = 16384  # of the keys, and of the values, that one step reads
_MAX_SPLITS = 256
_MERGED = 64  # splits whose sums fit in the registers of a merging program


@triton.jit
def _key_range(seq_len, n, window, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """First key, rounded down to a tile, that any of the row's n queries sees, and the tiles from there."""
    first = 0
    if WINDOW:
        first = tl.maximum(seq_len - n + 1 - window, 0) // BLOCK_N * BLOCK_N
    return first, tl.cdiv(seq_len - first, BLOCK_N)


@kernel
def _short_kernel(
    q, keys, values, out, sums, stats, seq_lens, query_start, table, slots, shared, begun_sums, begun_stats,
    shared_row, q_token, q_head, block_stride, head_stride, token_stride, table_row, scale, cap, window, splits,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    ONES: tl.constexpr, SPLIT: tl.constexpr, SHARED: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (kv heads, rows, splits). ONES: every row has one token, and query_start is not read.

    SHARED (with ONES, without splits): a row goes on from what attend_shared has begun.
    """
    kv_head, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PDL:  # and no early start for the next kernel: its programs would take up room that this one needs
        tl.extra.cuda.gdc_wait()
    heads = tl.num_programs(0) * GROUP
    token, n = row, 1
    if not ONES:
        token = tl.load(query_start + row)
        n = tl.load(query_start + row + 1) - token
        if (n > QUERIES) | (n == 0):
            return
    seq_len = tl.load(seq_lens + row)
    slot = tl.load(slots + row)
    first, tiles = _key_range(seq_len, n, window, WINDOW, BLOCK_N)
    begin, end = first, seq_len
    if SPLIT:
        each = tl.cdiv(tiles, splits) * BLOCK_N
        begin = first + split * each
        end = tl.minimum(begin + each, seq_len)
        if begin >= end:  # a surplus split, which the merge does not read
            return

    m = tl.arange(0, ROWS)
    query, head = m // GROUP, kv_head * GROUP + m % GROUP
    valid = query < n
    dim = tl.arange(0, DIM_PAD)
    query_pos = seq_len - n + query
    # A row past the last query repeats it, so that loads need no mask; it is not stored.
    q_offsets = (token + tl.minimum(query, n - 1)).to(tl.int64) * q_token + head * q_head
    q_tile = load_rows(q, q_offsets, DIM, DIM_PAD)

    acc = tl.zeros([ROWS, DIM_PAD], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], MASKED, tl.float32)
    if SHARED:
        begin = tl.load(shared + row * shared_row)
        done = valid & (begin > 0)
        from_state = row.to(tl.int64) * heads + head
        there = done[:, None] & (dim < DIM)[None, :]
        acc = tl.load(begun_sums + from_state[:, None] * DIM + dim[None, :], mask=there, other=0.0)
        total = tl.load(begun_stats + from_state * 2, mask=done, other=0.0)
        top = tl.load(begun_stats + from_state * 2 + 1, mask=done, other=MASKED)
    head_keys = keys + kv_head.to(tl.int64) * head_stride
    head_values = values + kv_head.to(tl.int64) * head_stride
    row_table = table + slot * table_row
    for start in range(begin, end, BLOCK_N):
        acc, total, top = attend_tile(
            acc, total, top, q_tile, query_pos, seq_len - n, seq_len - 1, start, end, head_keys, head_values,
            row_table, scale, cap, window, block_stride, token_stride,
            DIM, DIM_PAD, BLOCK_SIZE, BLOCK_N, WINDOW, CAPPED,
        )  # fmt: skip

    mask = valid[:, None] & (dim < DIM)[None, :]
    if SPLIT:  # sums [row, query, head, split, dim]; stats [..., 2]: their total and their top score
        to = ((row * QUERIES + query) * heads + head) * splits + split
        tl.store(sums + to[:, None] * DIM + dim[None, :], acc, mask=mask)
        tl.store(stats + to * 2, total, mask=valid)
        tl.store(stats + to * 2 + 1, top, mask=valid)
    else:
        at = (token + query).to(tl.int64) * heads + head
        result = acc / tl.where(total > 0, total, 1.0)[:, None]  # a row of length 0 pads a graph
        tl.store(out + at[:, None] * DIM + dim[None, :], result.to(out.dtype.element_ty), mask=mask)


@kernel
def _merge_kernel(
    sums, stats, out, seq_lens, query_start, window, splits,
    QUERIES: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
    ONES: tl.constexpr, WINDOW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (heads, rows, QUERIES): weighs the splits of one query by their top scores, CHUNK at a time."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    head, row, query = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token, n = row, 1
    if not ONES:
        token = tl.load(query_start + row)
        n = tl.load(query_start + row + 1) - token
        if (n > QUERIES) | (query >= n):
            return
    _, tiles = _key_range(tl.load(seq_lens + row), n, window, WINDOW, BLOCK_N)
    used = tl.cdiv(tiles, tl.maximum(tl.cdiv(tiles, splits), 1))  # the others have no keys
    heads = tl.num_programs(0)
    dim = tl.arange(0, DIM_PAD)
    real = dim < DIM
    acc = tl.zeros([DIM_PAD], tl.float32)
    whole, top = tl.zeros([], tl.float32), tl.full([], MASKED, tl.float32)
    for first in range(0, used, CHUNK):
        split = first + tl.arange(0, CHUNK)
        there = split < used
        at = ((row * QUERIES + query) * heads + head) * splits + split
        parts = tl.load(
            sums + at[:, None] * DIM + dim[None, :], mask=there[:, None] & real[None, :], other=0.0
        )
        totals = tl.load(stats + at * 2, mask=there, other=0.0)
        tops = tl.load(stats + at * 2 + 1, mask=there, other=MASKED)
        new_top = tl.maximum(top, tl.max(tops, 0))
        weight, shrink = tl.exp2(tops - new_top), tl.exp2(top - new_top)
        whole = whole * shrink + tl.sum(weight * totals, 0)
        acc = acc * shrink + tl.sum(weight[:, None] * parts, 0)
        top = new_top
    result = acc / tl.where(whole > 0, whole, 1.0)
    to = ((token + query).to(tl.int64) * heads + head) * DIM + dim
    tl.store(out + to, result.to(out.dtype.element_ty), mask=real)


def attend_short(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start: torch.Tensor | None,
    table: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    queries: int = 1,
    splits: int = 1,
    begun: SharedPartial | None = None,
    tile: Tile | None = None,
) -> None:
    """All rows with at most `queries` new tokens; query_start None: every row has exactly one token.

    q [tokens, heads, dim] (dim contiguous), out [tokens, heads * dim]; the blocks of row r are those of row slots[r]
    of `table` (slots int64 [rows], table int32 [slots, blocks]). `begun`, for rows of one token in one
    split: what attend_shared has done of them.
    """
    heads, dim = q.shape[1:]
    rows, kv_heads = seq_lens.shape[0], keys.shape[1]
    group = heads // kv_heads
    target = target_of(q.device)
    used = tile or short_tile(dim, q.element_size(), group * queries, rows * kv_heads * splits, target)
    factor, cap = score_factors(scale, soft_cap)
    ones = query_start is None
    starts = seq_lens if query_start is None else query_start
    pdl = target.has_dependent_launch
    assert begun is None or (ones and splits == 1 and window is None)
    shared, begun_sums, begun_stats = (
        (starts, out, out) if begun is None else (begun.tokens, begun.sums, begun.stats)
    )
    sums = stats = out
    if splits > 1:
        parts = rows * queries * heads * splits
        sums = torch.empty(parts * dim, dtype=torch.float32, device=q.device)
        stats = torch.empty(parts * 2, dtype=torch.float32, device=q.device)
    _short_kernel[(kv_heads, rows, splits)](
        q, keys, values, out, sums, stats, seq_lens, starts, table, slots, shared, begun_sums, begun_stats,
        shared.stride(0), q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), keys.stride(2), table.stride(0),
        factor, cap, window or 0, splits,
        GROUP=group, QUERIES=queries, ROWS=used.rows,
        DIM=dim, DIM_PAD=pad(dim), BLOCK_SIZE=keys.shape[2], BLOCK_N=used.keys,
        ONES=ones, SPLIT=splits > 1, SHARED=begun is not None, WINDOW=window is not None,
        CAPPED=soft_cap is not None, PDL=pdl, num_warps=used.warps, num_stages=used.stages, launch_pdl=pdl,
    )  # fmt: skip
    if splits > 1:
        _merge_kernel[(heads, rows, queries)](
            sums, stats, out, seq_lens, starts, window or 0, splits,
            QUERIES=queries, DIM=dim, DIM_PAD=pad(dim), BLOCK_N=used.keys, CHUNK=min(splits, _MERGED),
            ONES=ones, WINDOW=window is not None, PDL=pdl, num_warps=4, launch_pdl=pdl,
        )  # fmt: skip


# ------------------------------------------------------------------------------------ sizes of the work


def short_tile(dim: int, itemsize: int, rows: int, programs: int, target: Target) -> Tile:
    """Of the short kernel for `rows` query rows; the first choice was measured on an H200 (benchmarks/kernels.py)."""
    smaller = [Tile(SHORT_ROWS, 32, 4, 3), Tile(SHORT_ROWS, 16, 4, 1)]
    tuned = [_tuned(pad(dim) * itemsize, programs, target.sms)] if target.has_matrix_units else []
    return first_fit([tile.with_rows(rows) for tile in tuned + smaller], dim, itemsize, target)


def _tuned(row_bytes: int, programs: int, sms: int) -> Tile:
    if row_bytes == 512:
        return Tile(SHORT_ROWS, 64, 4, 4)
    keys = max(16, min(_TILE_BYTES // row_bytes, 128))
    # With 4 stages the buffers of a program are half as large, and 5 of them fit on a multiprocessor
    # instead of 3. That pays when it saves a second, nearly empty wave of programs.
    return Tile(SHORT_ROWS, keys, 2, 4 if 3 * sms < programs <= 5 * sms else 5)


def num_splits(rows: int, kv_heads: int, max_len: int, dim: int, itemsize: int, target: Target) -> int:
    """Programs per row and KV head: enough to fill the device, a power of two so that few kernels exist."""
    programs = rows * kv_heads
    if programs >= 2 * target.sms:
        return 1
    tiles = triton.cdiv(max_len, short_tile(dim, itemsize, SHORT_ROWS, programs, target).keys)
    wanted = max(1, min(triton.cdiv(2 * target.sms, programs), tiles, _MAX_SPLITS))
    return 1 << (wanted.bit_length() - 1)
