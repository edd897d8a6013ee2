"""Matrix-vector product y = W x for one or two rows of x, which is bound by the bandwidth of reading W.

A program multiplies some rows of W with all of x. It first loads its part of W into registers, all at once. These
loads depend on no earlier kernel, so with dependent launch they overlap with the previous one. Products are summed
in fp32, always in the same order, whatever the other rows hold.

At this size a kernel's launch costs as much as its work, so neighbouring operations are fused: before the product the
addition of the residual and the RMSNorm, which every program repeats (a few KB from the L2 cache), and after it the
activation of a gated MLP or the addition of the residual. Values are rounded where separate kernels round them.

W may hold e4m3 or int8 numbers, with a scale per row, or per block of 128 x 128. x stays as it is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.activation import activate
from quire.kernels.jit import kernel
from quire.kernels.target import target_of

MOST_ROWS = 2


@triton.jit
def load_chunk(weight, row, chunk: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr):
    """Load a chunk of columns of the rows `row`. They are read once, so the caches may evict them first."""
    k = chunk * CHUNK + tl.arange(0, CHUNK)[None, :]
    at = weight + row.to(tl.int64)[:, None] * K + k
    if (chunk + 1) * CHUNK <= K:
        return tl.load(at, eviction_policy="evict_first")
    else:
        return tl.load(at, mask=k < K, other=0.0, eviction_policy="evict_first")


@triton.jit
def appended(items, item):
    return items + (item,)


@kernel
def _gemv(
    x,  # [M, K]
    residual,  # added to x if ADD_BEFORE [M, K], to the product if ADD_AFTER [M, outputs]
    norm,  # [K], if NORM
    weight,  # [outputs, K], with KIND [2 * outputs, K]: gate, then up
    bias,  # [rows of weight], if BIAS
    y,  # [M, outputs]
    total,  # [M, K]: x + residual, if ADD_BEFORE
    scale,  # fp32 [rows of weight] or [K / 128, rows of weight / 128], by SCALES
    eps,
    outputs,
    scale_stride,  # blocks of rows
    M: tl.constexpr,
    K: tl.constexpr,
    NORM: tl.constexpr,
    ADD_BEFORE: tl.constexpr,
    ADD_AFTER: tl.constexpr,
    BIAS: tl.constexpr,
    KIND: tl.constexpr,
    SCALES: tl.constexpr,  # none, row or block
    ROWS: tl.constexpr,  # rows of the weight per program
    CHUNK: tl.constexpr,  # columns per load
    DEPTH: tl.constexpr,  # chunks in flight
    PDL: tl.constexpr,
) -> None:
    GATED: tl.constexpr = KIND != ""
    OUTS: tl.constexpr = ROWS // 2 if GATED else ROWS
    CHUNKS: tl.constexpr = (K + CHUNK - 1) // CHUNK
    tl.static_assert(NORM or not ADD_BEFORE)
    dtype: tl.constexpr = y.dtype.element_ty
    tile = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    r = tl.arange(0, ROWS)
    if GATED:  # gate and up of one output are neighbours
        row = tl.minimum(tile * OUTS + r // 2, outputs - 1) + r % 2 * outputs
    else:
        row = tl.minimum(tile * OUTS + r, outputs - 1)
    chunks = ()
    for c in tl.static_range(DEPTH):
        chunks = appended(chunks, load_chunk(weight, row, c, K, CHUNK))
    column = tl.arange(0, CHUNK)
    gains = ()
    if NORM:
        for c in tl.static_range(CHUNKS):
            k = c * CHUNK + column
            gains = appended(gains, tl.load(norm + k, mask=k < K, other=0.0))
    out = tile * OUTS + tl.arange(0, OUTS)
    there = out < outputs
    if SCALES == "row":
        row_scale = tl.load(scale + row)
    block_scales = ()  # of the rows of this program, which lie in one block: of gate rows, and of up rows
    up_scales = ()
    if SCALES == "block":
        for c in tl.static_range(CHUNKS):
            k = c * CHUNK + column
            at = scale + k // 128 * scale_stride
            first = tl.minimum(tile * OUTS, outputs - 1)
            block_scales = appended(block_scales, tl.load(at + first // 128, mask=k < K, other=0.0))
            if GATED:
                up_scales = appended(up_scales, tl.load(at + (outputs + first) // 128, mask=k < K, other=0.0))
    if BIAS:
        offset = tl.load(bias + out, mask=there, other=0.0).to(tl.float32)
        if GATED:
            up_offset = tl.load(bias + outputs + out, mask=there, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()

    for m in tl.static_range(M):
        if ADD_AFTER:
            beside = tl.load(residual + m * outputs + out, mask=there, other=0.0).to(tl.float32)
            tl.debug_barrier()  # else the assembler moves the load after the products and waits for it there
        stream = ()
        if NORM:
            squares = tl.zeros([CHUNK], tl.float32)
            for c in tl.static_range(CHUNKS):
                k = c * CHUNK + column
                value = tl.load(x + m * K + k, mask=k < K, other=0.0).to(tl.float32)
                if ADD_BEFORE:
                    value += tl.load(residual + m * K + k, mask=k < K, other=0.0).to(tl.float32)
                    value = value.to(dtype).to(tl.float32)
                squares += value * value
                stream = appended(stream, value)
            scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        products = tl.zeros([ROWS, CHUNK], tl.float32)
        for c in tl.static_range(CHUNKS):
            k = c * CHUNK + column
            if NORM:
                value = (stream[c] * scale * gains[c].to(tl.float32)).to(dtype).to(tl.float32)
            else:
                value = tl.load(x + m * K + k, mask=k < K, other=0.0).to(tl.float32)
            if m == 0 and c + DEPTH < CHUNKS:
                chunks = appended(chunks, load_chunk(weight, row, c + DEPTH, K, CHUNK))
            if SCALES == "block" and GATED:
                of_row = tl.where((r % 2 == 0)[:, None], block_scales[c][None, :], up_scales[c][None, :])
                products += chunks[c].to(tl.float32) * (value[None, :] * of_row)
            elif SCALES == "block":
                products += chunks[c].to(tl.float32) * (value * block_scales[c])[None, :]
            else:
                products += chunks[c].to(tl.float32) * value[None, :]
        if ADD_BEFORE:  # noqa: SIM102 (a compile-time condition)
            if tile == 0:
                for c in tl.static_range(CHUNKS):
                    k = c * CHUNK + column
                    tl.store(total + m * K + k, stream[c].to(dtype), mask=k < K)
        sums = tl.sum(products, 1)
        if SCALES == "row":
            sums *= row_scale
        if GATED:
            gate, up = tl.split(tl.reshape(sums, [OUTS, 2]))
            if BIAS:
                gate, up = gate + offset, up + up_offset
            gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
            sums = activate(gate, KIND).to(dtype).to(tl.float32) * up
        elif BIAS:
            sums += offset
        if ADD_AFTER:
            sums = sums.to(dtype).to(tl.float32) + beside
        tl.store(y + m * outputs + out, sums.to(dtype), mask=there)


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x @ weight.T + bias, rounded, plus the residual: [rows, outputs].

    Args:
        x: [1 or 2, inputs], contiguous.
        weight: [outputs, inputs], contiguous; in 16 bits, or with a scale e4m3 or int8.
        bias: [outputs], or None.
        residual: [rows, outputs], or None.
        scale: fp32 [outputs], or [inputs / 128, outputs / 128] of blocks, rounded up.
    """
    y = torch.empty(x.shape[0], weight.shape[0], device=x.device, dtype=x.dtype)
    _launch(x, None, residual, None, 0.0, weight, bias, None, y, x, scale)
    return y


