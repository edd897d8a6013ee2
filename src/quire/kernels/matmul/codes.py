"""Conversion of the codes of quantised weights to numbers, in registers.

Codes are bytes. A byte of a 4-bit format holds two codes, and the caller says which one it wants. The numbers have at
most 8 significant bits, so every conversion is exact. On NVIDIA GPUs, PTX converts four codes at once: Triton's own
conversions take two to five times as many instructions, and the few rows that these kernels are for leave no time.
"""

from __future__ import annotations

import triton
import triton.language as tl

# e4m3 has its exponent 120 lower in bf16, so the bits are moved into place and multiplied by 2^120.
FP8_ASM = tl.constexpr("""{
.reg .b32 a, b, c, d;
prmt.b32 a, $2, 0, 0x1404;
prmt.b32 b, $2, 0, 0x3424;
shr.u32 c, a, 4;
shr.u32 d, b, 4;
and.b32 c, c, 0x07f007f0;
and.b32 d, d, 0x07f007f0;
lop3.b32 a, a, 0x80008000, c, 0xEA;
lop3.b32 b, b, 0x80008000, d, 0xEA;
mov.b32 c, 0x7b807b80;
mov.b32 d, 0x80008000;
fma.rn.bf16x2 $0, a, c, d;
fma.rn.bf16x2 $1, b, c, d;
}""")

# A code in the last bits of 128 gives 128 + code in bf16, of which 128 + zero is subtracted.
_INT4_ASM = tl.constexpr("""{
.reg .b32 a, b, one, minus;
shr.u32 a, $2, SHIFT;
prmt.b32 b, a, 0, 0x4342;
prmt.b32 a, a, 0, 0x4140;
lop3.b32 a, a, 0x000f000f, 0x43004300, 0xEA;
lop3.b32 b, b, 0x000f000f, 0x43004300, 0xEA;
mov.b32 one, 0x3f803f80;
xor.b32 minus, $3, 0x80008000;
fma.rn.bf16x2 $0, a, one, minus;
xor.b32 minus, $4, 0x80008000;
fma.rn.bf16x2 $1, b, one, minus;
}""")
_INT4_LOW = tl.constexpr(_INT4_ASM.value.replace("SHIFT", "0"))
_INT4_HIGH = tl.constexpr(_INT4_ASM.value.replace("SHIFT", "4"))

# e2m1 has its exponent 126 lower in bf16.
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
mov.b32 c, 0x7e807e80;
mov.b32 d, 0x80008000;
fma.rn.bf16x2 $0, a, c, d;
fma.rn.bf16x2 $1, b, c, d;
}""")
_FP4_LOW = tl.constexpr(_FP4_ASM.value.replace("SHIFT", "0"))
_FP4_HIGH = tl.constexpr(_FP4_ASM.value.replace("SHIFT", "4"))


@triton.jit
def numbers(codes, zero, FORMAT: tl.constexpr, HIGH: tl.constexpr, ASM: tl.constexpr):
    """Return the numbers of `codes` (uint8) in bf16.

    zero: for int4, 128 + the code of 0 in bf16, of a shape that broadcasts to that of `codes`.
    HIGH: for 4 bits, whether to convert the upper halves of the bytes.
    ASM: whether to convert with PTX.
    """
    if FORMAT == "byte":
        code = codes.to(tl.int8, bitcast=True)
        if ASM:
            return code.to(tl.bfloat16)
        else:
            return code.to(tl.float32).to(tl.bfloat16)
    elif FORMAT == "fp8":
        if ASM:
            return tl.inline_asm_elementwise(
                FP8_ASM, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4
            )
        else:
            return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32).to(tl.bfloat16)
    elif FORMAT == "int4":
        if ASM:
            return tl.inline_asm_elementwise(
                _INT4_HIGH if HIGH else _INT4_LOW,
                "=r,=r,r,r,r",
                [codes, tl.broadcast_to(zero, codes.shape)],
                dtype=tl.bfloat16,
                is_pure=True,
                pack=4,
            )
        else:
            code = (codes >> 4 if HIGH else codes & 15).to(tl.float32)
            return (code + 128.0 - zero.to(tl.float32)).to(tl.bfloat16)
    else:
        tl.static_assert(FORMAT == "fp4")
        if ASM:
            return tl.inline_asm_elementwise(
                _FP4_HIGH if HIGH else _FP4_LOW, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4
            )
        else:
            code = (codes >> 4 if HIGH else codes & 15).to(tl.int32)
            exponent, mantissa = (code >> 1) & 3, (code & 1).to(tl.float32)
            size = tl.where(
                exponent == 0, mantissa * 0.5, (1.0 + mantissa * 0.5) * tl.exp2((exponent - 1).to(tl.float32))
            )
            return tl.where(code >= 8, -size, size).to(tl.bfloat16)


@triton.jit
def scale_number(scale, E8M0: tl.constexpr):
    """Return scales in fp32; E8M0: they are bytes that stand for 2^(byte - 127)."""
    if E8M0:
        return (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    else:
        return scale.to(tl.float32)
