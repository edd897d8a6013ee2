"""Matrix product y = W x for up to 16 rows of x, on the matrix units; bound by the bandwidth of reading W.

There are two kernels. For a small W, a program loads entire rows of W at once, before it waits for the kernel that
computes x, and each of its warps multiplies some of the columns. For a large W, tiles come through a pipeline of
asynchronous copies, which also starts before the wait. If the outputs give too few programs, the inputs are split as
well, and the last program to arrive sums the partial results. Sums are fp32 and always in the same order, so the
result of a row does not depend on the rest of the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.jit import kernel
from quire.kernels.matmul.gemv import programs_for
from quire.kernels.target import target_of

MOST_ROWS = 16
BLOCK_N = 64  # rows of a large W per program
_BLOCK_K = 256  # columns per iteration
_PROGRAMS = 2  # per multiprocessor
_SMALL_BYTES, _SMALL_INPUTS = 16 << 20, 4096  # limits of a small W
_HELD = 1 << 15  # elements of a small W per program
_WARPS = 4


# --------------------------------------------------------------------------------------- a small weight


@triton.jit
def _with(items, item):
    return items + (item,)


@kernel(do_not_specialize=["rows"])
def _whole(
    x,  # [rows, K]
    weight,  # [outputs, K]
    bias,  # [outputs], if BIAS
    y,  # [rows, outputs]
    rows,
    outputs,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WARPS: tl.constexpr,
    COLUMNS: tl.constexpr,  # per warp and iteration
    PDL: tl.constexpr,
) -> None:
    """Grid (tiles of outputs). Factors are [warp, row, column], so that the columns are divided among the warps."""
    CHUNK: tl.constexpr = WARPS * COLUMNS
    CHUNKS: tl.constexpr = (K + CHUNK - 1) // CHUNK
    tile = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    from_w = weight + tl.minimum(n, outputs - 1).to(tl.int64)[None, :, None] * K
    m = tl.arange(0, BLOCK_M)[None, :, None]
    column = tl.arange(0, WARPS)[:, None, None] * COLUMNS + tl.arange(0, COLUMNS)[None, None, :]
    chunks = ()
    for c in tl.static_range(CHUNKS):
        k = c * CHUNK + column
        if (c + 1) * CHUNK <= K:
            w = tl.load(from_w + k, eviction_policy="evict_first")
        else:
            w = tl.load(from_w + k, mask=k < K, other=0.0, eviction_policy="evict_first")
        chunks = _with(chunks, w)
    if BIAS:
        offset = tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros([WARPS, BLOCK_M, BLOCK_N], tl.float32)
    for c in tl.static_range(CHUNKS):
        k = c * CHUNK + column
        a = tl.load(x + m * K + k, mask=(m < rows) & (k < K), other=0.0)
        acc = tl.dot(a, tl.permute(chunks[c], (0, 2, 1)), acc)
    sums = tl.sum(acc, 0)  # [BLOCK_M, BLOCK_N]
    if BIAS:
        sums += offset[None, :]
    row = tl.arange(0, BLOCK_M)[:, None]
    to = y + row * outputs + n[None, :]
    tl.store(to, sums.to(y.dtype.element_ty), mask=(row < rows) & (n < outputs)[None, :])


def is_small(weight: torch.Tensor) -> bool:
    """Return whether `small_weight_product` is faster than `skinny` for this weight; measured on an H200."""
    return weight.nbytes <= _SMALL_BYTES and weight.shape[1] <= _SMALL_INPUTS


def small_weight_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return x @ weight.T + bias for a small weight: [rows, outputs].

    Args:
        x: [rows, inputs], contiguous, at most 16 rows.
        weight: [outputs, inputs], contiguous; `is_small` must hold.
        bias: [outputs], or None.
    """
    (rows, inputs), outputs = x.shape, weight.shape[0]
    y = torch.empty(rows, outputs, device=x.device, dtype=x.dtype)
    target = target_of(x.device)
    # About one program per multiprocessor if there are enough outputs, and 64 KB of W in the registers of each.
    fill = 1 << max((outputs // programs_for(target.sms)).bit_length() - 1, 3)
    block_n = min(32, fill, _HELD // triton.next_power_of_2(inputs))
    pdl = target.has_dependent_launch
    _whole[(triton.cdiv(outputs, block_n),)](
        x,
        weight,
        weight if bias is None else bias,
        y,
        rows,
        outputs,
        K=inputs,
        BIAS=bias is not None,
        BLOCK_M=8 if rows <= 8 else MOST_ROWS,
        BLOCK_N=block_n,
        WARPS=_WARPS,
        COLUMNS=max(16, min(256, triton.next_power_of_2(inputs) // _WARPS)),
        PDL=pdl,
        num_warps=_WARPS,
        launch_pdl=pdl,
    )
    return y


# --------------------------------------------------------------------------------------- a large weight


@triton.jit
def _wait(PDL: tl.constexpr):
    """Wait for the previous kernel and return 0.

    A load whose address includes this 0 cannot be moved before the wait.
    """
    if PDL:
        return tl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        return 0


@kernel
def _skinny(
    x,  # [rows, inputs]
    weight,  # [outputs, inputs]
    bias,  # [outputs], if BIAS
    y,  # [rows, outputs]
    parts,  # float32 [tiles, splits, BLOCK_N, BLOCK_M], if SPLIT
    arrived,  # int32 [tiles], 0 before and after, if SPLIT
    rows,
    outputs,
    inputs,
    each,  # inputs per program, a multiple of BLOCK_K; no program has none
    BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN: tl.constexpr,  # the inputs are a multiple of BLOCK_K
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (tiles of outputs, splits of the inputs)."""
    tile, split = tl.program_id(0), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    row = weight + tl.minimum(n, outputs - 1).to(tl.int64)[:, None] * inputs
    real = (m < rows)[:, None]
    column = tl.arange(0, BLOCK_K)[None, :]
    from_x = x + m[:, None] * inputs + column
    begin = split * each
    end = tl.minimum(begin + each, inputs)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    a = tl.zeros([BLOCK_M, BLOCK_K], x.dtype.element_ty)
    zero = 0
    for start in range(begin, end, BLOCK_K):
        k = start + column
        if EVEN:
            w = tl.load(row + k, eviction_policy="evict_first")
        else:
            w = tl.load(row + k, mask=k < end, other=0.0, eviction_policy="evict_first")
        if start == begin:  # after the first loads of W have been issued
            zero = _wait(PDL)
            a = tl.load(from_x + (start + 16 * zero), mask=real & (k < end), other=0.0)
        next_a = tl.load(from_x + (start + BLOCK_K + 16 * zero), mask=real & (k + BLOCK_K < end), other=0.0)
        acc = tl.dot(w, tl.trans(a), acc)
        a = next_a

    last = True
    if SPLIT:
        splits = tl.num_programs(1)
        size: tl.constexpr = BLOCK_N * BLOCK_M
        whole = parts + tile * splits * size + tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + m[None, :]
        tl.store(whole + split * size, acc)
        tl.debug_barrier()  # complete the program's stores before its arrival is counted
        last = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == splits - 1
        if last:
            tl.store(arrived + tile, 0)  # for the next launch
            acc = tl.load(whole, cache_modifier=".cg")
            for other in range(1, splits):
                acc += tl.load(whole + other * size, cache_modifier=".cg")
    if last:
        if BIAS:
            acc += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)[:, None]
        to = y + m[None, :] * outputs + n[:, None]
        tl.store(to, acc.to(y.dtype.element_ty), mask=(m < rows)[None, :] & (n < outputs)[:, None])


def skinny(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, arrived: torch.Tensor
) -> torch.Tensor:
    """Return x @ weight.T + bias: [rows, outputs].

    Args:
        x: [rows, inputs], contiguous, at most 16 rows.
        weight: [outputs, inputs], contiguous.
        bias: [outputs], or None.
        arrived: int32 zeros, one for every 64 outputs; zero again when the kernel has ended.
    """
    (rows, inputs), outputs = x.shape, weight.shape[0]
    y = torch.empty(rows, outputs, device=x.device, dtype=x.dtype)
    tiles = triton.cdiv(outputs, BLOCK_N)
    target = target_of(x.device)
    splits, each = split_inputs(tiles, inputs, _PROGRAMS * target.sms)
    parts = y
    if splits > 1:
        parts = torch.empty(tiles * splits * BLOCK_N * MOST_ROWS, device=x.device, dtype=torch.float32)
    pdl = target.has_dependent_launch
    _skinny[(tiles, splits)](
        x,
        weight,
        weight if bias is None else bias,
        y,
        parts,
        arrived,
        rows,
        outputs,
        inputs,
        each,
        BIAS=bias is not None,
        SPLIT=splits > 1,
        EVEN=inputs % _BLOCK_K == 0,
        BLOCK_M=MOST_ROWS,
        BLOCK_N=BLOCK_N,
        BLOCK_K=_BLOCK_K,
        PDL=pdl,
        num_warps=4,
        num_stages=3,
        launch_pdl=pdl,
    )
    return y


def split_inputs(tiles: int, inputs: int, programs: int) -> tuple[int, int]:
    """Return (splits, inputs per split) for about `programs` programs, with at least two iterations each."""
    steps = triton.cdiv(inputs, _BLOCK_K)
    wanted = max(1, min(programs // tiles, steps // 2))
    each = triton.cdiv(steps, wanted)
    return triton.cdiv(steps, each), each * _BLOCK_K
