"""Matrix product y = W x with a quantised W, which is converted in registers as it is read.

A program multiplies some rows of W with up to 128 rows of x on the matrix units. Tiles of W come through a pipeline
of asynchronous copies. If the outputs give too few programs, the inputs are split as well, and the last program to
arrive sums the partial results. Sums are fp32 and always in the same order, so the result of a row does not depend on
the rest of the batch.

The activation of a gated MLP or the addition of the residual behind the product is fused with it.

Weights of 4 bits have their columns in the order of `reorder_nibbles`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.jit import kernel
from quire.kernels.matmul.codes import numbers, scale_number
from quire.kernels.matmul.finish import store_result, sum_splits
from quire.kernels.matmul.tiles import PackedTile, tile_for
from quire.kernels.target import target_of


@triton.jit
def _wait(PDL: tl.constexpr):
    """Wait for the previous kernel and return 0, which later addresses include so that they stay behind the wait."""
    if PDL:
        return tl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        return 0


@kernel
def _packed(
    x,  # [rows, K]; with X_SCALE e4m3 as uint8
    x_scale,  # fp32 [rows, K / X_GROUP], if X_GROUP
    residual,  # [rows, outputs], if ADD
    weight,  # uint8 [outputs, K or K / 2], with KIND [2 * outputs, ...]: gate, then up
    scale,  # [K / GROUP, rows of weight / SCALE_ROWS], or [rows of weight] if GROUP is 0
    zero,  # uint8 [K / GROUP, rows of weight], if ZERO
    offset,  # [K / GROUP, rows of weight], if OFFSET: added to code * scale
    row_factor,  # fp32 [rows of weight], if FACTOR: multiplies the sums as well
    bias,  # [rows of weight], if BIAS
    y,  # [rows, outputs]
    parts,  # fp32 [tiles, splits, BLOCK_N, BLOCK_M], if SPLIT
    arrived,  # int32 [tiles], 0 before and after, if SPLIT
    rows,
    outputs,
    scale_stride,  # elements from one group of columns to the next
    each,  # columns per split
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    E8M0: tl.constexpr,
    ZERO: tl.constexpr,
    OFFSET: tl.constexpr,
    FACTOR: tl.constexpr,
    X_GROUP: tl.constexpr,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    KIND: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # columns per product; 4 bits: half the columns per iteration
    ASM: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (tiles of outputs, splits of the columns, tiles of rows)."""
    GATED: tl.constexpr = KIND != ""
    FOUR: tl.constexpr = FORMAT == "int4" or FORMAT == "fp4"
    STEP: tl.constexpr = 2 * BLOCK_K if FOUR else BLOCK_K
    ROW_BYTES: tl.constexpr = K // 2 if FOUR else K
    OUTS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    EVEN: tl.constexpr = K % STEP == 0
    tl.static_assert(EVEN or not FOUR)
    tile, split = tl.program_id(0), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    r = tl.arange(0, BLOCK_N)
    if GATED:  # gate and up of one output are neighbours
        n = tl.minimum(tile * OUTS + r // 2, outputs - 1) + r % 2 * outputs
    else:
        n = tl.minimum(tile * OUTS + r, outputs - 1)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    from_w = weight + n.to(tl.int64)[:, None] * ROW_BYTES + k[None, :]
    from_scale = scale + n // SCALE_ROWS
    begin = split * each
    end = tl.minimum(begin + each, K)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    real = (m < rows)[:, None]
    from_x = x + m[:, None].to(tl.int64) * K + k[None, :]
    lag = 0
    for start in range(begin, end, STEP):
        if FOUR:
            w = tl.load(from_w + start // 2, eviction_policy="evict_first")
        elif EVEN:
            w = tl.load(from_w + start, eviction_policy="evict_first")
        else:
            w = tl.load(from_w + start, mask=(start + k < K)[None, :], other=0, eviction_policy="evict_first")
        if PDL:  # noqa: SIM102 (a compile-time condition)
            if start == begin:  # after the first loads of W have been issued
                lag = _wait(PDL)
        at = start + 16 * lag
        if EVEN:
            a = tl.load(from_x + at, mask=real, other=0)
        else:
            a = tl.load(from_x + at, mask=real & (at + k < K)[None, :], other=0)
        shift = tl.full([BLOCK_N, 1], 128.0 if OFFSET else 136.0, tl.float32).to(tl.bfloat16)
        if ZERO:
            shift = (tl.load(zero + start // GROUP * scale_stride + n).to(tl.float32) + 128.0).to(
                tl.bfloat16
            )[:, None]
        if X_GROUP:
            w = w.to(tl.float8e4nv, bitcast=True)
            a = a.to(tl.float8e4nv, bitcast=True)
            if not ASM:
                w, a = w.to(tl.float32).to(tl.float16), a.to(tl.float32).to(tl.float16)
        else:
            w_low = numbers(w, shift, FORMAT, False, ASM).to(a.dtype)
        if GROUP == 0:
            if X_GROUP:
                acc = tl.dot(w, tl.trans(a), acc)
            else:
                acc = tl.dot(w_low, tl.trans(a), acc)
        else:
            s = scale_number(tl.load(from_scale + start // GROUP * scale_stride), E8M0)
            if X_GROUP:
                part = tl.dot(w, tl.trans(a))
            else:
                part = tl.dot(w_low, tl.trans(a))
            if X_GROUP and X_GROUP < K:
                xs = tl.load(
                    x_scale + m * ((K + X_GROUP - 1) // X_GROUP) + at // X_GROUP, mask=m < rows, other=0.0
                )
                part *= xs[None, :]
            if OFFSET:
                o = tl.load(offset + start // GROUP * scale_stride + n).to(tl.float32)
                acc += o[:, None] * tl.sum(a.to(tl.float32), 1)[None, :]
            if not FOUR or GROUP < STEP:
                acc += part * s[:, None]
        if FOUR:
            b = tl.load(from_x + (at + BLOCK_K), mask=real, other=0)
            if GROUP > 0 and GROUP < STEP:
                group = (start + BLOCK_K) // GROUP
                if ZERO:
                    shift = (tl.load(zero + group * scale_stride + n).to(tl.float32) + 128.0).to(tl.bfloat16)[
                        :, None
                    ]
                s = scale_number(tl.load(from_scale + group * scale_stride), E8M0)
                if OFFSET:
                    o = tl.load(offset + group * scale_stride + n).to(tl.float32)
                w_high = numbers(w, shift, FORMAT, True, ASM).to(b.dtype)
                acc += tl.dot(w_high, tl.trans(b)) * s[:, None]
            else:
                w_high = numbers(w, shift, FORMAT, True, ASM).to(b.dtype)
                if GROUP == 0:
                    acc = tl.dot(w_high, tl.trans(b), acc)
                else:
                    acc += tl.dot(w_high, tl.trans(b), part) * s[:, None]
            if OFFSET:
                acc += o[:, None] * tl.sum(b.to(tl.float32), 1)[None, :]

    last, acc = sum_splits(acc, parts, arrived, tile, split, SPLIT, BLOCK_M, BLOCK_N)
    if last:
        if GROUP == 0:
            acc *= scale_number(tl.load(from_scale), E8M0)[:, None]
        if FACTOR:
            acc *= tl.load(row_factor + n)[:, None]
        if X_GROUP == K:
            acc *= tl.load(x_scale + m, mask=m < rows, other=0.0)[None, :]
        store_result(
            acc, residual, bias, y, tile, m, n, rows, outputs, ADD, BIAS, KIND, BLOCK_M, BLOCK_N
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PackedTensors:
    """A quantised weight as the kernel reads it. Experts have a dimension of experts in front of all others.

    Args:
        format: fp8, byte (signed integers; "int8" would mean a dtype to Triton), int4 or fp4.
        codes: uint8 [outputs, inputs], or [outputs, inputs / 2] in the order of `reorder_nibbles`.
        inputs: number of columns.
        scale: [groups, outputs / scale_rows], or [outputs] if `group` is 0. uint8 stands for 2^(byte - 127).
        group: columns per scale; 0: all of them.
        scale_rows: rows per scale.
        zero: uint8 [groups, outputs], for int4; None: 8 everywhere, or 0 with an offset.
        offset: dtype of scale, [groups, outputs]: added to code * scale, for integers; or None.
        factor: fp32 [outputs], multiplies the scales; or None.
        half: columns of each half of the nibbles' order; 0 with 8 bits.
    """

    format: str
    codes: torch.Tensor
    inputs: int
    scale: torch.Tensor
    group: int
    scale_rows: int = 1
    zero: torch.Tensor | None = None
    offset: torch.Tensor | None = None
    factor: torch.Tensor | None = None
    half: int = 0

    @property
    def outputs(self) -> int:
        return self.codes.shape[-2]


def reorder_nibbles(packed: torch.Tensor, half: int) -> torch.Tensor:
    """Return [outputs, inputs / 2] bytes whose low halves are `half` columns and whose high halves are the next ones.

    Args:
        packed: uint8 [..., inputs / 2]; the low half of a byte is the even column.
        half: a divisor of inputs / 2.
    """
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).unflatten(-1, (-1, 2, half))
    return (codes[..., 0, :] | codes[..., 1, :] << 4).flatten(-2)


def half_for(group: int, inputs: int, most: int = 128) -> int:
    """Return the `half` of `reorder_nibbles` for groups of `group` columns (0: all), at most `most`; 0 if none fits."""
    sizes = (size for size in (128, 64, 32, 16) if size <= most)
    return next((h for h in sizes if inputs % (2 * h) == 0 and (group % h == 0)), 0)


def packed_product(
    x: torch.Tensor,
    w: PackedTensors,
    bias: torch.Tensor | None,
    arrived: torch.Tensor,
    *,
    add: torch.Tensor | None = None,
    kind: str | None = None,
    x_scale: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    tile: PackedTile | None = None,
) -> torch.Tensor:
    """Return the product of x and W: [rows, outputs].

    Args:
        x: [rows, inputs], contiguous; with `x_scale` e4m3 numbers as uint8.
        w: the weight.
        bias: [outputs of W], or None.
        arrived: int32 zeros, `MOST_TILES` of them; zero again when the kernel has ended.
        add: added to the product, [rows, outputs].
        kind: activation of a gated MLP: the weight is gate|up and the result act(gate) * up.
        x_scale: fp32 [rows, 1] or [rows, inputs / 128].
        dtype: of the result, if x is e4m3.
        tile: replaces the table's choice.
    """
    rows = x.shape[0]
    outputs = w.outputs if kind is None else w.outputs // 2
    y = torch.empty(rows, outputs, device=x.device, dtype=dtype or x.dtype)
    target = target_of(x.device)
    tile = tile or tile_for(w.format, rows, w.outputs, w.inputs, x_scale is not None, w.group > 0)
    block_m = max(8 if x_scale is None else 16, min(tile.block_m, triton.next_power_of_2(rows)))
    block_k = w.half or min(tile.block_k, w.group or tile.block_k)
    step = 2 * block_k if w.half else block_k
    row_tiles, steps = triton.cdiv(rows, block_m), triton.cdiv(w.inputs, step)
    tiles = triton.cdiv(w.outputs, tile.block_n)
    splits, each = 1, steps
    if tile.programs:
        wanted = max(1, min(tile.programs * target.sms // (tiles * row_tiles), steps // 4, 16))
        each = triton.cdiv(steps, wanted)
        splits = triton.cdiv(steps, each)
    if tiles * row_tiles > arrived.shape[0]:
        splits, each = 1, steps
    parts = y
    if splits > 1:
        parts = torch.empty(
            row_tiles * tiles * splits * tile.block_n * block_m, device=x.device, dtype=torch.float32
        )
    per_stage = tile.block_n * block_k + block_m * step * x.element_size()
    stages = max(2, min(tile.stages, target.shared_bytes // per_stage + 1))
    pdl, asm = target.has_dependent_launch, target.has_ptx
    x_group = 0 if x_scale is None else w.inputs if x_scale.shape[1] == 1 else 128
    _packed[(tiles, splits, row_tiles)](
        x,
        x if x_scale is None else x_scale,
        x if add is None else add,
        w.codes,
        w.scale,
        w.codes if w.zero is None else w.zero,
        w.scale if w.offset is None else w.offset,
        w.scale if w.factor is None else w.factor,
        w.codes if bias is None else bias,
        y,
        parts,
        arrived,
        rows,
        outputs,
        w.scale.shape[-1],
        each * step,
        K=w.inputs,
        FORMAT=w.format,
        GROUP=w.group,
        SCALE_ROWS=w.scale_rows,
        E8M0=w.scale.dtype == torch.uint8,
        ZERO=w.zero is not None,
        OFFSET=w.offset is not None,
        FACTOR=w.factor is not None,
        X_GROUP=x_group,
        ADD=add is not None,
        BIAS=bias is not None,
        KIND=kind or "",
        SPLIT=splits > 1,
        BLOCK_M=block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=block_k,
        ASM=asm,
        PDL=pdl,
        num_warps=tile.warps,
        num_stages=stages,
        launch_pdl=pdl,
    )
    return y


MOST_TILES = 8192  # length of `arrived`
