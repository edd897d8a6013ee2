"""Matrix-vector product y = W x with an integer W of 4 bits, for one or two rows of x.

Converting every code to a floating-point number would take longer than reading it. So x is rounded to 8 bits, with a
scale for every 16 columns, and four products at a time are integers (`dp4a`). The error is smaller than a twentieth of
that of 4-bit weights. Each program rounds x itself. Otherwise the kernel follows gemv.py: it first loads its part of W,
and it is fused with the operations around it.

W has its columns in the order of `reorder_nibbles`. A piece is 16 bytes of a row of W, which are the codes of 16
columns in their lower halves, and of another 16 in their upper ones.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.activation import activate
from quire.kernels.jit import kernel
from quire.kernels.matmul.packed import PackedTensors
from quire.kernels.target import target_of

MOST_ROWS = 2


@triton.jit
def _with(items, item):
    return items + (item,)


@triton.jit
def _dot4(codes, x, ASM: tl.constexpr):
    """Return the sum of the products of four unsigned bytes and four signed ones, of each int32."""
    codes, x = tl.broadcast(codes, x)
    if ASM:
        return tl.inline_asm_elementwise(
            "dp4a.u32.s32 $0, $1, $2, 0;", "=r,r,r", [codes, x], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        total = (codes & 255) * ((x << 24) >> 24)
        for byte in tl.static_range(1, 4):
            total += ((codes >> (8 * byte)) & 255) * ((x << (24 - 8 * byte)) >> 24)
        return total


@triton.jit
def _rounded(value):
    """Round pieces [P, 16] to 8 bits. Return their words [P, 4], their sums [P] and their scales [P]."""
    P: tl.constexpr = value.shape[0]
    scale = tl.max(tl.abs(value), 1) / 127.0
    codes = tl.floor(value / tl.maximum(scale, 1e-30)[:, None] + 0.5).to(tl.int32)
    place = 8 * tl.arange(0, 4)[None, None, :]
    words = tl.sum((tl.reshape(codes, [P, 4, 4]) & 255) << place, 2)
    return words, tl.sum(codes, 1), scale + tl.sum(value * 0.0, 1)  # NaN for what is not finite


@triton.jit
def _part(words, scale, zero, rounded, sums, x_scale, ASM: tl.constexpr):
    """Return the products [ROWS, P] of pieces of W and x."""
    dots = tl.sum(_dot4(words & 0x0F0F0F0F, rounded[None, :, :], ASM), 2) - zero * sums[None, :]
    return dots.to(tl.float32) * (scale.to(tl.float32) * x_scale[None, :])


@kernel
def _nibble_gemv(
    x,  # [M, K]
    residual,  # added to x if ADD_BEFORE [M, K], to the product if ADD_AFTER [M, outputs]
    norm,  # [K], if NORM
    weight,  # int32 [outputs, K / 8], with KIND [2 * outputs, K / 8]: gate, then up
    scale,  # [K / GROUP, rows of weight]
    zero,  # uint8 [K / GROUP, rows of weight], if ZERO
    bias,  # [rows of weight], if BIAS
    y,  # [M, outputs]
    total,  # [M, K]: x + residual, if ADD_BEFORE
    eps,
    outputs,
    scale_stride,
    M: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    ZERO: tl.constexpr,
    NORM: tl.constexpr,
    ADD_BEFORE: tl.constexpr,
    ADD_AFTER: tl.constexpr,
    BIAS: tl.constexpr,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,  # rows of the weight per program
    PIECES: tl.constexpr,  # per row and load
    ASM: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    GATED: tl.constexpr = KIND != ""
    OUTS: tl.constexpr = ROWS // 2 if GATED else ROWS
    CHUNKS: tl.constexpr = (K // 32 + PIECES - 1) // PIECES
    dtype: tl.constexpr = y.dtype.element_ty
    tile = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    r = tl.arange(0, ROWS)
    if GATED:  # gate and up of one output are neighbours
        row = tl.minimum(tile * OUTS + r // 2, outputs - 1) + r % 2 * outputs
    else:
        row = tl.minimum(tile * OUTS + r, outputs - 1)
    words = ()
    low_scales = ()
    high_scales = ()
    low_zeros = ()
    high_zeros = ()
    for c in tl.static_range(CHUNKS):
        piece = c * PIECES + tl.arange(0, PIECES)
        there = piece < K // 32
        at = (
            row.to(tl.int64)[:, None, None] * (K // 8)
            + piece[None, :, None] * 4
            + tl.arange(0, 4)[None, None, :]
        )
        words = _with(
            words, tl.load(weight + at, mask=there[None, :, None], other=0, eviction_policy="evict_first")
        )
    for c in tl.static_range(CHUNKS):
        piece = c * PIECES + tl.arange(0, PIECES)
        there = (piece < K // 32)[None, :]
        first = piece // (HALF // 16) * (2 * HALF) + piece % (HALF // 16) * 16
        low = (first // GROUP * scale_stride)[None, :] + row[:, None]
        high = ((first + HALF) // GROUP * scale_stride)[None, :] + row[:, None]
        low_scales = _with(low_scales, tl.load(scale + low, mask=there, other=0.0))
        high_scales = _with(high_scales, tl.load(scale + high, mask=there, other=0.0))
        if ZERO:
            low_zeros = _with(low_zeros, tl.load(zero + low, mask=there, other=0).to(tl.int32))
            high_zeros = _with(high_zeros, tl.load(zero + high, mask=there, other=0).to(tl.int32))
    out = tile * OUTS + tl.arange(0, OUTS)
    inside = out < outputs
    if BIAS:
        offset = tl.load(bias + row).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()

    column = tl.arange(0, 16)[None, :]
    for m in tl.static_range(M):
        lows = ()
        highs = ()
        squares = 0.0
        for c in tl.static_range(CHUNKS):
            piece = c * PIECES + tl.arange(0, PIECES)
            there = (piece < K // 32)[:, None]
            first = piece // (HALF // 16) * (2 * HALF) + piece % (HALF // 16) * 16
            k = first[:, None] + column
            a = tl.load(x + m * K + k, mask=there, other=0.0).to(tl.float32)
            b = tl.load(x + m * K + HALF + k, mask=there, other=0.0).to(tl.float32)
            if ADD_BEFORE:
                a += tl.load(residual + m * K + k, mask=there, other=0.0).to(tl.float32)
                b += tl.load(residual + m * K + HALF + k, mask=there, other=0.0).to(tl.float32)
                a, b = a.to(dtype).to(tl.float32), b.to(dtype).to(tl.float32)
                if tile == 0:
                    tl.store(total + m * K + k, a.to(dtype), mask=there)
                    tl.store(total + m * K + HALF + k, b.to(dtype), mask=there)
            if NORM:
                squares += tl.sum(tl.sum(a * a + b * b, 1), 0)
            lows = _with(lows, a)
            highs = _with(highs, b)
        products = tl.zeros([ROWS, PIECES], tl.float32)
        for c in tl.static_range(CHUNKS):
            a, b = lows[c], highs[c]
            if NORM:
                piece = c * PIECES + tl.arange(0, PIECES)
                there = (piece < K // 32)[:, None]
                k = (piece // (HALF // 16) * (2 * HALF) + piece % (HALF // 16) * 16)[:, None] + column
                factor = tl.rsqrt(squares / K + eps)
                a = a * factor * tl.load(norm + k, mask=there, other=0.0).to(tl.float32)
                b = b * factor * tl.load(norm + HALF + k, mask=there, other=0.0).to(tl.float32)
                a, b = a.to(dtype).to(tl.float32), b.to(dtype).to(tl.float32)
            low_zero = 8
            high_zero = 8
            if ZERO:
                low_zero, high_zero = low_zeros[c], high_zeros[c]
            rounded, sums, x_scale = _rounded(a)
            products += _part(words[c], low_scales[c], low_zero, rounded, sums, x_scale, ASM)
            rounded, sums, x_scale = _rounded(b)
            products += _part(words[c] >> 4, high_scales[c], high_zero, rounded, sums, x_scale, ASM)
        result = tl.sum(products, 1)
        if BIAS:
            result += offset
        if GATED:
            gate, up = tl.split(tl.reshape(result, [OUTS, 2]))
            gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
            result = activate(gate, KIND).to(dtype).to(tl.float32) * up
        if ADD_AFTER:
            beside = tl.load(residual + m * outputs + out, mask=inside, other=0.0).to(tl.float32)
            result = result.to(dtype).to(tl.float32) + beside
        tl.store(y + m * outputs + out, result.to(dtype), mask=inside)


def takes_nibbles(w: PackedTensors) -> bool:
    """Return whether `nibble_gemv` multiplies with this weight."""
    return w.format == "int4" and w.offset is None and w.group >= 32 and w.inputs <= _MOST_INPUTS


def nibble_gemv(
    x: torch.Tensor,
    w: PackedTensors,
    bias: torch.Tensor | None,
    *,
    add: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    kind: str | None = None,
    rows: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the product of x, or of rms_norm(x + residual), and the sum x + residual (x itself without a residual).

    Args:
        x: [1 or 2, inputs], contiguous.
        w: the weight; `takes_nibbles` must hold.
        bias: [outputs of W], or None.
        add: added to the product, [rows, outputs].
        residual: added to x before the norm, [rows, inputs].
        norm: weight of the norm, or None.
        eps: of the norm.
        kind: activation of a gated MLP: the weight is gate|up and the result act(gate) * up.
        rows: of W per program; 0: chosen.
    """
    outputs = w.outputs if kind is None else w.outputs // 2
    y = torch.empty(x.shape[0], outputs, device=x.device, dtype=x.dtype)
    total = x if residual is None else torch.empty_like(x)
    target = target_of(x.device)
    warps = min(max(triton.next_power_of_2(w.inputs // 32) // 32, 1), 8)
    rows = rows or (8 if w.inputs <= 4096 else 4)
    pdl = target.has_dependent_launch
    beside = add if residual is None else residual
    _nibble_gemv[(triton.cdiv(w.outputs, rows),)](
        x, x if beside is None else beside, x if norm is None else norm, w.codes.view(torch.int32), w.scale,
        w.codes if w.zero is None else w.zero, w.codes if bias is None else bias, y, total, eps, outputs,
        w.scale.shape[-1],
        M=x.shape[0], K=w.inputs, GROUP=w.group, HALF=w.half, ZERO=w.zero is not None, NORM=norm is not None,
        ADD_BEFORE=residual is not None, ADD_AFTER=add is not None, BIAS=bias is not None, KIND=kind or "",
        ROWS=rows, PIECES=32 * warps, ASM=target.has_ptx, PDL=pdl, num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    return y, total


_MOST_INPUTS = 32768  # which a program holds in registers
