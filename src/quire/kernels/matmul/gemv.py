"""y = W x for one or two rows of x: how fast W can be read is all that counts.

A program multiplies some rows of W with all of x. It asks for its part of W first, all at once and into
registers: nothing of that depends on an earlier kernel, so with dependent launch it happens while that one
still runs. Products are summed in fp32, always in the same order, whatever the other rows hold.

What surrounds the product is taken in, since at this size a kernel's start costs as much as its work: in
front the addition of the residual and the RMSNorm, which every program computes anew (a few KB from the L2
cache), behind it the gate of an MLP, or the addition of the residual. All of it rounds where separate kernels
would.
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
def _chunk(weight, row, chunk: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr):
    """Columns chunk * CHUNK .. of the rows `row`, read once: the first to go from the caches."""
    k = chunk * CHUNK + tl.arange(0, CHUNK)[None, :]
    at = weight + row.to(tl.int64)[:, None] * K + k
    if (chunk + 1) * CHUNK <= K:
        return tl.load(at, eviction_policy="evict_first")
    else:
        return tl.load(at, mask=k < K, other=0.0, eviction_policy="evict_first")


@triton.jit
def _with(items, item):
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
    eps,
    outputs,
    M: tl.constexpr,
    K: tl.constexpr,
    NORM: tl.constexpr,
    ADD_BEFORE: tl.constexpr,
    ADD_AFTER: tl.constexpr,
    BIAS: tl.constexpr,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,  # of the weight, per program
    CHUNK: tl.constexpr,  # columns
    DEPTH: tl.constexpr,  # chunks under way at once
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
    if GATED:  # gate and up of one output side by side
        row = tl.minimum(tile * OUTS + r // 2, outputs - 1) + r % 2 * outputs
    else:
        row = tl.minimum(tile * OUTS + r, outputs - 1)
    chunks = ()
    for c in tl.static_range(DEPTH):
        chunks = _with(chunks, _chunk(weight, row, c, K, CHUNK))
    column = tl.arange(0, CHUNK)
    gains = ()
    if NORM:
        for c in tl.static_range(CHUNKS):
            k = c * CHUNK + column
            gains = _with(gains, tl.load(norm + k, mask=k < K, other=0.0))
    out = tile * OUTS + tl.arange(0, OUTS)
    there = out < outputs
    if BIAS:
        offset = tl.load(bias + out, mask=there, other=0.0).to(tl.float32)
        if GATED:
            up_offset = tl.load(bias + outputs + out, mask=there, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()

    for m in tl.static_range(M):
        if ADD_AFTER:
            beside = tl.load(residual + m * outputs + out, mask=there, other=0.0).to(tl.float32)
            tl.debug_barrier()  # or the assembler moves the load behind the products, to be waited for there
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
                stream = _with(stream, value)
            scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        products = tl.zeros([ROWS, CHUNK], tl.float32)
        for c in tl.static_range(CHUNKS):
            k = c * CHUNK + column
            if NORM:
                value = (stream[c] * scale * gains[c].to(tl.float32)).to(dtype).to(tl.float32)
            else:
                value = tl.load(x + m * K + k, mask=k < K, other=0.0).to(tl.float32)
            if m == 0 and c + DEPTH < CHUNKS:
                chunks = _with(chunks, _chunk(weight, row, c + DEPTH, K, CHUNK))
            products += chunks[c].to(tl.float32) * value[None, :]
        if ADD_BEFORE:  # noqa: SIM102 (the one is known when compiled)
            if tile == 0:
                for c in tl.static_range(CHUNKS):
                    k = c * CHUNK + column
                    tl.store(total + m * K + k, stream[c].to(dtype), mask=k < K)
        sums = tl.sum(products, 1)
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
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """x [1 or 2, inputs], contiguous, times weight [outputs, inputs], plus bias; then plus residual
    [rows, outputs], if there is one, after rounding."""
    y = torch.empty(x.shape[0], weight.shape[0], device=x.device, dtype=x.dtype)
    _launch(x, None, residual, None, 0.0, weight, bias, None, y, x)
    return y


def norm_gemv(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    kind: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The product of `weight` with the RMS norm of x + residual, and that sum (x itself without a residual).

    x [1 or 2, inputs], contiguous; norm [inputs], its dtype may be another. With a `kind` (silu, gelu,
    gelu_tanh, relu) the weight is gate|up [2 * outputs, inputs], and the result kind(gate) * up.
    """
    outputs = weight.shape[0] if kind is None else weight.shape[0] // 2
    y = torch.empty(x.shape[0], outputs, device=x.device, dtype=x.dtype)
    total = x if residual is None else torch.empty_like(x)
    _launch(x, residual, None, norm, eps, weight, bias, kind, y, total)
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
) -> None:
    size, inputs = weight.shape
    target = target_of(x.device)
    rows, chunk, depth, warps = tile(size, inputs, target.sms, kind is not None, norm is not None)
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
        eps,
        y.shape[1],
        M=x.shape[0],
        K=inputs,
        NORM=norm is not None,
        ADD_BEFORE=before is not None,
        ADD_AFTER=after is not None,
        BIAS=bias is not None,
        KIND=kind or "",
        ROWS=rows,
        CHUNK=chunk,
        DEPTH=depth,
        PDL=pdl,
        num_warps=warps,
        maxnreg=_REGISTERS if warps > 4 and x.shape[0] == 1 else None,
        launch_pdl=pdl,
    )


def most_rows(inputs: int) -> int:
    """The rows of x for which this is the way to multiply."""
    chunks = triton.cdiv(inputs, _width(inputs, False)[1])
    return MOST_ROWS if chunks <= _MOST_CHUNKS // 2 else 1 if chunks <= _MOST_CHUNKS else 0


def tile(
    rows: int, inputs: int, sms: int, gated: bool = False, normed: bool = False
) -> tuple[int, int, int, int]:
    """(rows, columns of a chunk, chunks under way, warps) of a program for a weight [rows, inputs].

    Measured on an H200 (benchmarks/results). A thread takes 16 bytes at a time and has up to 16 such loads
    under way. A chunk is what the threads take of a row at once, but behind a norm up to 4096 columns. At
    least about one program per multiprocessor, if there are rows for so many.
    """
    warps, chunk = _width(inputs, normed)
    chunks = triton.cdiv(inputs, chunk)
    most = 8 if inputs <= 2048 else 4
    least = 2 if gated else 1
    fill = 1 << max((rows // programs_for(sms)).bit_length() - 1, 0)
    return max(min(most, fill), least), chunk, chunks if chunks <= 4 else 3, warps


def _width(inputs: int, normed: bool) -> tuple[int, int]:
    """(warps, columns of a chunk)"""
    warps = 4 if inputs <= 4096 else 8 if inputs <= 16384 else 16
    return warps, min(4096 if normed and warps == 4 else 256 * warps, triton.next_power_of_2(inputs))


def programs_for(sms: int) -> int:
    """About one for each multiprocessor: 128 for the 132 of Hopper."""
    return max(sms - sms % 16, 16)


_MOST_CHUNKS = 8  # of a row of W: their loop is unrolled, and two rows of x share what is in registers
_REGISTERS = 128  # per thread: then 16 warps fit on a multiprocessor
