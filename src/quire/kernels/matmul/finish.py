"""The end of a product with a quantised weight: the sum of split columns, the bias, the gate and the residual."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.activation import activate


@triton.jit
def sum_splits(
    acc, parts, arrived, tile, split, SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Return whether this program is the last of its tile to arrive, and then the sum of all splits, in their order.

    acc: fp32 [BLOCK_N, BLOCK_M], the sums of this split.
    parts: fp32 [tiles, splits, BLOCK_N, BLOCK_M].
    arrived: int32 [tiles], 0 before and after.
    """
    last = True
    if SPLIT:
        splits = tl.num_programs(1)
        size: tl.constexpr = BLOCK_N * BLOCK_M
        place = (tl.program_id(2) * tl.num_programs(0) + tile).to(tl.int64)
        at = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        whole = parts + place * splits * size + at
        tl.store(whole + split * size, acc)
        tl.debug_barrier()  # complete the program's stores before its arrival is counted
        last = tl.atomic_add(arrived + place, 1, sem="acq_rel") == splits - 1
        if last:
            tl.store(arrived + place, 0)  # for the next launch
            acc = tl.load(whole, cache_modifier=".cg")
            for other in range(1, splits):
                acc += tl.load(whole + other * size, cache_modifier=".cg")
    return last, acc


@triton.jit
def store_result(
    acc, residual, bias, y, tile, m, n, rows, outputs,
    ADD: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Store the sums [BLOCK_N, BLOCK_M] of the rows n of W and m of x, after bias, gate and residual."""
    GATED: tl.constexpr = KIND != ""
    OUTS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    dtype: tl.constexpr = y.dtype.element_ty
    if BIAS:
        acc += tl.load(bias + n).to(tl.float32)[:, None]
    out = tile * OUTS + tl.arange(0, OUTS)
    inside = (m < rows)[None, :] & (out < outputs)[:, None]
    to = m[None, :].to(tl.int64) * outputs + out[:, None]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(acc, [OUTS, 2, BLOCK_M]), (0, 2, 1)))
        gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
        result = activate(gate, KIND).to(dtype).to(tl.float32) * up
    else:
        result = acc
    if ADD:
        beside = tl.load(residual + to, mask=inside, other=0.0).to(tl.float32)
        result = result.to(dtype).to(tl.float32) + beside
    tl.store(y + to, result.to(dtype), mask=inside)


@triton.jit
def finish(
    acc, residual, bias, y, parts, arrived, tile, split, m, n, rows, outputs,
    ADD: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr, SPLIT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Sum the splits and store the result, if this program is the last one of its tile."""
    last, acc = sum_splits(acc, parts, arrived, tile, split, SPLIT, BLOCK_M, BLOCK_N)
    if last:
        store_result(acc, residual, bias, y, tile, m, n, rows, outputs, ADD, BIAS, KIND, BLOCK_M, BLOCK_N)
