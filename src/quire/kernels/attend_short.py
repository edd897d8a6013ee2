"""Attention over pages for rows with few new tokens: decoding, above all, which is as fast as keys and values
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

from quire.kernels import dependent_launch
from quire.kernels.attend_shared import Begun
from quire.kernels.attention_tile import MASKED, SMS, attend_tile, load_rows, pad, score_factors
from quire.kernels.jit import kernel

SHORT_ROWS = 16  # query rows of one program: the least that a matrix unit takes
_TILE_BYTES = 16384  # of the keys, and of the values, that one step reads
_MAX_SPLITS = 64


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
    shared_row, q_token, q_head, page_stride, head_stride, token_stride, table_row, scale, cap, window, splits,
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
        end = tl.minimum(begin + each, seq_len)  # surplus splits have no keys; they add 0 to the merge

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
            row_table, scale, cap, window, page_stride, token_stride,
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
    sums, stats, out, query_start, splits,
    QUERIES: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, SPLITS_PAD: tl.constexpr,
    ONES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (heads, rows, QUERIES): weighs the splits of one query by their top scores."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    head, row, query = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token = row
    if not ONES:
        token = tl.load(query_start + row)
        n = tl.load(query_start + row + 1) - token
        if (n > QUERIES) | (query >= n):
            return
    heads = tl.num_programs(0)
    split = tl.arange(0, SPLITS_PAD)
    at = ((row * QUERIES + query) * heads + head) * splits + split
    dim = tl.arange(0, DIM_PAD)
    used, real = split < splits, dim < DIM
    parts = tl.load(sums + at[:, None] * DIM + dim[None, :], mask=used[:, None] & real[None, :], other=0.0)
    total = tl.load(stats + at * 2, mask=used, other=0.0)
    top = tl.load(stats + at * 2 + 1, mask=used, other=MASKED)
    weight = tl.exp2(top - tl.max(top, 0))
    whole = tl.sum(weight * total, 0)
    result = tl.sum(weight[:, None] * parts, 0) / tl.where(whole > 0, whole, 1.0)
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
    begun: Begun | None = None,
    tile: tuple[int, int, int] | None = None,
) -> None:
    """All rows with at most `queries` new tokens; query_start None: every row has exactly one token.

    q [tokens, heads, dim] (dim contiguous), out [tokens, heads * dim]; the blocks of row r are those of row slots[r]
    of `table` (slots int64 [rows], table int32 [slots, blocks]). `begun`, for rows of one token in one
    split: what attend_shared has done of them. `tile` is (keys, warps, stages).
    """
    heads, dim = q.shape[1:]
    rows, kv_heads = seq_lens.shape[0], keys.shape[1]
    group = heads // kv_heads
    block_n, warps, stages = tile or short_tile(dim, q.element_size(), rows * kv_heads * splits)
    factor, cap = score_factors(scale, soft_cap)
    ones = query_start is None
    starts = seq_lens if query_start is None else query_start
    pdl = dependent_launch(q.device)
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
        GROUP=group, QUERIES=queries, ROWS=max(SHORT_ROWS, triton.next_power_of_2(group * queries)),
        DIM=dim, DIM_PAD=pad(dim), BLOCK_SIZE=keys.shape[2], BLOCK_N=block_n,
        ONES=ones, SPLIT=splits > 1, SHARED=begun is not None, WINDOW=window is not None,
        CAPPED=soft_cap is not None, PDL=pdl, num_warps=warps, num_stages=stages, launch_pdl=pdl,
    )  # fmt: skip
    if splits > 1:
        _merge_kernel[(heads, rows, queries)](
            sums, stats, out, starts, splits,
            QUERIES=queries, DIM=dim, DIM_PAD=pad(dim), SPLITS_PAD=triton.next_power_of_2(splits),
            ONES=ones, PDL=pdl, num_warps=4, launch_pdl=pdl,
        )  # fmt: skip


# ------------------------------------------------------------------------------------ sizes of the work


def short_tile(dim: int, itemsize: int, programs: int) -> tuple[int, int, int]:
    """(keys, warps, stages) of the short kernel; measured on an H200 (benchmarks/kernels.py)."""
    row_bytes = pad(dim) * itemsize
    if row_bytes == 512:
        return 64, 4, 4
    keys = max(16, min(_TILE_BYTES // row_bytes, 128))
    # With 4 stages the buffers of a program are half as large, and 5 of them fit on a multiprocessor
    # instead of 3. That pays when it saves a second, nearly empty wave of programs.
    return keys, 2, 4 if 3 * SMS < programs <= 5 * SMS else 5


def num_splits(rows: int, kv_heads: int, max_len: int, dim: int, itemsize: int) -> int:
    """Programs per row and KV head: enough to fill the device, a power of two so that few kernels exist."""
    programs = rows * kv_heads
    if programs >= 2 * SMS:
        return 1
    tiles = triton.cdiv(max_len, short_tile(dim, itemsize, programs)[0])
    wanted = max(1, min(triton.cdiv(2 * SMS, programs), tiles, _MAX_SPLITS))
    return 1 << (wanted.bit_length() - 1)
