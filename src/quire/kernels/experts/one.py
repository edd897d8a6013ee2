"""Experts for one token: two matrix-vector products, bound by the bandwidth of reading the chosen experts.

`one_gate_up` gives a program some outputs of one chosen expert. `one_down` gives a program some outputs of all chosen
experts, so it adds them itself, in the order of the choice, and needs no buffer for the parts. A thread keeps several
loads of 16 bytes in flight, as in kernels/matmul/gemv.py. The down projection starts to load before the kernel in front
of it has ended.

Weights hold 16-bit numbers, e4m3 or int8 numbers with a scale per row or per block of 128 x 128, or e2m1 numbers with a
scale per 32 columns (MXFP4). The token is not rounded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.activation import gate_up_product
from quire.kernels.experts.choice import ExpertChoice
from quire.kernels.jit import kernel
from quire.kernels.matmul.gemv import appended, load_chunk
from quire.kernels.target import target_of

# Outputs, columns per load, loads in flight, warps.
OneTile = tuple[int, int, int, int]

_LOAD_BYTES = 16 * 32  # of a warp
_WARPS = 4
_MOST_LOADS = 64  # of a program of `one_down`: their loop is unrolled
_PROGRAM_BYTES = 1 << 14  # of a program of `one_gate_up`; twice as many with codes


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """The matrices of all experts in the order that the kernels read.

    Attributes:
        weight: [experts, outputs, inputs], contiguous; in 16 bits, or e4m3 or int8. Of MXFP4 uint8
            [experts, outputs, inputs / 2], in the order of `reorder_nibbles` with a half of 32.
        scale: fp32 [experts, outputs], or of blocks [experts, inputs / 128, outputs / 128]; None in 16 bits. Of MXFP4
            uint8 [experts, inputs / 32, outputs].
        bias: [experts, outputs], or None.
    """

    weight: torch.Tensor
    scale: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    @property
    def scales(self) -> str:
        """Return how the kernels apply scales."""
        if self.weight.dtype == torch.uint8:
            return "fp4"
        return "none" if self.scale is None else "row" if self.scale.dim() == 2 else "block"


# From four bytes, the e2m1 numbers of the lower halves and those of the upper halves, in fp16. `prmt` looks up the first
# byte of a number's fp16 form, of which the second is 0; the signs are the first bits of the halves.
_E2M1 = tl.constexpr("""{
.reg .b32 a, b, low, high, zero;
mov.b32 zero, 0;
and.b32 a, $4, 0x77777777;
shr.u32 b, a, 16;
mov.b32 low, 0x3e3c3800;
mov.b32 high, 0x46444240;
prmt.b32 a, low, high, a;
prmt.b32 b, low, high, b;
shl.b32 low, $4, 4;
prmt.b32 high, low, $4, 0xd9c8;
prmt.b32 low, low, $4, 0xfbea;
lop3.b32 a, high, 0x80808080, a, 0xEA;
lop3.b32 b, low, 0x80808080, b, 0xEA;
prmt.b32 $0, a, zero, 0x2404;
prmt.b32 $1, b, zero, 0x2404;
prmt.b32 $2, a, zero, 0x3414;
prmt.b32 $3, b, zero, 0x3414;
}""")


@triton.jit
def _columns(
    x, c: tl.constexpr, K: tl.constexpr, FOUR: tl.constexpr, OUTS: tl.constexpr, CHUNK: tl.constexpr
):
    """Load what a chunk is multiplied with, in fp32: [OUTS, CHUNK] each for the lower and the upper halves of bytes.

    Each row loads its columns, which the L1 cache holds: to share them, the warps would have to wait for each other.
    """
    at = c * CHUNK + tl.arange(0, CHUNK)[None, :] + tl.zeros([OUTS, 1], tl.int32)
    if FOUR:
        k = at // 32 * 64 + at % 32
        low = tl.load(x + k, mask=at < K // 2, other=0.0).to(tl.float32)
        return low, tl.load(x + 32 + k, mask=at < K // 2, other=0.0).to(tl.float32)
    else:
        value = tl.load(x + at, mask=at < K, other=0.0).to(tl.float32)
        return value, value


@triton.jit
def _e2m1(codes, ASM: tl.constexpr):
    """Return the e2m1 numbers of the lower and of the upper halves of bytes, in fp16. ASM: whether to convert with PTX."""
    if ASM:
        return tl.inline_asm_elementwise(
            _E2M1, "=r,=r,=r,=r,r", [codes], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
    else:
        code = codes.to(tl.int16)
        low = ((code & 7) << 9 | (code & 8) << 12).to(tl.float16, bitcast=True)
        high = ((code & 0x70) << 5 | (code & 0x80) << 8).to(tl.float16, bitcast=True)
        return low * 16384.0, high * 16384.0


@triton.jit
def _products(
    codes,  # [OUTS, CHUNK]
    columns,  # from `_columns`
    scale,  # of the expert
    row,  # [OUTS]
    first,  # row[0]
    stride,  # from the scales of some columns to the next
    c: tl.constexpr,
    K: tl.constexpr,
    SCALES: tl.constexpr,
    ASM: tl.constexpr,
):
    """Return the products of a chunk, without scales of rows, in parts that are yet to be added: [OUTS, parts]."""
    OUTS: tl.constexpr = codes.shape[0]
    CHUNK: tl.constexpr = codes.shape[1]
    if SCALES == "fp4":
        group = 2 * (c * (CHUNK // 32) + tl.arange(0, CHUNK // 32))
        total = tl.zeros([OUTS, CHUNK // 32], tl.float32)
        codes = _e2m1(codes, ASM)
        for high in tl.static_range(2):
            number = codes[high].to(tl.float32) * columns[high]
            sums = tl.sum(tl.reshape(number, [OUTS, CHUNK // 32, 32]), 2)
            at = scale + (group + high)[None, :] * stride + row[:, None]
            power = tl.load(at, mask=(group * 32 < K)[None, :], other=0).to(tl.int32) << 23
            total += sums * power.to(tl.float32, bitcast=True)
        return total
    elif SCALES == "block":
        k = c * CHUNK + tl.arange(0, CHUNK)
        of_block = tl.load(scale + k // 128 * stride + first // 128, mask=k < K, other=0.0)
        return codes.to(tl.float32) * (columns[0] * of_block[None, :])
    else:
        return codes.to(tl.float32) * columns[0]


@kernel
def _one_gate_up(
    x,  # [HIDDEN]
    weight,  # [experts, 2 * WIDTH, HIDDEN]
    scale,  # see `ExpertMatrices`
    bias,  # [experts, 2 * WIDTH], if BIAS
    ids,  # int32 [chosen]
    h,  # [chosen, WIDTH]
    scale_stride,  # from the scales of some columns to the next
    scale_size,  # of an expert
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,
    BIAS: tl.constexpr,
    SCALES: tl.constexpr,  # none, row, block or fp4
    OUTS: tl.constexpr,
    CHUNK: tl.constexpr,
    DEPTH: tl.constexpr,  # chunks in flight
    ASM: tl.constexpr,  # convert e2m1 numbers with PTX
    PDL: tl.constexpr,
) -> None:
    """Grid (chosen, tiles of WIDTH)."""
    if PDL:  # the next kernel reads `ids` before it waits, so it may start only after this wait
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    FOUR: tl.constexpr = SCALES == "fp4"
    ROW: tl.constexpr = HIDDEN // 2 if FOUR else HIDDEN
    CHUNKS: tl.constexpr = (ROW + CHUNK - 1) // CHUNK
    PARTS: tl.constexpr = CHUNK // 32 if FOUR else CHUNK
    slot = tl.program_id(0)
    expert = tl.load(ids + slot, cache_modifier=".cg").to(tl.int64)
    first = tl.program_id(1) * OUTS
    n = first + tl.arange(0, OUTS)
    row = tl.minimum(n, WIDTH - 1)
    before = expert * (2 * WIDTH)
    gates = ()
    ups = ()
    for c in tl.static_range(DEPTH):
        gates = appended(gates, load_chunk(weight, before + row, c, ROW, CHUNK))
        ups = appended(ups, load_chunk(weight, before + WIDTH + row, c, ROW, CHUNK))
    of_expert = scale + expert * scale_size
    gate = tl.zeros([OUTS, PARTS], tl.float32)
    up = tl.zeros([OUTS, PARTS], tl.float32)
    for c in tl.static_range(CHUNKS):
        columns = _columns(x, c, HIDDEN, FOUR, OUTS, CHUNK)
        if c + DEPTH < CHUNKS:
            gates = appended(gates, load_chunk(weight, before + row, c + DEPTH, ROW, CHUNK))
            ups = appended(ups, load_chunk(weight, before + WIDTH + row, c + DEPTH, ROW, CHUNK))
        gate += _products(gates[c], columns, of_expert, row, first, scale_stride, c, HIDDEN, SCALES, ASM)
        up += _products(
            ups[c], columns, of_expert, WIDTH + row, WIDTH + first, scale_stride, c, HIDDEN, SCALES, ASM
        )
    gate_sum, up_sum = tl.sum(gate, 1), tl.sum(up, 1)
    if SCALES == "row":
        gate_sum *= tl.load(of_expert + row)
        up_sum *= tl.load(of_expert + WIDTH + row)
    if BIAS:
        gate_sum += tl.load(bias + before + row).to(tl.float32)
        up_sum += tl.load(bias + before + WIDTH + row).to(tl.float32)
    value = gate_up_product(gate_sum, up_sum, KIND, h.dtype.element_ty)
    tl.store(h + slot * WIDTH + n, value.to(h.dtype.element_ty), mask=n < WIDTH)


@kernel
def _one_down(
    h,  # [CHOSEN, WIDTH]
    weight,  # [experts, HIDDEN, WIDTH]
    scale,  # see `ExpertMatrices`
    bias,  # [experts, HIDDEN], if BIAS
    ids,  # int32 [CHOSEN]
    weights,  # float32 [CHOSEN]
    y,  # [HIDDEN]
    scale_stride,  # from the scales of some columns to the next
    scale_size,  # of an expert
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    CHOSEN: tl.constexpr,
    BIAS: tl.constexpr,
    SCALES: tl.constexpr,  # none, row, block or fp4
    OUTS: tl.constexpr,
    CHUNK: tl.constexpr,
    DEPTH: tl.constexpr,  # chunks in flight
    ASM: tl.constexpr,  # convert e2m1 numbers with PTX
    PDL: tl.constexpr,
) -> None:
    """Grid (tiles of HIDDEN)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    FOUR: tl.constexpr = SCALES == "fp4"
    ROW: tl.constexpr = WIDTH // 2 if FOUR else WIDTH
    CHUNKS: tl.constexpr = (ROW + CHUNK - 1) // CHUNK
    PARTS: tl.constexpr = CHUNK // 32 if FOUR else CHUNK
    first = tl.program_id(0) * OUTS
    n = first + tl.arange(0, OUTS)
    row = tl.minimum(n, HIDDEN - 1)
    # The routing has ended even before the wait, because the kernel before this one let it start only then.
    experts = ()
    for j in tl.static_range(CHOSEN):
        experts = appended(experts, tl.load(ids + j, cache_modifier=".cg").to(tl.int64))
    chunks = ()
    for i in tl.static_range(DEPTH):
        chunks = appended(
            chunks, load_chunk(weight, experts[i // CHUNKS] * HIDDEN + row, i % CHUNKS, ROW, CHUNK)
        )
    shares = ()
    factors = ()
    for j in tl.static_range(CHOSEN):
        share = tl.load(weights + j, cache_modifier=".cg")
        shares = appended(shares, share)
        factor = tl.full([OUTS], 1.0, tl.float32)
        if SCALES == "row":
            factor = tl.load(scale + experts[j] * scale_size + row)
        factors = appended(factors, factor * share)
    if PDL:
        tl.extra.cuda.gdc_wait()
    total = tl.zeros([OUTS, PARTS], tl.float32)
    for j in tl.static_range(CHOSEN):
        part = tl.zeros([OUTS, PARTS], tl.float32)
        of_expert = scale + experts[j] * scale_size
        for c in tl.static_range(CHUNKS):
            columns = _columns(h + j * WIDTH, c, WIDTH, FOUR, OUTS, CHUNK)
            if j * CHUNKS + c + DEPTH < CHOSEN * CHUNKS:
                from_row = experts[(j * CHUNKS + c + DEPTH) // CHUNKS] * HIDDEN + row
                chunks = appended(
                    chunks, load_chunk(weight, from_row, (j * CHUNKS + c + DEPTH) % CHUNKS, ROW, CHUNK)
                )
            part += _products(
                chunks[j * CHUNKS + c], columns, of_expert, row, first, scale_stride, c, WIDTH, SCALES, ASM
            )  # fmt: skip
        total += part * factors[j][:, None]
    sums = tl.sum(total, 1)
    if BIAS:
        for j in tl.static_range(CHOSEN):
            sums += shares[j] * tl.load(bias + experts[j] * HIDDEN + row).to(tl.float32)
    tl.store(y + n, sums.to(y.dtype.element_ty), mask=n < HIDDEN)


def takes_one(down: ExpertMatrices, chosen: int) -> bool:
    """Return whether `one_down` multiplies with these matrices of `chosen` experts."""
    row, itemsize = down.weight.shape[2], down.weight.element_size()
    aligned = down.scales != "block" or down.weight.shape[1] % 128 == 0
    fits = chosen * triton.cdiv(row, _chunk_for(row, itemsize)) <= _MOST_LOADS
    return aligned and row * itemsize % 16 == 0 and fits


def one_gate_up(
    x: torch.Tensor, w: ExpertMatrices, choice: ExpertChoice, kind: str, tile: OneTile | None = None
) -> torch.Tensor:
    """Return act(gate) * up of the token's experts: [chosen, width].

    Args:
        x: [1, hidden], contiguous.
        w: gate|up of all experts, [experts, 2 * width, hidden]; with scales of blocks, width is a multiple of 16.
        choice: the experts of the token.
        kind: the activation.
        tile: the sizes of a program, for tuning.
    """
    hidden, width, chosen = x.shape[1], w.weight.shape[1] // 2, choice.ids.shape[1]
    h = torch.empty(chosen, width, device=x.device, dtype=x.dtype)
    outputs, chunk, depth, warps = tile or _gate_up_tile(w.weight.shape[2], w.weight.element_size())
    target = target_of(x.device)
    pdl = target.has_dependent_launch
    scale = x if w.scale is None else w.scale
    _one_gate_up[(chosen, triton.cdiv(width, outputs))](
        x, w.weight, scale, x if w.bias is None else w.bias, choice.ids, h, scale.shape[-1], scale[0].numel(),
        HIDDEN=hidden, WIDTH=width, KIND=kind, BIAS=w.bias is not None, SCALES=w.scales, OUTS=outputs, CHUNK=chunk,
        DEPTH=min(depth, triton.cdiv(w.weight.shape[2], chunk)), ASM=target.has_ptx, PDL=pdl, num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    return h


def one_down(
    h: torch.Tensor, w: ExpertMatrices, choice: ExpertChoice, tile: OneTile | None = None
) -> torch.Tensor:
    """Return the weighted sum of the outputs of the token's experts: [1, hidden].

    Args:
        h: [chosen, width], from `one_gate_up`, which must be the kernel before this one.
        w: [experts, hidden, width].
        choice: the experts of the token, and their weights.
        tile: the sizes of a program, for tuning.
    """
    (chosen, width), hidden = h.shape, w.weight.shape[1]
    y = torch.empty(1, hidden, device=h.device, dtype=h.dtype)
    outputs, chunk, depth, warps = tile or _down_tile(w.weight.shape[2], w.weight.element_size())
    target = target_of(h.device)
    pdl = target.has_dependent_launch
    scale = h if w.scale is None else w.scale
    _one_down[(triton.cdiv(hidden, outputs),)](
        h, w.weight, scale, h if w.bias is None else w.bias, choice.ids, choice.weights, y,
        scale.shape[-1], scale[0].numel(), HIDDEN=hidden, WIDTH=width, CHOSEN=chosen, BIAS=w.bias is not None,
        SCALES=w.scales, OUTS=outputs, CHUNK=chunk, DEPTH=min(depth, chosen * triton.cdiv(w.weight.shape[2], chunk)),
        ASM=target.has_ptx, PDL=pdl, num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    return y


def _gate_up_tile(row: int, itemsize: int) -> OneTile:
    """Return the sizes of a program, of which each thread has up to 256 bytes in flight. Tuned on an H200."""
    chunk = _chunk_for(row, itemsize)
    fitting = max(_PROGRAM_BYTES * (2 if itemsize == 1 else 1) // (2 * row * itemsize), 1)
    outputs = min(1 << (fitting.bit_length() - 1), 8)
    of_thread = max(2 * outputs * chunk * itemsize // (32 * _WARPS), 16)
    return outputs, chunk, max(256 // of_thread, 1), _WARPS


def _chunk_for(row: int, itemsize: int) -> int:
    """Return the columns of a load: those of 4, 2 or 1 warps, whichever reach least beyond the end of a row."""
    sizes = [_LOAD_BYTES // itemsize * warps for warps in (4, 2, 1)]
    return min(min(sizes, key=lambda size: -(-row // size) * size), triton.next_power_of_2(row))


def _down_tile(row: int, itemsize: int) -> OneTile:
    """Return the sizes of a program, whose threads load from two rows, and have 256 bytes in flight."""
    chunk = _chunk_for(row, itemsize)
    outputs = max(2 * _WARPS * _LOAD_BYTES // itemsize // chunk, 1)
    return min(outputs, 16), chunk, 8, _WARPS
