"""Conversion of a whole quantised weight to 16 bits, for products with so many rows that the library's are faster."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.jit import kernel
from quire.kernels.matmul.codes import numbers, scale_number
from quire.kernels.matmul.packed import PackedTensors
from quire.kernels.target import target_of

_BLOCK_N, _BLOCK_K = 16, 128


@kernel
def _unpack(
    weight,  # as in packed.py, as are the next four
    scale,
    zero,
    offset,
    row_factor,
    y,  # [outputs, K]
    outputs,
    scale_stride,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    E8M0: tl.constexpr,
    ZERO: tl.constexpr,
    OFFSET: tl.constexpr,
    FACTOR: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (tiles of outputs, tiles of columns)."""
    FOUR: tl.constexpr = FORMAT == "int4" or FORMAT == "fp4"
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < outputs
    n = tl.minimum(n, outputs - 1)
    start = tl.program_id(1) * BLOCK_K * (2 if FOUR else 1)
    k = tl.arange(0, BLOCK_K)
    row_bytes: tl.constexpr = K // 2 if FOUR else K
    at = tl.program_id(1) * BLOCK_K + k
    codes = tl.load(
        weight + n.to(tl.int64)[:, None] * row_bytes + at[None, :], mask=(at < row_bytes)[None, :], other=0
    )
    for high in tl.static_range(2 if FOUR else 1):
        column = start + high * BLOCK_K
        group = 0 if GROUP == 0 else column // GROUP
        factor = scale_number(tl.load(scale + group * scale_stride + n // SCALE_ROWS), E8M0)
        if FACTOR:
            factor *= tl.load(row_factor + n)
        shift = tl.full([BLOCK_N, 1], 128.0 if OFFSET else 136.0, tl.float32).to(tl.bfloat16)
        if ZERO:
            shift = (tl.load(zero + group * scale_stride + n).to(tl.float32) + 128.0).to(tl.bfloat16)[:, None]
        value = numbers(codes, shift, FORMAT, high == 1, ASM).to(tl.float32) * factor[:, None]
        if OFFSET:
            value += tl.load(offset + group * scale_stride + n).to(tl.float32)[:, None]
        to = y + n.to(tl.int64)[:, None] * K + (column + k)[None, :]
        tl.store(to, value.to(y.dtype.element_ty), mask=inside[:, None] & (column + k < K)[None, :])


def unpack(w: PackedTensors, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight [outputs, inputs] in `dtype`."""
    y = torch.empty(w.outputs, w.inputs, device=w.codes.device, dtype=dtype)
    target = target_of(y.device)
    block_k = w.half or min(_BLOCK_K, w.group or _BLOCK_K)
    pdl = target.has_dependent_launch
    grid = (triton.cdiv(w.outputs, _BLOCK_N), triton.cdiv(w.codes.shape[1], block_k))
    _unpack[grid](
        w.codes,
        w.scale,
        w.codes if w.zero is None else w.zero,
        w.scale if w.offset is None else w.offset,
        w.scale if w.factor is None else w.factor,
        y,
        w.outputs,
        w.scale.shape[-1],
        K=w.inputs,
        FORMAT=w.format,
        GROUP=w.group,
        SCALE_ROWS=w.scale_rows,
        E8M0=w.scale.dtype == torch.uint8,
        ZERO=w.zero is not None,
        OFFSET=w.offset is not None,
        FACTOR=w.factor is not None,
        BLOCK_N=_BLOCK_N,
        BLOCK_K=block_k,
        ASM=target.has_ptx,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return y
