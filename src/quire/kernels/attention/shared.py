"""Attention of many decoding rows over their shared prefix, which is read once for all of them.

Without it, every row reads the shared blocks on its own, and only the two to eight query heads of a KV head share a
read. Here the query heads of many rows form one matrix product, as in prefill. The result is the state of the online
softmax after the shared keys. `attend_short` continues from it with each row's own keys ("Hydragen", Juravsky et al.
2024; "Cascade Inference", Ye et al. 2024).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.attention.codes import fp16_queries
from quire.kernels.attention.tile import (
    MASKED,
    KVScales,
    Tile,
    attend_tile,
    first_fit,
    load_rows,
    pad,
    scale_pointers,
    scale_strides,
    score_factors,
)
from quire.kernels.jit import kernel
from quire.kernels.target import Target, target_of


@dataclass(frozen=True, slots=True)
class SharedPartial:
    """The state of the online softmax after the shared keys, for the rows whose `tokens` is not 0."""

    tokens: torch.Tensor  # int32 [rows], any stride: number of shared keys of each row
    sums: torch.Tensor  # float32 [rows, heads, dim]
    stats: torch.Tensor  # float32 [rows, heads, 2]: sum of exponentials, and top score


@kernel
def _shared_kernel(
    q, keys, values, key_scales, value_scales, sums, stats, shared, table, slots, rows,
    shared_row, q_token, q_head, block_stride, head_stride, token_stride, scale_block, scale_head, scale_token,
    table_row, scale, cap,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    CAPPED: tl.constexpr, CODED: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (kv heads, tiles of TOKENS rows). Every row has one token."""
    kv_head, tile = tl.program_id(0), tl.program_id(1)
    heads = tl.num_programs(0) * GROUP
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    m = tl.arange(0, ROWS)
    row, head = tile * TOKENS + m // GROUP, kv_head * GROUP + m % GROUP
    there = (m < TOKENS * GROUP) & (row < rows)
    mine = tl.load(shared + row * shared_row, mask=there, other=0)
    slot = tl.load(slots + row, mask=there, other=0)
    length = tl.max(mine, 0)
    if length == 0:
        return
    # All sharing rows have the same blocks in this range, so any of their tables will do.
    row_table = table + tl.max(tl.where(mine > 0, slot, 0), 0) * table_row
    q_tile = load_rows(q, tl.minimum(row, rows - 1).to(tl.int64) * q_token + head * q_head, DIM, DIM_PAD)
    acc = tl.zeros([ROWS, DIM_PAD], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], MASKED, tl.float32)
    # Every query is placed at the last shared key, so it sees all of them.
    last = tl.full([ROWS], 0, tl.int32) + length - 1
    head_keys = keys + kv_head.to(tl.int64) * head_stride
    head_values = values + kv_head.to(tl.int64) * head_stride
    head_key_scales = key_scales + kv_head.to(tl.int64) * scale_head
    head_value_scales = value_scales + kv_head.to(tl.int64) * scale_head
    q_tile, scale = fp16_queries(q_tile, scale, CODED)
    for start in range(0, length, BLOCK_N):
        acc, total, top = attend_tile(
            acc, total, top, q_tile, last, length - 1, length - 1, start, length, head_keys, head_values,
            head_key_scales, head_value_scales, row_table, scale, cap, 0,
            block_stride, token_stride, scale_block, scale_token,
            DIM, DIM_PAD, BLOCK_SIZE, BLOCK_N, False, CAPPED, CODED, False, q.dtype.element_ty, ASM,
        )  # fmt: skip
    dim = tl.arange(0, DIM_PAD)[None, :]
    at = row.to(tl.int64) * heads + head
    sharing = mine > 0
    tl.store(sums + at[:, None] * DIM + dim, acc, mask=sharing[:, None] & (dim < DIM))
    tl.store(stats + at * 2, total, mask=sharing)
    tl.store(stats + at * 2 + 1, top, mask=sharing)


def attend_shared(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    shared: torch.Tensor,
    table: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
    soft_cap: float | None = None,
    scales: KVScales | None = None,
) -> SharedPartial:
    """Compute attention over the first shared[row] keys of each row.

    Args:
        q: [rows, heads, dim], dim contiguous; one token per row.
        keys: [blocks, kv heads, block size, dim], dim contiguous.
        values: the same shape and strides as `keys`.
        shared: int32 [rows], any stride. The same multiple of the block size for all rows that share the prefix, 0 for
            the others.
        table: the block table, int32 [slots, blocks]. Its shared blocks are the same for all rows that share.
        slots: int64 [rows], the row of `table` of each row.
        scale: factor of the scores q k^T.
        soft_cap: scores x become soft_cap * tanh(x / soft_cap); None for no cap.
        scales: of keys and values that are codes; None: they are plain numbers.
    """
    rows, heads, dim = q.shape
    kv_heads, block_size = keys.shape[1:3]
    group = heads // kv_heads
    target = target_of(q.device)
    tile = shared_tile(dim, q.element_size(), group, target)
    tokens = tile.rows // group
    factor, cap = score_factors(scale, soft_cap)
    sums = torch.empty(rows, heads, dim, dtype=torch.float32, device=q.device)
    stats = torch.empty(rows, heads, 2, dtype=torch.float32, device=q.device)
    pdl = target.has_dependent_launch
    _shared_kernel[(kv_heads, triton.cdiv(rows, tokens))](
        q, keys, values, *scale_pointers(scales, keys), sums, stats, shared, table, slots, rows,
        shared.stride(0), q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), keys.stride(2),
        *scale_strides(scales), table.stride(0), factor, cap,
        GROUP=group, TOKENS=tokens, ROWS=tile.rows, DIM=dim, DIM_PAD=pad(dim), BLOCK_SIZE=block_size,
        BLOCK_N=tile.keys, CAPPED=soft_cap is not None, CODED=scales is not None, ASM=target.has_ptx, PDL=pdl,
        num_warps=tile.warps, num_stages=tile.stages, launch_pdl=pdl,
    )  # fmt: skip
    return SharedPartial(shared, sums, stats)


def shared_tile(dim: int, itemsize: int, group: int, target: Target) -> Tile:
    """Return the tile for a head size, or a smaller one if it does not fit in shared memory."""
    smallest = [Tile(32, 32, 4, 2), Tile(32, 16, 4, 1), Tile(16, 16, 4, 1)]
    tuned = [Tile(64, 64 if pad(dim) * itemsize <= 256 else 32, 4, 3)] if target.has_matrix_units else []
    return first_fit([tile.with_rows(group) for tile in tuned + smallest], dim, itemsize, target)
