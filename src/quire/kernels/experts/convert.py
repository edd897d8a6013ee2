"""Conversion of a tile of quantised weights to numbers, with the scales of groups that are smaller than the tile."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.matmul.codes import numbers

# As in matmul/codes.py, but multiplied by a scale instead of 2^126.
_FP4_ASM = tl.constexpr("""{
.reg .b32 a, b, c, d;
shr.u32 a, $2, SHIFT;
prmt.b32 b, a, 0, 0x4342;
prmt.b32 a, a, 0, 0x4140;
shl.b32 c, a, 12;
shl.b32 d, b, 12;
shl.b32 a, a, 6;
shl.b32 b, b, 6;
and.b32 a, a, 0x01c001c0;
and.b32 b, b, 0x01c001c0;
lop3.b32 a, c, 0x80008000, a, 0xEA;
lop3.b32 b, d, 0x80008000, b, 0xEA;
mov.b32 c, 0x80008000;
fma.rn.bf16x2 $0, a, $3, c;
fma.rn.bf16x2 $1, b, $4, c;
}""")
_SCALED_FP4_LOW = tl.constexpr(_FP4_ASM.value.replace("SHIFT", "0"))
_SCALED_FP4_HIGH = tl.constexpr(_FP4_ASM.value.replace("SHIFT", "4"))
FP4_FACTOR = tl.constexpr(2.0**64)  # what sums lack then: a scale times 2^126 could be infinite


@triton.jit
def _bf16_scale(scale, E8M0: tl.constexpr):
    """Return scales in bf16; E8M0: they are bytes that stand for 2^(byte - 127)."""
    if E8M0:
        return (scale.to(tl.int16) << 7).to(tl.bfloat16, bitcast=True)
    else:
        return scale.to(tl.float32).to(tl.bfloat16)


@triton.jit
def _times(value, scale, ASM: tl.constexpr):
    """Return the product of two tensors of bf16."""
    if ASM:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 c; mov.b32 c, 0x80008000; fma.rn.bf16x2 $0, $1, $2, c; }",
            "=r,r,r",
            [value, scale],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        return (value.to(tl.float32) * scale.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _spread(scale, COLUMNS: tl.constexpr):
    """Repeat each column of [N, C] COLUMNS times: [N, C * COLUMNS]."""
    N: tl.constexpr = scale.shape[0]
    C: tl.constexpr = scale.shape[1]
    if C == 1:
        return tl.broadcast_to(scale, [N, COLUMNS])
    else:
        return tl.reshape(tl.broadcast_to(scale[:, :, None], [N, C, COLUMNS]), [N, C * COLUMNS])


@triton.jit
def scaled_fp4(codes, scale, E8M0: tl.constexpr, HIGH: tl.constexpr, COLUMNS: tl.constexpr):
    """Return e2m1 numbers times their scales / 2^64, in bf16."""
    if E8M0:
        scale = (tl.minimum(scale.to(tl.int32) + 62, 254) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        scale = (scale.to(tl.float32) * 4611686018427387904.0).to(tl.bfloat16)  # 2^62
    return tl.inline_asm_elementwise(
        _SCALED_FP4_HIGH if HIGH else _SCALED_FP4_LOW,
        "=&r,=&r,r,r,r",
        [codes, _spread(scale, COLUMNS)],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def converted(
    w,
    groups,
    part: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    E8M0: tl.constexpr,
    ZERO: tl.constexpr,
    OFFSET: tl.constexpr,
    BY_SUMS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ASM: tl.constexpr,
):
    """Return the numbers of a tile [N, BYTES], times their scales unless these multiply sums."""
    s, z, o = groups
    shift = tl.full([w.shape[0], 1], 128.0 if OFFSET else 136.0, tl.float32).to(tl.bfloat16)
    if ZERO:
        shift = _spread((tl.trans(z).to(tl.float32) + 128.0).to(tl.bfloat16), COLUMNS)
    number = numbers(w, shift, FORMAT, part == 1, ASM)
    if OFFSET:  # rounding to bf16 before the sum would lose too much
        number = number.to(tl.float32) * _spread(tl.trans(s).to(tl.float32), COLUMNS)
        return number + _spread(tl.trans(o).to(tl.float32), COLUMNS)
    elif GROUP == 0 or BY_SUMS:
        return number
    else:
        return _times(number, _spread(_bf16_scale(tl.trans(s), E8M0), COLUMNS), ASM)
