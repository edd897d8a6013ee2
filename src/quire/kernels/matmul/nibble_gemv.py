"""Matrix-vector product y = W x with an integer W of 4 bits, for one or two rows of x.

Converting every code to a floating-point number would take longer than reading it. So x is rounded to 8 bits, with a
scale for every 16 columns, and four products at a time are integers (`dp4a`). The error is smaller than a twentieth of
that of 4-bit weights.

A program rounds x once, keeps it in registers, and multiplies it with several tiles of rows of W. It loads a tile while
it multiplies the one before. The first tile is loaded before x is there, and the operations around the product are
fused with it, as in gemv.py.

W has its columns in the order of `reorder_nibbles`. A piece is 16 bytes of a row of W, which are the codes of 16
columns in their lower halves, and of another 16 in their upper ones. Those are multiplied where they are, as 16 times
the code.
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

# The sum of a number and of the products of 16 unsigned nibbles, which are masked, and 16 signed bytes.
_DOT16 = tl.constexpr("""{
.reg .b32 t;
and.b32 t, $1, MASK;
dp4a.u32.s32 $0, t, $5, $9;
and.b32 t, $2, MASK;
dp4a.u32.s32 $0, t, $6, $0;
and.b32 t, $3, MASK;
dp4a.u32.s32 $0, t, $7, $0;
and.b32 t, $4, MASK;
dp4a.u32.s32 $0, t, $8, $0;
}""")
_DOT16_LOW = tl.constexpr(_DOT16.value.replace("MASK", "0x0f0f0f0f"))
_DOT16_HIGH = tl.constexpr(_DOT16.value.replace("MASK", "0xf0f0f0f0"))
_PACK4 = tl.constexpr("""{
.reg .b32 a, b;
prmt.b32 a, $1, $2, 0x0040;
prmt.b32 b, $3, $4, 0x0040;
prmt.b32 $0, a, b, 0x5410;
}""")
_MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2^23: a small number added to it is rounded, and in the lowest bits


@triton.jit
def _with(items, item):
    return items + (item,)


@triton.jit
def _largest(one, other):
    return tl.maximum(one, other, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _quarters(values):
    """Return the four [A, B] of [A, B, 4]."""
    pairs = tl.reshape(values, [values.shape[0], values.shape[1], 2, 2])
    even, odd = tl.split(pairs)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _dot4(codes, x):
    """Return the sum of the products of four unsigned bytes and four signed ones, of each int32."""
    total = (codes & 255) * ((x << 24) >> 24)
    for byte in tl.static_range(1, 4):
        total += ((codes >> (8 * byte)) & 255) * ((x << (24 - 8 * byte)) >> 24)
    return total


@triton.jit
def _dot16(words, x, total, HIGH: tl.constexpr, ASM: tl.constexpr):
    """Return total [ROWS, P] plus the products of pieces: four words each, [ROWS, P] of W and [P] of x."""
    if ASM:
        ROWS: tl.constexpr = total.shape[0]
        P: tl.constexpr = total.shape[1]
        return tl.inline_asm_elementwise(
            _DOT16_HIGH if HIGH else _DOT16_LOW,
            "=&r,r,r,r,r,r,r,r,r,r",
            [
                words[0],
                words[1],
                words[2],
                words[3],
                tl.broadcast_to(x[0][None, :], [ROWS, P]),
                tl.broadcast_to(x[1][None, :], [ROWS, P]),
                tl.broadcast_to(x[2][None, :], [ROWS, P]),
                tl.broadcast_to(x[3][None, :], [ROWS, P]),
                total,
            ],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        for j in tl.static_range(4):
            masked = words[j] & (-252645136 if HIGH else 252645135)  # 0xF0F0F0F0, 0x0F0F0F0F
            total += _dot4(masked, tl.broadcast_to(x[j][None, :], words[j].shape))
        return total


@triton.jit
def _rounded(value, ASM: tl.constexpr):
    """Round pieces [P, 16] to 8 bits. Return their words, four [P], their sums [P] and their scales [P]."""
    P: tl.constexpr = value.shape[0]
    largest = tl.reduce(tl.abs(value), 1, _largest)  # NaN if a number is NaN
    codes = (value * (127.0 / tl.maximum(largest, 1e-28))[:, None] + _MAGIC).to(tl.int32, bitcast=True)
    first, second, third, fourth = _quarters(tl.reshape(codes, [P, 4, 4]))
    if ASM:
        words = tl.inline_asm_elementwise(
            _PACK4, "=r,r,r,r,r", [first, second, third, fourth], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        words = (first & 255) | (second & 255) << 8 | (third & 255) << 16 | (fourth << 24)
    pairs = tl.reshape(words, [P, 2, 2])
    even, odd = tl.split(pairs)
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    magic_bits: tl.constexpr = 1262485504
    sums = tl.sum(codes - magic_bits, 1)
    return (w0, w1, w2, w3), sums, largest / 127.0


@triton.jit
def _load_tile(
    weight,
    scale,
    zero,
    out,
    outputs,
    before,
    scale_stride,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    ZERO: tl.constexpr,
    PIECES: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Load the rows before + out of W, those of the outputs `out` [ROWS].

    Return tuples over chunks: words [ROWS, PIECES, 4], scales and zeros of the lower and of the upper halves.
    """
    row = before + out
    words = ()
    low_scales = ()
    high_scales = ()
    low_zeros = ()
    high_zeros = ()
    for c in tl.static_range(CHUNKS):
        piece = c * PIECES + tl.arange(0, PIECES)
        there = (out < outputs)[:, None] & (piece < K // 32)[None, :]
        # Loaded as pieces of four words, a tile would be divided over rows first by Triton 3.6.
        word = c * PIECES * 4 + tl.arange(0, PIECES * 4)
        at = row.to(tl.int64)[:, None] * (K // 8) + word[None, :]
        exists = (out < outputs)[:, None] & (word < K // 8)[None, :]
        whole = tl.load(weight + at, mask=exists, other=0, eviction_policy="evict_first")
        words = _with(words, tl.reshape(whole, [row.shape[0], PIECES, 4]))
        first = piece // (HALF // 16) * (2 * HALF) + piece % (HALF // 16) * 16
        low = (first // GROUP * scale_stride)[None, :] + row[:, None]
        high = ((first + HALF) // GROUP * scale_stride)[None, :] + row[:, None]
        low_scales = _with(low_scales, tl.load(scale + low, mask=there, other=0.0))
        high_scales = _with(high_scales, tl.load(scale + high, mask=there, other=0.0))
        if ZERO:
            low_zeros = _with(low_zeros, tl.load(zero + low, mask=there, other=0))
            high_zeros = _with(high_zeros, tl.load(zero + high, mask=there, other=0))
        else:
            low_zeros = _with(low_zeros, 8)
            high_zeros = _with(high_zeros, 8)
    return words, low_scales, high_scales, low_zeros, high_zeros


@triton.jit
def _sums(
    loaded,
    inputs,
    m: tl.constexpr,
    ROWS: tl.constexpr,
    PIECES: tl.constexpr,
    CHUNKS: tl.constexpr,
    ASM: tl.constexpr,
):
    """Return the products [ROWS] of a tile and row m of x."""
    products = tl.zeros([ROWS, PIECES], tl.float32)
    nothing = tl.zeros([ROWS, PIECES], tl.int32)
    for c in tl.static_range(CHUNKS):
        low, high = inputs[m * CHUNKS + c]
        words = _quarters(loaded[0][c])
        dots = _dot16(words, low[0], nothing - loaded[3][c] * low[1][None, :], False, ASM)
        products += dots.to(tl.float32) * (loaded[1][c].to(tl.float32) * low[2][None, :])
        dots = _dot16(words, high[0], nothing - loaded[4][c] * (16 * high[1])[None, :], True, ASM)
        products += dots.to(tl.float32) * (loaded[2][c].to(tl.float32) * (high[2] / 16.0)[None, :])
    return tl.sum(products, 1)


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
    tiles,
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
    ROWS: tl.constexpr,  # outputs per tile
    PIECES: tl.constexpr,  # per row and load
    ASM: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (programs): each takes every num_programs-th tile."""
    CHUNKS: tl.constexpr = (K // 32 + PIECES - 1) // PIECES
    dtype: tl.constexpr = y.dtype.element_ty
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    r = tl.arange(0, ROWS)
    own = tl.program_id(0) * ROWS + r
    loaded_gate = _load_tile(
        weight, scale, zero, own, outputs, 0, scale_stride, K, GROUP, HALF, ZERO, PIECES, CHUNKS
    )
    loaded_up = loaded_gate
    if KIND != "":
        loaded_up = _load_tile(
            weight, scale, zero, own, outputs, outputs, scale_stride, K, GROUP, HALF, ZERO, PIECES, CHUNKS
        )
    if PDL:
        tl.extra.cuda.gdc_wait()

    inputs = ()  # for each row of x and chunk: lower halves, upper halves
    for m in tl.static_range(M):
        lows = ()
        highs = ()
        squares = 0.0
        for c in tl.static_range(CHUNKS):
            piece = c * PIECES + tl.arange(0, PIECES)
            there = (piece < K // 32)[:, None]
            first = piece // (HALF // 16) * (2 * HALF) + piece % (HALF // 16) * 16
            k = first[:, None] + tl.arange(0, 16)[None, :]
            a = tl.load(x + m * K + k, mask=there, other=0.0).to(tl.float32)
            b = tl.load(x + m * K + HALF + k, mask=there, other=0.0).to(tl.float32)
            if ADD_BEFORE:
                a += tl.load(residual + m * K + k, mask=there, other=0.0).to(tl.float32)
                b += tl.load(residual + m * K + HALF + k, mask=there, other=0.0).to(tl.float32)
                a, b = a.to(dtype).to(tl.float32), b.to(dtype).to(tl.float32)
                if tl.program_id(0) == 0:
                    tl.store(total + m * K + k, a.to(dtype), mask=there)
                    tl.store(total + m * K + HALF + k, b.to(dtype), mask=there)
            if NORM:
                squares += tl.sum(tl.sum(a * a + b * b, 1), 0)
            lows = _with(lows, a)
            highs = _with(highs, b)
        for c in tl.static_range(CHUNKS):
            a, b = lows[c], highs[c]
            if NORM:
                piece = c * PIECES + tl.arange(0, PIECES)
                there = (piece < K // 32)[:, None]
                k = (piece // (HALF // 16) * (2 * HALF) + piece % (HALF // 16) * 16)[:, None]
                k += tl.arange(0, 16)[None, :]
                factor = tl.rsqrt(squares / K + eps)
                a = a * factor * tl.load(norm + k, mask=there, other=0.0).to(tl.float32)
                b = b * factor * tl.load(norm + HALF + k, mask=there, other=0.0).to(tl.float32)
                a, b = a.to(dtype).to(tl.float32), b.to(dtype).to(tl.float32)
            inputs = _with(inputs, (_rounded(a, ASM), _rounded(b, ASM)))

    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        following = (tile + tl.num_programs(0)) * ROWS + r
        next_gate, next_up = loaded_gate, loaded_up
        next_gate = _load_tile(
            weight, scale, zero, following, outputs, 0, scale_stride, K, GROUP, HALF, ZERO, PIECES, CHUNKS
        )
        if KIND != "":
            next_up = _load_tile(
                weight,
                scale,
                zero,
                following,
                outputs,
                outputs,
                scale_stride,
                K,
                GROUP,
                HALF,
                ZERO,
                PIECES,
                CHUNKS,
            )
        out = tile * ROWS + r
        inside = out < outputs
        for m in tl.static_range(M):
            result = _sums(loaded_gate, inputs, m, ROWS, PIECES, CHUNKS, ASM)
            if BIAS:
                result += tl.load(bias + out, mask=inside, other=0.0).to(tl.float32)
            if KIND != "":
                up = _sums(loaded_up, inputs, m, ROWS, PIECES, CHUNKS, ASM)
                if BIAS:
                    up += tl.load(bias + outputs + out, mask=inside, other=0.0).to(tl.float32)
                gate, up = result.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
                result = activate(gate, KIND).to(dtype).to(tl.float32) * up
            if ADD_AFTER:
                beside = tl.load(residual + m * outputs + out, mask=inside, other=0.0).to(tl.float32)
                result = result.to(dtype).to(tl.float32) + beside
            tl.store(y + m * outputs + out, result.to(dtype), mask=inside)
        loaded_gate, loaded_up = next_gate, next_up


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
    programs: int = 0,
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
        rows: outputs per tile; 0: chosen.
        programs: per multiprocessor; 0: chosen.
    """
    outputs = w.outputs if kind is None else w.outputs // 2
    y = torch.empty(x.shape[0], outputs, device=x.device, dtype=x.dtype)
    total = x if residual is None else torch.empty_like(x)
    target = target_of(x.device)
    warps = min(max(triton.next_power_of_2(w.inputs // 32) // 32, 1), 8)
    wide = kind is None and w.inputs <= 4096 and outputs > 32 * target.sms
    rows = rows or (8 if wide else 4)
    tiles = triton.cdiv(outputs, rows)
    most = target.sms * (programs or (1 if warps == 8 else 4 if kind is None else 3))
    pdl = target.has_dependent_launch
    beside = add if residual is None else residual
    _nibble_gemv[(triton.cdiv(tiles, triton.cdiv(tiles, most)),)](
        x, x if beside is None else beside, x if norm is None else norm, w.codes.view(torch.int32), w.scale,
        w.codes if w.zero is None else w.zero, w.codes if bias is None else bias, y, total, eps, outputs,
        w.scale.shape[-1], tiles,
        M=x.shape[0], K=w.inputs, GROUP=w.group, HALF=w.half, ZERO=w.zero is not None, NORM=norm is not None,
        ADD_BEFORE=residual is not None, ADD_AFTER=add is not None, BIAS=bias is not None, KIND=kind or "",
        ROWS=rows, PIECES=32 * warps, ASM=target.has_ptx, PDL=pdl, num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    return y, total


_MOST_INPUTS = 32768  # which a program holds in registers
