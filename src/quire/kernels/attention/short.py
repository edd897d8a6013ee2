"""Attention over blocks for rows with few new tokens, above all decoding, which is bound by memory bandwidth.

The query heads of one KV head (times the row's tokens) form one small matrix product, so every KV byte is read once
(GQA, Ainslie et al. 2023). If the rows are too few to fill the device, the keys of a row are split over several
programs, and a second kernel merges their partial results ("Flash-Decoding", Dao et al. 2023). Lengths come from
device tensors, so a captured graph serves any lengths.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.attention.codes import fp16_queries, join_sums, split_sums
from quire.kernels.attention.shared import SharedPartial
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

SHORT_ROWS = 16  # query rows of a program: the minimum of a matrix unit
_TILE_BYTES = 16384  # size of a tile of keys, and of a tile of values
_MAX_SPLITS = 256
_MERGED_SUMS = 1 << 14  # of splits, that fit in the registers of a merging program
_PART = 64  # dimensions of a merging program while there are few


@triton.jit
def _key_range(seq_len, n, window, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the first key that any of the row's n queries sees, rounded down to a tile, and the tiles from there."""
    first = 0
    if WINDOW:
        first = tl.maximum(first_key(seq_len - n, window, WINDOW), 0) // BLOCK_N * BLOCK_N
    return first, tl.cdiv(seq_len - first, BLOCK_N)


