"""Paged attention on the GPU: writing new keys and values into pages, and attending over pages.

Pages are [page, kv head, token, dim], so a tile of keys of one head is a few contiguous runs. Two kernels
attend over the same packed tokens. The short kernel serves rows with few new tokens: the query heads of
one KV head (times the row's tokens) are the rows of one small product, so every KV byte is read once, and
the keys of a row may be split over programs whose partial results a third kernel merges ("Flash-Decoding",
Dao et al. 2023; GQA, Ainslie et al. 2023). The long kernel tiles a row's new tokens as well
("FlashAttention-2", Dao 2023). Both find their work from device tensors alone: no host metadata, fixed
grids, so both can be captured in CUDA graphs. Sums are fp32; fp32 inputs are multiplied in full precision.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_LOG2E = 1.4426950408889634
# A masked score. Finite, so that a tile without any visible key makes no NaN: what it adds to the sums is
# multiplied by exp2(masked - top) = 0 once a visible key is met. A power of two, so that its product with
# the scale is exact: a fused multiply-subtract of equal scores is then exactly 0.
_MASKED = tl.constexpr(-(2.0**100))
_SEARCH = tl.constexpr(256)  # rows looked at at once when the long kernel searches for its row

SHORT_ROWS = 16  # query rows of the short kernel: the least that a matrix unit takes


# ---------------------------------------------------------------------------------------- KV write


@triton.jit
def _write_kernel(
    k, v, keys, values, slots,
    k_token, k_head, v_token, v_head, page_stride, head_stride, token_stride,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    head = tl.arange(0, HEADS_PAD)[:, None]
    dim = tl.arange(0, DIM_PAD)[None, :]
    mask = (head < HEADS) & (dim < DIM)
    to = slot // BLOCK_SIZE * page_stride + slot % BLOCK_SIZE * token_stride + head * head_stride + dim
    tl.store(keys + to, tl.load(k + token * k_token + head * k_head + dim, mask=mask), mask=mask)
    tl.store(values + to, tl.load(v + token * v_token + head * v_head + dim, mask=mask), mask=mask)


def write_kv(
    k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
) -> None:
    """k, v [tokens, kv heads, dim] (dim contiguous) into the pages at `slots`; a negative slot is skipped."""
    tokens, heads, dim = k.shape
    _write_kernel[(tokens,)](
        k, v, keys, values, slots,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), keys.stride(0), keys.stride(1), keys.stride(2),
        HEADS=heads, HEADS_PAD=triton.next_power_of_2(heads), DIM=dim, DIM_PAD=_pad(dim),
        BLOCK_SIZE=keys.shape[2],
    )  # fmt: skip


# -------------------------------------------------------------------------------- one tile of keys


@triton.jit
def _load_rows(base, offsets, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """Rows of DIM numbers at base + offsets, with 0 in their padding."""
    dim = tl.arange(0, DIM_PAD)
    at = base + offsets[:, None] + dim[None, :]
    if DIM == DIM_PAD:
        return tl.load(at)
    else:
        return tl.load(at, mask=(dim < DIM)[None, :], other=0.0)


@triton.jit
def _attend_tile(
    acc, total, top, q, query_pos, low_pos, high_pos, start, end, keys, values, table, scale, cap, window,
    page_stride, token_stride,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Online softmax over the keys start .. start + BLOCK_N; `table` is the row's, keys and values the head's.

    The queries are at positions low_pos .. high_pos: a tile that all of them see whole needs no mask.
    """
    pos = start + tl.arange(0, BLOCK_N)
    there = tl.minimum(pos, end - 1)  # past the end the last key again: no masked loads, and no query sees it
    page = tl.load(table + there // BLOCK_SIZE)
    offsets = page.to(tl.int64) * page_stride + there % BLOCK_SIZE * token_stride
    k = _load_rows(keys, offsets, DIM, DIM_PAD)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if CAPPED:  # cap * tanh(x), where scale holds the 2 * log2(e) / cap that exp2 needs
        scores = cap - 2.0 * cap / (tl.exp2(scores * scale) + 1.0)
        scale = 1.0
    edge = start + BLOCK_N - 1 > low_pos
    if WINDOW:
        edge |= start <= high_pos - window
    if edge:
        visible = pos[None, :] <= query_pos[:, None]
        if WINDOW:
            visible &= pos[None, :] > query_pos[:, None] - window
        scores = tl.where(visible, scores, _MASKED)
    new_top = tl.maximum(top, tl.max(scores, 1) * scale)
    p = tl.exp2(scores * scale - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(p, 1)
    acc = acc * shrink[:, None]
    v = _load_rows(values, offsets, DIM, DIM_PAD)
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
    return acc, total, new_top


# --------------------------------------------------------------------------- rows with few new tokens


@triton.jit
def _key_range(seq_len, n, window, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """First key, rounded down to a tile, that any of the row's n queries sees, and the tiles from there."""
    first = 0
    if WINDOW:
        first = tl.maximum(seq_len - n + 1 - window, 0) // BLOCK_N * BLOCK_N
    return first, tl.cdiv(seq_len - first, BLOCK_N)


@triton.jit
def _short_kernel(
    q, keys, values, out, sums, stats, seq_lens, query_start, table,
    q_token, q_head, page_stride, head_stride, token_stride, table_row, scale, cap, window, splits,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    ONES: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (kv heads, rows, splits). ONES: every row has one token, and query_start is not read."""
    kv_head, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PDL and SPLIT:  # the merge may be launched now; it waits for this kernel's end before it reads
        tl.extra.cuda.gdc_launch_dependents()
    heads = tl.num_programs(0) * GROUP
    token, n = row, 1
    if not ONES:
        token = tl.load(query_start + row)
        n = tl.load(query_start + row + 1) - token
        if (n > QUERIES) | (n == 0):
            return
    seq_len = tl.load(seq_lens + row)
    first, tiles = _key_range(seq_len, n, window, WINDOW, BLOCK_N)
    begin, end = first, seq_len
    if SPLIT:
        each = tl.cdiv(tiles, splits) * BLOCK_N
        begin = first + split * each
        end = tl.minimum(begin + each, seq_len)  # surplus splits have no keys; they add 0 to the merge

    m = tl.arange(0, ROWS)
    query, head = m // GROUP, kv_head * GROUP + m % GROUP
    valid = query < n
    query_pos = seq_len - n + query
    # A row past the last query repeats it, so that loads need no mask; it is not stored.
    q_offsets = (token + tl.minimum(query, n - 1)).to(tl.int64) * q_token + head * q_head
    q_tile = _load_rows(q, q_offsets, DIM, DIM_PAD)

    acc = tl.zeros([ROWS, DIM_PAD], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], _MASKED, tl.float32)
    head_keys = keys + kv_head.to(tl.int64) * head_stride
    head_values = values + kv_head.to(tl.int64) * head_stride
    row_table = table + row.to(tl.int64) * table_row
    for start in range(begin, end, BLOCK_N):
        acc, total, top = _attend_tile(
            acc, total, top, q_tile, query_pos, seq_len - n, seq_len - 1, start, end, head_keys, head_values,
            row_table, scale, cap, window, page_stride, token_stride,
            DIM, DIM_PAD, BLOCK_SIZE, BLOCK_N, WINDOW, CAPPED,
        )  # fmt: skip

    dim = tl.arange(0, DIM_PAD)
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


@triton.jit
def _merge_kernel(
    sums, stats, out, query_start, splits,
    QUERIES: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, SPLITS_PAD: tl.constexpr,
    ONES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (heads, rows, QUERIES): weighs the splits of one query by their top scores."""
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
    if PDL:
        tl.extra.cuda.gdc_wait()
    parts = tl.load(sums + at[:, None] * DIM + dim[None, :], mask=used[:, None] & real[None, :], other=0.0)
    total = tl.load(stats + at * 2, mask=used, other=0.0)
    top = tl.load(stats + at * 2 + 1, mask=used, other=_MASKED)
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
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    queries: int = 1,
    splits: int = 1,
    pdl: bool = False,
    tile: tuple[int, int, int] | None = None,
) -> None:
    """All rows with at most `queries` new tokens; query_start None: every row has exactly one token.

    q [tokens, heads, dim] (dim contiguous), out [tokens, heads * dim]. `tile` is (keys, warps, stages).
    """
    heads, dim = q.shape[1:]
    rows, kv_heads = seq_lens.shape[0], keys.shape[1]
    group = heads // kv_heads
    block_n, warps, stages = tile or short_tile(dim, q.element_size(), rows * kv_heads * splits)
    factor, cap = _score_factors(scale, soft_cap)
    ones = query_start is None
    starts = seq_lens if query_start is None else query_start
    sums = stats = out
    if splits > 1:
        parts = rows * queries * heads * splits
        sums = torch.empty(parts * dim, dtype=torch.float32, device=q.device)
        stats = torch.empty(parts * 2, dtype=torch.float32, device=q.device)
    _short_kernel[(kv_heads, rows, splits)](
        q, keys, values, out, sums, stats, seq_lens, starts, table,
        q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), keys.stride(2), table.stride(0),
        factor, cap, window or 0, splits,
        GROUP=group, QUERIES=queries, ROWS=max(SHORT_ROWS, triton.next_power_of_2(group * queries)),
        DIM=dim, DIM_PAD=_pad(dim), BLOCK_SIZE=keys.shape[2], BLOCK_N=block_n,
        ONES=ones, SPLIT=splits > 1, WINDOW=window is not None, CAPPED=soft_cap is not None,
        PDL=pdl, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if splits > 1:
        _merge_kernel[(heads, rows, queries)](
            sums, stats, out, starts, splits,
            QUERIES=queries, DIM=dim, DIM_PAD=_pad(dim), SPLITS_PAD=triton.next_power_of_2(splits),
            ONES=ones, PDL=pdl, num_warps=4, launch_pdl=pdl,
        )  # fmt: skip


# -------------------------------------------------------------------------- rows with many new tokens


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


@triton.jit
def _long_kernel(
    q, keys, values, out, seq_lens, query_start, table, rows,
    q_token, q_head, page_stride, head_stride, token_stride, table_row, scale, cap, window,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Grid (kv heads, tiles): TOKENS queries of a row, each with the GROUP heads of one KV head."""
    kv_head = tl.program_id(0)
    row, back = _find_tile(query_start, rows, tl.program_id(1), QUERIES, TOKENS)
    if row >= rows:
        return
    token = tl.load(query_start + row)
    n = tl.load(query_start + row + 1) - token
    seq_len = tl.load(seq_lens + row)
    # The last tiles of a row see the most keys: they come first, so that the short ones fill the gaps.
    tile = (tl.cdiv(n, TOKENS) - 1 - back) * TOKENS
    old = seq_len - n  # keys before the row's new tokens

    m = tl.arange(0, ROWS)
    query, head = m // GROUP, kv_head * GROUP + m % GROUP
    valid = (tile + query < n) & (m < TOKENS * GROUP)
    query_pos = old + tile + query
    first = (token + tile).to(tl.int64)  # offsets from the first token fit in 32 bits: fewer registers
    real = tl.minimum(query, n - 1 - tile)  # a row past the last query repeats it and is not stored
    q_tile = _load_rows(q + first * q_token, real * q_token + head * q_head, DIM, DIM_PAD)

    acc = tl.zeros([ROWS, DIM_PAD], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], _MASKED, tl.float32)
    head_keys = keys + kv_head.to(tl.int64) * head_stride
    head_values = values + kv_head.to(tl.int64) * head_stride
    row_table = table + row.to(tl.int64) * table_row

    begin, low_pos = 0, old + tile
    end = old + tl.minimum(tile + TOKENS, n)
    if WINDOW:
        begin = tl.maximum(low_pos + 1 - window, 0) // BLOCK_N * BLOCK_N
    for start in range(begin, end, BLOCK_N):
        acc, total, top = _attend_tile(
            acc, total, top, q_tile, query_pos, low_pos, end - 1, start, end, head_keys, head_values,
            row_table, scale, cap, window, page_stride, token_stride,
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
    seq_lens: torch.Tensor,
    query_start: torch.Tensor,
    table: torch.Tensor,
    scale: float,
    tiles: int,
    window: int | None = None,
    soft_cap: float | None = None,
    queries: int = 0,
    tile: tuple[int, int, int, int, int | None] | None = None,
) -> None:
    """All rows with more than `queries` new tokens, in at most `tiles` tiles of `long_tokens(...)` tokens.

    q [tokens, heads, dim] (dim contiguous), out [tokens, heads * dim]. `tile` is (query rows, keys,
    warps, stages, registers per thread).
    """
    heads, dim = q.shape[1:]
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    block_m, block_n, warps, stages, registers = tile or long_tile(dim, q.element_size())
    block_m = max(block_m, triton.next_power_of_2(group))
    factor, cap = _score_factors(scale, soft_cap)
    _long_kernel[(kv_heads, tiles)](
        q, keys, values, out, seq_lens, query_start, table, seq_lens.shape[0],
        q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), keys.stride(2), table.stride(0),
        factor, cap, window or 0,
        GROUP=group, QUERIES=queries, TOKENS=block_m // group, ROWS=block_m,
        DIM=dim, DIM_PAD=_pad(dim), BLOCK_SIZE=keys.shape[2], BLOCK_N=block_n,
        WINDOW=window is not None, CAPPED=soft_cap is not None,
        num_warps=warps, num_stages=stages, maxnreg=registers,
    )  # fmt: skip


# ------------------------------------------------------------------------------------ sizes of the work


def short_tile(dim: int, itemsize: int, programs: int) -> tuple[int, int, int]:
    """(keys, warps, stages) of the short kernel; measured on an H200 (benchmarks/kernels.py)."""
    row_bytes = _pad(dim) * itemsize
    if row_bytes == 512:
        return 64, 4, 4
    keys = max(16, min(_TILE_BYTES // row_bytes, 128))
    # With 4 stages the buffers of a program are half as large, and 5 of them fit on a multiprocessor
    # instead of 3. That pays when it saves a second, nearly empty wave of programs.
    return keys, 2, 4 if 3 * _SMS < programs <= 5 * _SMS else 5


def long_tile(dim: int, itemsize: int) -> tuple[int, int, int, int, int | None]:
    """(query rows, keys, warps, stages, registers per thread) of the long kernel; measured likewise."""
    if itemsize == 4:
        return (64, 32, 8, 2, None) if _pad(dim) <= 128 else (32, 32, 8, 2, None)
    if _pad(dim) <= 128:  # so few registers that two programs fit on a multiprocessor: one multiplies
        return 128, 64, 8, 3, 128  # while the other takes exponents
    return 128, 64, 8, 3, None


def long_tokens(dim: int, itemsize: int, group: int) -> int:
    """New tokens of a row that one tile of the long kernel covers."""
    return max(long_tile(dim, itemsize)[0], triton.next_power_of_2(group)) // group


def num_splits(rows: int, kv_heads: int, max_len: int, dim: int, itemsize: int) -> int:
    """Programs per row and KV head: enough to fill the device, a power of two so that few kernels exist."""
    programs = rows * kv_heads
    if programs >= 2 * _SMS:
        return 1
    tiles = triton.cdiv(max_len, short_tile(dim, itemsize, programs)[0])
    wanted = max(1, min(triton.cdiv(2 * _SMS, programs), tiles, _MAX_SPLITS))
    return 1 << (wanted.bit_length() - 1)


_SMS = 132  # multiprocessors
_TILE_BYTES = 16384  # of the keys, and of the values, that one step of the short kernel reads
_MAX_SPLITS = 64


def _pad(dim: int) -> int:
    return max(16, triton.next_power_of_2(dim))


def _score_factors(scale: float, soft_cap: float | None) -> tuple[float, float]:
    """What q k^T and a capped score are multiplied with, so that exp2 takes the place of exp."""
    if soft_cap is None:
        return scale * _LOG2E, 0.0
    return scale * 2 * _LOG2E / soft_cap, soft_cap * _LOG2E
