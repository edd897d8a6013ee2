"""The inner loop of experts with quantised weights: sums of products of some rows of a weight and some rows of x.

A weight of 4 bits holds 2 * HALF columns in HALF consecutive bytes, in the order of `reorder_nibbles`. So a tile of
bytes gives two products, of the lower and of the upper halves.

Scales of 128 columns or more multiply the sums of a block of columns. Scales of fewer columns multiply the numbers, in
bf16: this is exact for e2m1 numbers, whose scales have at most 4 significant bits. Products of integers and
scales are rounded to bf16, as in an unpacked weight.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from quire.kernels.experts.convert import FP4_FACTOR, converted, scaled_fp4
from quire.kernels.matmul.packed import PackedTensors
from quire.kernels.target import target_of

_FEWEST_SUMMED = 128  # columns of a scale that multiplies sums
_MOST_SUMMED = 32  # rows of x; with more, it is less work to multiply numbers


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait for the previous kernel and return 0.

    A load whose address includes this 0 cannot be moved before the wait.
    """
    if PDL:
        return tl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        return 0


@triton.jit
def _of_groups(
    values,
    n,
    before,
    start,
    stride,
    part: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    HALF: tl.constexpr,
    BYTES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Load the numbers of the groups of a tile of bytes: [BYTES / COLUMNS, N], of COLUMNS bytes each.

    before: the first column of each row [1, N], or 0.
    """
    byte = tl.arange(0, BYTES // COLUMNS) * COLUMNS
    if HALF > 0:
        column = 2 * start + byte // HALF * (2 * HALF) + byte % HALF + part * HALF
    else:
        column = start + byte
    column = column[:, None] + before
    rows = n if SCALE_ROWS == 1 else n // SCALE_ROWS
    return tl.load(values + column // GROUP * stride + rows[None, :], mask=column < K, other=0)


@triton.jit
def _load_groups(
    scale,
    zero,
    offset,
    n,
    before,
    start,
    stride,
    part: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    ZERO: tl.constexpr,
    OFFSET: tl.constexpr,
    HALF: tl.constexpr,
    BYTES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Return the scales, zeros and offsets of a tile of bytes; 0 for what there is not."""
    s = 0
    z = 0
    o = 0
    if GROUP > 0:
        s = _of_groups(scale, n, before, start, stride, part, K, GROUP, SCALE_ROWS, HALF, BYTES, COLUMNS)
    if ZERO:
        z = _of_groups(zero, n, before, start, stride, part, K, GROUP, 1, HALF, BYTES, COLUMNS)
    if OFFSET:
        o = _of_groups(offset, n, before, start, stride, part, K, GROUP, 1, HALF, BYTES, COLUMNS)
    return s, z, o


@triton.jit
def packed_sums(
    from_x,  # pointers [M]: the first number of each row; e4m3 as bytes with X_SCALES
    real,  # [M]: False for the padding behind the last row
    from_x_scale,  # pointers [M]: the first scale of each row, if X_SCALES
    codes,  # pointer: uint8 [rows of weight, K or K / 2]
    scale,  # pointer: [groups, rows of weight / SCALE_ROWS]
    zero,  # pointer: uint8 [groups, rows of weight], if ZERO
    offset,  # pointer: [groups, rows of weight], if OFFSET: added to code * scale
    n,  # [N]: rows of the weight
    block,  # the block of outputs of the first half of the rows, if BLOCKS
    other_block,  # that of the second half
    stride,  # elements from the scales of one group to the next
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    E8M0: tl.constexpr,
    ZERO: tl.constexpr,
    OFFSET: tl.constexpr,
    BY_SUMS: tl.constexpr,  # scales multiply sums, instead of numbers
    X_SCALES: tl.constexpr,  # x is e4m3, with scales
    X_ROWS: tl.constexpr,  # one scale per row instead of one per 128 columns; the weight has no groups then
    BLOCKS: tl.constexpr,  # the rows have the scales of two blocks, which need not be brought to the threads of each row
    HALF: tl.constexpr,
    BYTES: tl.constexpr,  # of a row of the weight and an iteration
    SPLITS: tl.constexpr,  # parts of the columns; rows of the weight and of x are repeated for each
    LENGTH: tl.constexpr,  # bytes of a part
    ASM: tl.constexpr,
    WAIT: tl.constexpr,  # wait for the previous kernel behind the first loads of the weight
):
    """Return the sums [N, M] in fp32, without scales of whole rows.

    With SPLITS, N and M count a row once for each part of the columns: `n` and `from_x` repeat their rows, and the
    products of equal parts are what `join_splits` adds.
    """
    FOUR: tl.constexpr = FORMAT == "int4" or FORMAT == "fp4"
    ROW_BYTES: tl.constexpr = K // 2 if FOUR else K
    EVEN: tl.constexpr = LENGTH % BYTES == 0 and LENGTH * SPLITS == ROW_BYTES
    STEPS: tl.constexpr = 2 if FOUR else 1  # columns of a byte
    SPAN: tl.constexpr = HALF if FOUR else BYTES
    ONE: tl.constexpr = GROUP >= STEPS * BYTES  # one scale per row and iteration
    COLUMNS: tl.constexpr = BYTES if ONE else SPAN if GROUP > SPAN else GROUP  # bytes with the same scale
    tl.static_assert(ONE or not BY_SUMS)
    tl.static_assert(GROUP == 0 or not X_ROWS)
    FOLDED: tl.constexpr = FORMAT == "fp4" and ASM and from_x.dtype.element_ty == tl.bfloat16
    # The matrix units read both operands where the copies of loads put them.
    IN_PLACE: tl.constexpr = X_SCALES and ASM
    NONE: tl.constexpr = 0.0 if IN_PLACE else 0  # what masked loads give
    if IN_PLACE:
        codes = codes.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
        from_x = from_x.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
    byte = tl.arange(0, BYTES)
    at = byte // SPAN * (2 * SPAN) + byte % SPAN if FOUR else byte
    from_w = codes + n.to(tl.int64)[:, None] * ROW_BYTES + byte[None, :]
    from_x = from_x[:, None] + at[None, :]
    before = 0  # the first column of each row of the weight
    w_before = 0  # the first byte of each
    x_before = 0  # the first column of each row of x
    if SPLITS > 1:
        split = tl.arange(0, n.shape[0]) // (n.shape[0] // SPLITS)
        w_before = (split * LENGTH)[:, None]
        before = (split * (STEPS * LENGTH))[None, :]
        x_before = (tl.arange(0, real.shape[0]) // (real.shape[0] // SPLITS) * (STEPS * LENGTH))[:, None]
        from_w += w_before
        from_x += x_before
    acc = tl.zeros([n.shape[0], real.shape[0]], tl.float32)
    lag = 0
    # What belongs to groups is too small for the pipeline of copies, so it is loaded one iteration ahead.
    OF_ROWS: tl.constexpr = 0 if BLOCKS else GROUP
    low = _load_groups(
            scale, zero, offset, n, before, 0, stride, 0, K, OF_ROWS, SCALE_ROWS, ZERO, OFFSET, HALF, BYTES, COLUMNS
        )  # fmt: skip
    high = low
    if FOUR and not ONE:
        high = _load_groups(
            scale, zero, offset, n, before, 0, stride, 1, K, GROUP, SCALE_ROWS, ZERO, OFFSET, HALF, BYTES, COLUMNS
        )  # fmt: skip
    ws = 0.0
    other_ws = 0.0
    is_other = tl.arange(0, n.shape[0]) >= n.shape[0] // 2
    if BLOCKS:
        tl.static_assert(GROUP == BYTES and X_SCALES)
        ws = tl.load(scale + block)
        other_ws = tl.load(scale + other_block)
    xs = tl.full([1], 0.0, tl.float32)
    if X_SCALES:
        xs = tl.load(from_x_scale, mask=real, other=0.0)
    for start in range(0, LENGTH, BYTES):
        later = start + BYTES
        if EVEN:
            w = tl.load(from_w + start, eviction_policy="evict_first")
        else:
            there = (start + byte < LENGTH)[None, :] & ((start + byte)[None, :] + w_before < ROW_BYTES)
            w = tl.load(from_w + start, mask=there, other=NONE, eviction_policy="evict_first")
        if WAIT:  # noqa: SIM102 (a compile-time condition)
            if start == 0:
                lag = wait_for_previous(WAIT)
        next_low = _load_groups(
            scale, zero, offset, n, before, later, stride, 0, K, OF_ROWS, SCALE_ROWS, ZERO, OFFSET, HALF, BYTES, COLUMNS
        )  # fmt: skip
        next_high = next_low
        if FOUR and not ONE:
            next_high = _load_groups(
            scale, zero, offset, n, before, later, stride, 1, K, GROUP, SCALE_ROWS, ZERO, OFFSET, HALF, BYTES, COLUMNS
        )  # fmt: skip
        next_ws = ws
        next_other = other_ws
        if BLOCKS:
            of_later = scale + tl.minimum(later, K - 1) // GROUP * stride
            next_ws = tl.load(of_later + block)
            next_other = tl.load(of_later + other_block)
        next_xs = xs
        if X_SCALES and not X_ROWS:
            next_xs = tl.load(from_x_scale + later // 128, mask=real & (later < K), other=0.0)
        sums = tl.zeros([n.shape[0], real.shape[0]], tl.float32)
        for part in tl.static_range(STEPS):
            first = (2 * start if FOUR else start) + part * SPAN
            if EVEN:
                a = tl.load(from_x + (first + 16 * lag), mask=real[:, None], other=NONE)
            else:
                column = (first + at)[None, :]
                there = (column < STEPS * LENGTH) & (column + x_before < K)
                a = tl.load(from_x + (first + 16 * lag), mask=real[:, None] & there, other=NONE)
            groups = high if part == 1 else low
            if X_SCALES:
                left, right = w, a
                if not IN_PLACE:  # in the interpreter
                    left = w.to(tl.float8e4nv, bitcast=True).to(tl.float32).to(tl.float16)
                    right = a.to(tl.float8e4nv, bitcast=True).to(tl.float32).to(tl.float16)
                if X_ROWS:  # nothing to do between two products, which can follow each other without a wait
                    acc = tl.dot(left, tl.trans(right), acc)
                else:
                    factors = xs[None, :]
                    if BLOCKS:
                        factors = tl.where(is_other, other_ws, ws)[:, None] * factors
                    elif GROUP > 0:
                        factors = tl.trans(groups[0]) * factors
                    acc += tl.dot(left, tl.trans(right)) * factors
            else:
                if FOLDED:
                    number = scaled_fp4(w, tl.trans(groups[0]), E8M0, part == 1, COLUMNS)
                else:
                    number = converted(
                        w, groups, part, FORMAT, GROUP, E8M0, ZERO, OFFSET, BY_SUMS, COLUMNS, ASM
                    ).to(a.dtype)
                if BY_SUMS:
                    sums = tl.dot(number, tl.trans(a), sums)
                else:
                    acc = tl.dot(number, tl.trans(a), acc)
        if BY_SUMS and not X_SCALES:
            acc += sums * tl.trans(low[0]).to(tl.float32)
        low, high, xs = next_low, next_high, next_xs
        ws, other_ws = next_ws, next_other
    if FOLDED:
        acc *= FP4_FACTOR
    if X_ROWS:
        acc *= xs[None, :]
    return acc


@triton.jit
def join_splits(acc, SPLITS: tl.constexpr):
    """Add the products of equal parts of the columns: [N, M] of [SPLITS * N, SPLITS * M]."""
    if SPLITS == 1:
        return acc
    else:
        N: tl.constexpr = acc.shape[0] // SPLITS
        M: tl.constexpr = acc.shape[1] // SPLITS
        of_row = tl.arange(0, SPLITS * N) // N
        of_x = tl.arange(0, SPLITS * M) // M
        acc = tl.where(of_row[:, None] == of_x[None, :], acc, 0.0)
        return tl.sum(tl.reshape(tl.sum(tl.reshape(acc, [SPLITS * N, SPLITS, M]), 1), [SPLITS, N, M]), 0)


@triton.jit
def gate_up_rows(first, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr):
    """Return the rows of the gate of OUTPUTS outputs, then those of up, repeated for each part of the columns."""
    r = tl.arange(0, SPLITS * 2 * OUTPUTS) % (2 * OUTPUTS)
    if WIDTH % OUTPUTS == 0:
        return first + r + r // OUTPUTS * (WIDTH - OUTPUTS)
    else:
        return tl.minimum(first + r % OUTPUTS, WIDTH - 1) + r // OUTPUTS * WIDTH


@triton.jit
def scale_sums(
    acc,  # [N, M]
    row,  # [N]: rows of the expert's weight
    scale,  # of the expert
    factor,  # of all experts
    bias,  # of all experts
    before,  # rows of earlier experts
    GROUP: tl.constexpr,
    FACTOR: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Multiply sums by the scales of whole rows, and add the bias."""
    if GROUP == 0:
        acc *= tl.load(scale + row).to(tl.float32)[:, None]
    if FACTOR:
        acc *= tl.load(factor + before + row)[:, None]
    if BIAS:
        acc += tl.load(bias + before + row).to(tl.float32)[:, None]
    return acc


def stages_for(arguments: dict[str, Any], outputs: int, rows: int, x: torch.Tensor, most: int) -> int:
    """Return the depth of the pipeline of loads, at most `most`, of programs with `rows` rows of x."""
    inputs = arguments["BYTES"] * (2 if arguments["HALF"] else 1)
    stage_bytes = arguments["SPLITS"] * (arguments["BYTES"] * outputs + inputs * rows * x.element_size())
    return target_of(x.device).stages(stage_bytes, most)


def weight_arguments(w: PackedTensors, most_bytes: int, rows: int, splits: int = 1) -> dict[str, Any]:
    """Return the arguments of a kernel that describe the weight, a stack of matrices.

    Args:
        w: the weight.
        most_bytes: of a row and an iteration.
        rows: of x that a program multiplies.
        splits: parts of the columns.
    """
    four = w.half > 0
    row_bytes = w.inputs // 2 if four else w.inputs
    largest = max(triton.next_power_of_2(row_bytes), 32)
    by_sums = w.group >= _FEWEST_SUMMED and w.offset is None and (rows <= _MOST_SUMMED or w.scale_rows > 1)
    if by_sums:  # an iteration has one scale
        largest = min(largest, (w.group & -w.group) // (2 if four else 1))
    span = max(min(most_bytes, largest), w.half)  # in less, columns would not be in order
    unit = span if by_sums else w.half or 32
    return {
        "codes": w.codes,
        "scale": w.scale,
        "zero": w.codes if w.zero is None else w.zero,
        "offset": w.scale if w.offset is None else w.offset,
        "factor": w.scale if w.factor is None else w.factor,
        "scale_stride": w.scale.shape[-1],
        "scale_size": w.scale[0].numel(),
        "FORMAT": w.format,
        "GROUP": w.group,
        "SCALE_ROWS": w.scale_rows,
        "E8M0": w.scale.dtype == torch.uint8,
        "ZERO": w.zero is not None,
        "OFFSET": w.offset is not None,
        "FACTOR": w.factor is not None,
        "BY_SUMS": by_sums,
        "HALF": w.half,
        "BYTES": span,
        "SPLITS": splits,
        "LENGTH": row_bytes if splits == 1 else triton.cdiv(triton.cdiv(row_bytes, splits), unit) * unit,
    }
