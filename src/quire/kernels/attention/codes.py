"""Numbers of a KV cache that holds codes, in the form that matrix units take.

Triton's own conversion from e4m3 to bf16 takes an instruction for every number on Hopper (F2F), of a kind that few units
run. So keys become fp16, which takes one instruction for two codes, and queries in bf16 become fp16 too, divided by a
power of two for each row. NaN keys remain NaN. Values are always finite (kv_write.py). They are converted to the dtype
of the model, because a probability times a scale may be out of fp16's range; PTX moves their bits into place.

In the second factor of P V, matrix units take the numbers of two tokens from a register. A code's neighbours in memory
are of the same token, and loading single bytes from shared memory costs more than all else. So few queries load two
codes as one 16-bit number, and multiply the codes of even dimensions and those of odd ones separately.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.matmul.codes import numbers

# These programs take pairs of codes of two tokens, and return two tokens' even and odd codes in bf16.
# e4m3 has its exponent 120 lower in bf16, so the bits are moved into place and multiplied by 2^120.
E4M3_PAIRS = tl.constexpr("""{
.reg .b32 a, b, up, zero;
mov.b32 up, 0x7b807b80;
mov.b32 zero, 0x80008000;
shl.b32 a, $2, 8;
shl.b32 b, $2, 4;
and.b32 b, b, 0x07f007f0;
lop3.b32 a, a, 0x80008000, b, 0xEA;
fma.rn.bf16x2 $0, a, up, zero;
shr.u32 b, $2, 4;
and.b32 b, b, 0x07f007f0;
lop3.b32 a, $2, 0x80008000, b, 0xEA;
fma.rn.bf16x2 $1, a, up, zero;
}""")

# The last 7 bits of a code behind the 1 of 128 give 128 + code, or 256 + code if it is negative.
INT8_PAIRS = tl.constexpr("""{
.reg .b32 a, b, c, one, minus;
mov.b32 one, 0x3f803f80;
lop3.b32 a, $2, 0x007f007f, 0x43004300, 0xEA;
lop3.b32 minus, $2, 0x00800080, 0xc300c300, 0xEA;
fma.rn.bf16x2 $0, a, one, minus;
shr.u32 c, $2, 8;
lop3.b32 a, c, 0x007f007f, 0x43004300, 0xEA;
lop3.b32 minus, c, 0x00800080, 0xc300c300, 0xEA;
fma.rn.bf16x2 $1, a, one, minus;
}""")

# An int8 code plus 128 in the last bits of 1024 gives 1152 + code in fp16.
INT8_FP16 = tl.constexpr("""{
.reg .b32 codes, a, b, zero;
mov.b32 zero, 0x64806480;
xor.b32 codes, $2, 0x80808080;
prmt.b32 a, codes, 0x64646464, 0x4140;
prmt.b32 b, codes, 0x64646464, 0x4342;
sub.f16x2 $0, a, zero;
sub.f16x2 $1, b, zero;
}""")


@triton.jit
def key_numbers(codes, ASM: tl.constexpr):
    """Return the numbers of `codes` (e4m3 or int8) in fp16. ASM: whether to convert with PTX."""
    if codes.dtype == tl.int8 and ASM:
        return tl.inline_asm_elementwise(
            INT8_FP16, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4
        )
    else:
        return codes.to(tl.float16)


@triton.jit
def value_numbers(codes, TO: tl.constexpr, ASM: tl.constexpr):
    """Return the numbers of `codes` (e4m3 or int8) in TO: bf16, fp16 or fp32."""
    if tl.bfloat16 == TO:
        form: tl.constexpr = "byte" if codes.dtype == tl.int8 else "fp8"
        return numbers(codes.to(tl.uint8, bitcast=True), 0, form, False, ASM)
    else:
        return key_numbers(codes, ASM).to(TO)


@triton.jit
def paired_numbers(pairs, CODE: tl.constexpr, TO: tl.constexpr, ASM: tl.constexpr):
    """Return the numbers of pairs of codes in TO: those of the first codes, and those of the second ones.

    pairs: int16, the second code in the upper byte.
    CODE: the type of a code, e4m3 or int8.
    """
    if tl.bfloat16 == TO and ASM:
        return tl.inline_asm_elementwise(
            INT8_PAIRS if tl.int8 == CODE else E4M3_PAIRS,
            "=&r,=r,r",
            [pairs],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        low = (pairs & 255).to(tl.uint8).to(CODE, bitcast=True)
        high = (pairs >> 8 & 255).to(tl.uint8).to(CODE, bitcast=True)
        return low.to(tl.float16).to(TO), high.to(tl.float16).to(TO)


@triton.jit
def fp16_queries(q, scale, CODED: tl.constexpr):
    """Return queries [ROWS, DIM] in fp16, and the factors of their scores [ROWS], if keys are codes.

    A row in bf16 is divided by a power of two that leaves its largest number between 1 and 2, if that number is between
    2^-60 and 2^20: then the score of a masked key times the factor is neither near 0 nor infinite. So a row loses nothing
    but what is below 2^-25 of its largest number. It is NaN if that is 2^36 or more, or not finite. Queries in fp32 and
    fp16 are returned unchanged.
    """
    if CODED:
        power = tl.full([q.shape[0]], 1.0, tl.float32)
        if q.dtype == tl.bfloat16:
            largest = tl.max(tl.abs(q.to(tl.float32)), 1)
            power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
            power = tl.minimum(tl.maximum(power, 2.0**-60), 2.0**20)
            q = (q.to(tl.float32) / power[:, None]).to(tl.float16)
        return q, scale * power
    else:
        return q, scale


@triton.jit
def split_sums(sums, PAIRS: tl.constexpr):
    """Return the sums [ROWS, DIM] of even and of odd dimensions if values come in pairs, else `sums`."""
    if PAIRS:
        return tl.split(tl.reshape(sums, [sums.shape[0], sums.shape[1] // 2, 2]))
    else:
        return sums


@triton.jit
def join_sums(sums, PAIRS: tl.constexpr):
    """Undo `split_sums`."""
    if PAIRS:
        even, odd = sums
        return tl.reshape(tl.join(even, odd), [even.shape[0], even.shape[1] * 2])
    else:
        return sums