@kernel
def _short_kernel(
    q, keys, values, key_scales, value_scales, out, sums, stats, seq_lens, query_start, table, slots, shared, prefix_sums, prefix_stats, sinks,
    shared_row, q_token, q_head, block_stride, head_stride, token_stride, scale_block, scale_head, scale_token,
    table_row, scale, cap, window, splits,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    ONES: tl.constexpr, SPLIT: tl.constexpr, SHARED: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, CODED: tl.constexpr, ASM: tl.constexpr, SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (kv heads, rows, splits).

    ONES: every row has one token, and query_start is not read.
    SHARED (with ONES, without splits): a row continues from the state that attend_shared left.
    """
    kv_head, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    # No early start of the next kernel: its programs would take up room that this one needs.
    if PDL:
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
        if begin >= end:  # a split without keys, which the merge does not read
            return

    m = tl.arange(0, ROWS)
    query, head = m // GROUP, kv_head * GROUP + m % GROUP
    valid = query < n
    dim = tl.arange(0, DIM_PAD)
    query_pos = seq_len - n + query
    # Rows past the last query repeat it, so that loads need no mask. They are not stored.
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
        acc = tl.load(prefix_sums + from_state[:, None] * DIM + dim[None, :], mask=there, other=0.0)
        total = tl.load(prefix_stats + from_state * 2, mask=done, other=0.0)
        top = tl.load(prefix_stats + from_state * 2 + 1, mask=done, other=MASKED)
    if SINKS:  # noqa: SIM102 (a constant decides first, so nothing is compiled without sinks)
        if split == 0:
            acc, total, top = add_sinks(acc, total, top, sinks, head)
    head_keys = keys + kv_head.to(tl.int64) * head_stride
    head_values = values + kv_head.to(tl.int64) * head_stride
    head_key_scales = key_scales + kv_head.to(tl.int64) * scale_head
    head_value_scales = value_scales + kv_head.to(tl.int64) * scale_head
    row_table = table + slot * table_row
    q_tile, scale = fp16_queries(q_tile, scale, CODED)
    acc = split_sums(acc, CODED)
    for start in range(begin, end, BLOCK_N):
        acc, total, top = attend_tile(
            acc, total, top, q_tile, query_pos, seq_len - n, seq_len - 1, start, end, head_keys, head_values,
            head_key_scales, head_value_scales, row_table, scale, cap, window,
            block_stride, token_stride, scale_block, scale_token,
            DIM, DIM_PAD, BLOCK_SIZE, BLOCK_N, WINDOW, CAPPED, CODED, CODED, q.dtype.element_ty, ASM,
        )  # fmt: skip
    acc = join_sums(acc, CODED)

    mask = valid[:, None] & (dim < DIM)[None, :]
    if SPLIT:  # sums [row, query, head, split, dim]; stats [..., 2]: sum of exponentials, and top score
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
    QUERIES: tl.constexpr, DIM: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr, ONES: tl.constexpr, WINDOW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (heads, rows, QUERIES * PARTS). A program merges PART dimensions of one query, CHUNK splits at a time."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    head, row = tl.program_id(0), tl.program_id(1)
    query, part = tl.program_id(2) // PARTS, tl.program_id(2) % PARTS
    token, n = row, 1
    if not ONES:
        token = tl.load(query_start + row)
        n = tl.load(query_start + row + 1) - token
        if (n > QUERIES) | (query >= n):
            return
    _, tiles = _key_range(tl.load(seq_lens + row), n, window, WINDOW, BLOCK_N)
    used = tl.cdiv(tiles, tl.maximum(tl.cdiv(tiles, splits), 1))  # the others have no keys
    heads = tl.num_programs(0)
    dim = part * PART + tl.arange(0, PART)
    real = dim < DIM
    acc = tl.zeros([PART], tl.float32)
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
    prefix: SharedPartial | None = None,
    sinks: torch.Tensor | None = None,
    tile: Tile | None = None,
    chunked: bool = False,
    scales: KVScales | None = None,
) -> None:
    """Compute causal attention for all rows with at most `queries` new tokens and write it to `out`.

    Args:
        q: [tokens, heads, dim], dim contiguous.
        keys: [blocks, kv heads, block size, dim], dim contiguous.
        values: the same shape and strides as `keys`.
        out: written, [tokens, heads * dim].
        seq_lens: int32 [rows], new tokens included; 0 for padding.
        query_start: int32 [rows + 1], or None if every row has exactly one token.
        table: the block table, int32 [slots, blocks].
        slots: int64 [rows], the row of `table` of each row.
        scale: factor of the scores q k^T.
        window: number of keys that a query sees, itself included; None for all.
        soft_cap: scores x become soft_cap * tanh(x / soft_cap); None for no cap.
        queries: rows with more new tokens are skipped.
        splits: programs that the keys of a row are divided among (see `num_splits`).
        prefix: the result of `attend_shared` for these rows; needs one token per row, one split and no window.
        sinks: float32 [heads], scores without a key that join the sum; None for none.
        tile: sizes of a program, for benchmarks; None to choose them.
        chunked: a query sees the keys of its own chunk of `window` tokens, up to itself.
        scales: of keys and values that are codes; None: they are plain numbers.
    """
    heads, dim = q.shape[1:]
    rows, kv_heads = seq_lens.shape[0], keys.shape[1]
    group = heads // kv_heads
    target = target_of(q.device)
    coded = scales is not None
    used = tile or short_tile(dim, q.element_size(), group * queries, rows * kv_heads * splits, target, coded)
    factor, cap = score_factors(scale, soft_cap)
    ones = query_start is None
    starts = seq_lens if query_start is None else query_start
    pdl = target.has_dependent_launch
    assert prefix is None or (ones and splits == 1 and window is None)
    shared, prefix_sums, prefix_stats = (
        (starts, out, out) if prefix is None else (prefix.tokens, prefix.sums, prefix.stats)
    )
    sums = stats = out
    if splits > 1:
        parts = rows * queries * heads * splits
        sums = torch.empty(parts * dim, dtype=torch.float32, device=q.device)
        stats = torch.empty(parts * 2, dtype=torch.float32, device=q.device)
    _short_kernel[(kv_heads, rows, splits)](
        q, keys, values, *scale_pointers(scales, keys), out, sums, stats, seq_lens, starts, table, slots, shared, prefix_sums, prefix_stats,
        out if sinks is None else sinks,
        shared.stride(0), q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), keys.stride(2), *scale_strides(scales), table.stride(0),
        factor, cap, window or 0, splits,
        GROUP=group, QUERIES=queries, ROWS=used.rows,
        DIM=dim, DIM_PAD=pad(dim), BLOCK_SIZE=keys.shape[2], BLOCK_N=used.keys,
        ONES=ones, SPLIT=splits > 1, SHARED=prefix is not None, WINDOW=window_kind(window, chunked),
        CAPPED=soft_cap is not None, CODED=coded, ASM=target.has_ptx, SINKS=sinks is not None, PDL=pdl, num_warps=used.warps, num_stages=used.stages, launch_pdl=pdl,
    )  # fmt: skip
    if splits > 1:
        merge_splits(
            sums, stats, out, seq_lens, query_start, heads, splits, used.keys, window, queries, chunked
        )


def merge_splits(
    sums: torch.Tensor,
    stats: torch.Tensor,
    out: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start: torch.Tensor | None,
    heads: int,
    splits: int,
    keys: int,
    window: int | None = None,
    queries: int = 1,
    chunked: bool = False,
) -> None:
    """Merge the splits of all rows with at most `queries` new tokens into `out`.

    Args:
        sums: fp32 [rows, queries, heads, splits, dim], flat: sums of values weighted by exponentials.
        stats: fp32 [rows, queries, heads, splits, 2], flat: sum of exponentials, and top score.
        out: written, [tokens, heads * dim].
        keys: per iteration of the kernel that made the splits.

    The other arguments are those of `attend_short`.
    """
    dim, rows = out.shape[1] // heads, seq_lens.shape[0]
    starts = seq_lens if query_start is None else query_start
    target = target_of(out.device)
    pdl = target.has_dependent_launch
    part = merged_part(dim, rows * queries * heads, target)
    parts = pad(dim) // part
    _merge_kernel[(heads, rows, queries * parts)](
        sums, stats, out, seq_lens, starts, window or 0, splits,
        QUERIES=queries, DIM=dim, PART=part, PARTS=parts, BLOCK_N=keys, CHUNK=min(splits, max(_MERGED_SUMS // part, 1)),
        ONES=query_start is None, WINDOW=window_kind(window, chunked), PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


def merged_part(dim: int, heads: int, target: Target) -> int:
    """Return the dimensions that a merging program has: some of a head, if there are fewer heads than multiprocessors.

    Args:
        dim: head size.
        heads: of all queries.
        target: the GPU.
    """
    return min(pad(dim), _PART) if heads < target.sms else pad(dim)


# ------------------------------------------------------------------------------------ sizes of the work


def short_tile(
    dim: int, itemsize: int, rows: int, programs: int, target: Target, coded: bool = False
) -> Tile:
    """Return the tile for `rows` query rows, or a smaller one if it does not fit in shared memory.

    The first choice was tuned on an H200 (benchmarks/kernels.py).

    Args:
        dim: head size.
        itemsize: bytes per element.
        rows: query heads of a KV head times the tokens of a row.
        programs: number of programs of the launch.
        target: the GPU.
        coded: whether keys and values are codes.
    """
    smaller = [Tile(SHORT_ROWS, 32, 4, 3), Tile(SHORT_ROWS, 16, 4, 1)]
    tuned = [_tuned(pad(dim) * itemsize, programs, target.sms, coded)] if target.has_matrix_units else []
    return first_fit([tile.with_rows(rows) for tile in tuned + smaller], dim, itemsize, target)


def _tuned(row_bytes: int, programs: int, sms: int, coded: bool) -> Tile:
    if coded:  # of half the bytes; four warps hide the conversion better than two
        return Tile(SHORT_ROWS, 64 if row_bytes > 256 else 128, 4, 3)
    if row_bytes == 512:
        return Tile(SHORT_ROWS, 64, 4, 4)
    keys = max(16, min(_TILE_BYTES // row_bytes, 128))
    # With 4 stages the buffers of a program are half as large, so 5 programs fit on a multiprocessor instead of 3.
    # That pays where it saves a second, nearly empty wave of programs.
    return Tile(SHORT_ROWS, keys, 2, 4 if 3 * sms < programs <= 5 * sms else 5)


def num_splits(rows: int, kv_heads: int, max_len: int, dim: int, itemsize: int, target: Target) -> int:
    """Return the number of programs per row and KV head that fills the device.

    It is a power of two, so that few variants of the kernel are compiled.
    """
    programs = rows * kv_heads
    if programs >= 2 * target.sms:
        return 1
    tiles = triton.cdiv(max_len, short_tile(dim, itemsize, SHORT_ROWS, programs, target).keys)
    wanted = max(1, min(triton.cdiv(2 * target.sms, programs), tiles, _MAX_SPLITS))
    return 1 << (wanted.bit_length() - 1)