def norm_gemv(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    kind: str | None,
    scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rms_norm(x + residual) @ weight.T + bias, and the sum x + residual.

    Args:
        x: [1 or 2, inputs], contiguous.
        residual: [rows, inputs], or None.
        norm: the weight of the norm, [inputs]; its dtype may differ from x.
        eps: of the norm.
        weight: [outputs, inputs]; with a `kind` gate|up, [2 * outputs, inputs].
        bias: one element per row of `weight`, or None.
        kind: None, or the activation of a gated MLP: silu, gelu, gelu_tanh or relu.
        scale: as for `gemv`.

    Returns:
        The product [rows, outputs], with a `kind` act(gate) * up; and the sum [rows, inputs], which is x itself
        without a residual.
    """
    outputs = weight.shape[0] if kind is None else weight.shape[0] // 2
    y = torch.empty(x.shape[0], outputs, device=x.device, dtype=x.dtype)
    total = x if residual is None else torch.empty_like(x)
    _launch(x, residual, None, norm, eps, weight, bias, kind, y, total, scale)
    return y, total


def _launch(
    x: torch.Tensor,
    before: torch.Tensor | None,
    after: torch.Tensor | None,
    norm: torch.Tensor | None,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    kind: str | None,
    y: torch.Tensor,
    total: torch.Tensor,
    scale: torch.Tensor | None,
) -> None:
    size, inputs = weight.shape
    target = target_of(x.device)
    rows, chunk, depth, warps = tile(
        size, inputs, target.sms, kind is not None, norm is not None, weight.element_size()
    )
    pdl = target.has_dependent_launch
    residual = before if after is None else after
    _gemv[(triton.cdiv(size, rows),)](
        x,
        x if residual is None else residual,
        x if norm is None else norm,
        weight,
        weight if bias is None else bias,
        y,
        total,
        x if scale is None else scale,
        eps,
        y.shape[1],
        1 if scale is None else scale.shape[-1],
        M=x.shape[0],
        K=inputs,
        NORM=norm is not None,
        ADD_BEFORE=before is not None,
        ADD_AFTER=after is not None,
        BIAS=bias is not None,
        KIND=kind or "",
        SCALES="none" if scale is None else "row" if scale.dim() == 1 else "block",
        ROWS=rows,
        CHUNK=chunk,
        DEPTH=depth,
        PDL=pdl,
        num_warps=warps,
        maxnreg=_REGISTERS if warps > 4 and x.shape[0] == 1 else None,
        launch_pdl=pdl,
    )


def most_rows(inputs: int, itemsize: int = 2) -> int:
    """Return the largest number of rows of x for which `gemv` is faster than the other products."""
    chunks = triton.cdiv(inputs, _width(inputs, False, itemsize)[1])
    if inputs >= (_MANY_INPUTS if itemsize > 1 else _MANY_CODES):
        return 1 if chunks <= _MOST_CHUNKS else 0
    return MOST_ROWS if chunks <= _MOST_CHUNKS // 2 else 1 if chunks <= _MOST_CHUNKS else 0


def tile(
    rows: int, inputs: int, sms: int, gated: bool = False, normed: bool = False, itemsize: int = 2
) -> tuple[int, int, int, int]:
    """Return (rows, columns per chunk, chunks in flight, warps) of a program for a weight [rows, inputs].

    The sizes were tuned on an H200 (benchmarks/results). A thread loads 16 bytes at a time and has up to 16 loads in
    flight. A chunk is what the threads load of a row at once; after a norm it has up to 4096 columns. There is about
    one program per multiprocessor or more, if the weight has enough rows.
    """
    if itemsize == 1 and gated and normed and _CODES < inputs <= 2 * _CODES and rows >= _MANY * sms:
        return 16, _CODES, 2, 8  # with less of the norm in each of so many programs
    warps, chunk = _width(inputs, normed, itemsize)
    chunks = triton.cdiv(inputs, chunk)
    most = 8 if inputs * itemsize <= 4096 else 4
    least = 2 if gated else 1
    fill = 1 << max((rows // programs_for(sms)).bit_length() - 1, 0)
    return max(min(most, fill), least), chunk, chunks if chunks <= 4 else 3, warps


def _width(inputs: int, normed: bool, itemsize: int = 2) -> tuple[int, int]:
    """Return (warps, columns per chunk)."""
    warps = 4 if inputs <= 4096 else 8 if inputs <= 16384 else 16
    chunk = 4096 if normed and warps == 4 else 512 * warps // itemsize
    return warps, min(chunk, triton.next_power_of_2(inputs))


def programs_for(sms: int) -> int:
    """Round the number of multiprocessors down to a multiple of 16: Hopper has 132, which gives 128."""
    return max(sms - sms % 16, 16)


_CODES, _MANY = 2048, 128  # columns of a chunk; rows of W per multiprocessor
_MOST_CHUNKS = 8  # per row of W: their loop is unrolled, and two rows of x share the registers
# With so many 16-bit inputs, two rows of x take 247 registers of a thread behind a norm. That leaves two programs per
# multiprocessor, which do not hide the latency of memory: a step of two rows of an 8B model took 5.5 ms on an H200, one
# of four rows, which `skinny` multiplies, 4.3 ms; with 3,072 inputs of a 3B model, 2.7 and 2.2 ms.
_MANY_INPUTS = 3072
# With so many 8-bit ones their registers spill: a step of two rows of an 8B model in FP8 took 5.3 ms, one of four 3.9 ms.
_MANY_CODES = _CODES + 1
_REGISTERS = 128  # per thread, so that 16 warps fit on a multiprocessor
