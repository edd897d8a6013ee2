"""Grouped matrix product, for the experts of a MoE layer: sorted rows, each times the weight of its group.

torch's `grouped_mm` synchronizes with the device, except in bf16 on some GPUs (target.py). This kernel never does. The
grid has room for the largest number of tiles that the rows can form. Each program finds its tile from the ends of the
groups, and surplus programs end at once. Sums are fp32 and always in the same order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.jit import kernel
from quire.kernels.target import Target, target_of


@kernel
def _grouped(
    x,  # [rows, K], sorted by group
    weight,  # [groups, outputs, K]
    ends,  # int32 [groups]: the end of each group's rows
    y,  # [rows, outputs]
    groups,
    outputs,
    K: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Grid (most tiles of rows, tiles of outputs)."""
    tile = tl.program_id(0)
    index = tl.arange(0, GROUPS_PAD)
    end = tl.load(ends + index, mask=index < groups, other=0)
    begin = tl.load(ends + index - 1, mask=(index > 0) & (index < groups), other=0)
    tiles = tl.cdiv(end - begin, BLOCK_M)  # of each group
    before = tl.cumsum(tiles, 0) - tiles
    if tile >= tl.sum(tiles, 0):
        return
    mine = (before <= tile) & (tile < before + tiles)
    group = tl.sum(tl.where(mine, index, 0), 0)
    first = tl.sum(tl.where(mine, begin + (tile - before) * BLOCK_M, 0), 0)
    last = tl.sum(tl.where(mine, end, 0), 0)

    row = first + tl.arange(0, BLOCK_M)
    out = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    from_x = x + row.to(tl.int64)[:, None] * K + k[None, :]
    from_w = weight + (group.to(tl.int64) * outputs + tl.minimum(out, outputs - 1))[:, None] * K + k[None, :]
    inside = (row < last)[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        there = (start + k < K)[None, :]
        a = tl.load(from_x + start, mask=inside & there, other=0.0)
        w = tl.load(from_w + start, mask=there, other=0.0)
        acc = tl.dot(a, tl.trans(w), acc, input_precision="ieee")
    to = y + row.to(tl.int64)[:, None] * outputs + out[None, :]
    tl.store(to, acc.to(y.dtype.element_ty), mask=inside & (out < outputs)[None, :])


def grouped_product(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply rows ends[g - 1] .. ends[g] of x by weight[g].T, for each group g: [rows, outputs].

    Args:
        x: [rows, inputs], contiguous, sorted by group.
        weight: [groups, outputs, inputs], contiguous.
        ends: int32 [groups], ascending up to the number of rows.
    """
    (rows, inputs), (groups, outputs) = x.shape, weight.shape[:2]
    y = torch.empty(rows, outputs, device=x.device, dtype=x.dtype)
    block_m, block_n, block_k = _block(x.element_size(), target_of(x.device))
    most = rows // block_m + min(groups, rows)  # each group rounds up once
    if most:
        _grouped[(most, triton.cdiv(outputs, block_n))](
            x, weight, ends, y, groups, outputs,
            K=inputs, GROUPS_PAD=triton.next_power_of_2(groups),
            BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=4, num_stages=3,
        )  # fmt: skip
    return y


def _block(itemsize: int, target: Target) -> tuple[int, int, int]:
    """Return the (rows, outputs, inputs) of a tile."""
    return (32, 64, 64) if itemsize == 2 and target.has_matrix_units else (16, 64, 32)
