"""Experts with quantised weights for up to 16 tokens: few.py with weights that are converted in registers.

Each chosen expert is read once, packed. Inputs are not rounded, whatever the format says.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.activation import gate_up_product
from quire.kernels.experts.choice import ExpertChoice
from quire.kernels.experts.few import add_when_last, chosen_by
from quire.kernels.experts.packed_sums import (
    gate_up_rows,
    join_splits,
    packed_sums,
    scale_sums,
    stages_for,
    wait_for_previous,
    weight_arguments,
)
from quire.kernels.jit import kernel
from quire.kernels.matmul.packed import PackedTensors
from quire.kernels.target import target_of

FEWEST_OUTPUTS = 16  # of a program of `few_packed_down`
# Outputs, bytes of a row and an iteration, warps, stages, and parts of the columns: up to 8 / tokens.
PackedFewTile = tuple[int, int, int, int, int]


@kernel(do_not_specialize=["tokens"])
def _few_packed_gate_up(
    x,  # [tokens, HIDDEN]
    codes,  # [experts, 2 * WIDTH, HIDDEN or HIDDEN / 2], as are the next three: see packed_sums.py
    scale,
    zero,
    offset,
    factor,  # fp32 [experts, 2 * WIDTH], if FACTOR
    bias,  # [experts, 2 * WIDTH], if BIAS
    ids,  # int32 [tokens, TOP_K]
    active,  # int32 [slots]: the chosen experts, then -1
    h,  # [tokens * TOP_K, WIDTH]
    tokens,
    scale_stride,
    scale_size,  # of an expert
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    K_PAD: tl.constexpr,
    KIND: tl.constexpr,
    BIAS: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    E8M0: tl.constexpr,
    ZERO: tl.constexpr,
    OFFSET: tl.constexpr,
    FACTOR: tl.constexpr,
    BY_SUMS: tl.constexpr,
    HALF: tl.constexpr,
    BYTES: tl.constexpr,
    SPLITS: tl.constexpr,
    LENGTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (slots, tiles of WIDTH)."""
    if PDL:  # the next kernel reads `active` before it waits, so it may start only after this wait
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.load(active + tl.program_id(0), cache_modifier=".cg").to(tl.int64)
    if expert < 0:
        return
    first = tl.program_id(1) * OUTPUTS
    row = gate_up_rows(first, OUTPUTS, WIDTH, SPLITS)
    of_x = tl.arange(0, SPLITS * BLOCK_M) % BLOCK_M
    of_scales = expert * scale_size
    acc = packed_sums(
        x + of_x * HIDDEN, of_x < tokens, x, codes + expert * (2 * WIDTH * (HIDDEN // 2 if HALF > 0 else HIDDEN)),
        scale + of_scales, zero + of_scales, offset + of_scales, row, 0, 0, scale_stride,
        HIDDEN, FORMAT, GROUP, SCALE_ROWS, E8M0, ZERO, OFFSET, BY_SUMS, False, False, False, HALF, BYTES, SPLITS, LENGTH,
        ASM, False,
    )  # fmt: skip
    acc = join_splits(acc, SPLITS)
    row = gate_up_rows(first, OUTPUTS, WIDTH, 1)
    acc = scale_sums(acc, row, scale + of_scales, factor, bias, expert * (2 * WIDTH), GROUP, FACTOR, BIAS)
    m = tl.arange(0, BLOCK_M)
    gate, up = tl.split(tl.permute(tl.reshape(acc, [2, OUTPUTS, BLOCK_M]), (1, 2, 0)))
    value = gate_up_product(gate, up, KIND, h.dtype.element_ty)
    n = first + tl.arange(0, OUTPUTS)
    to_row = chosen_by(ids, expert, m, tokens, TOP_K, K_PAD)
    to = h + to_row[None, :] * WIDTH + n[:, None]
    tl.store(to, value.to(h.dtype.element_ty), mask=(to_row >= 0)[None, :] & (n < WIDTH)[:, None])


@kernel(do_not_specialize=["tokens"])
def _few_packed_down(
    h,  # [tokens * TOP_K, WIDTH]
    codes,  # [experts, HIDDEN, WIDTH or WIDTH / 2], as are the next three: see packed_sums.py
    scale,
    zero,
    offset,
    factor,  # fp32 [experts, HIDDEN], if FACTOR
    bias,  # [experts, HIDDEN], if BIAS
    ids,  # int32 [tokens, TOP_K]
    weights,  # float32 [tokens, TOP_K]
    active,  # int32 [slots]: the chosen experts, then -1
    parts,  # float32 [tokens * TOP_K, HIDDEN]
    arrived,  # int32 [tiles], 0 before and after
    y,  # [tokens, HIDDEN]
    tokens,
    scale_stride,
    scale_size,  # of an expert
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    K_PAD: tl.constexpr,
    BIAS: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    E8M0: tl.constexpr,
    ZERO: tl.constexpr,
    OFFSET: tl.constexpr,
    FACTOR: tl.constexpr,
    BY_SUMS: tl.constexpr,
    HALF: tl.constexpr,
    BYTES: tl.constexpr,
    SPLITS: tl.constexpr,
    LENGTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (slots, tiles of HIDDEN)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    # The routing has ended even before the wait, because the kernel before this one let it start only then.
    expert = tl.load(active + tl.program_id(0), cache_modifier=".cg").to(tl.int64)
    tile = tl.program_id(1)
    n = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    if expert >= 0:
        row = tile * OUTPUTS + tl.arange(0, SPLITS * OUTPUTS) % OUTPUTS
        row = row if HIDDEN % OUTPUTS == 0 else tl.minimum(row, HIDDEN - 1)
        m = tl.arange(0, SPLITS * BLOCK_M) % BLOCK_M
        of_h = chosen_by(ids, expert, m, tokens, TOP_K, K_PAD)
        of_scales = expert * scale_size
        acc = packed_sums(
            h + tl.maximum(of_h, 0) * WIDTH, of_h >= 0, h,
            codes + expert * (HIDDEN * (WIDTH // 2 if HALF > 0 else WIDTH)),
            scale + of_scales, zero + of_scales, offset + of_scales, row, 0, 0, scale_stride,
            WIDTH, FORMAT, GROUP, SCALE_ROWS, E8M0, ZERO, OFFSET, BY_SUMS, False, False, False, HALF, BYTES, SPLITS, LENGTH,
            ASM, PDL,
        )  # fmt: skip
        acc = join_splits(acc, SPLITS)
        row = n if HIDDEN % OUTPUTS == 0 else tl.minimum(n, HIDDEN - 1)
        acc = scale_sums(acc, row, scale + of_scales, factor, bias, expert * HIDDEN, GROUP, FACTOR, BIAS)
        of_h = chosen_by(ids, expert, tl.arange(0, BLOCK_M), tokens, TOP_K, K_PAD)
        to = parts + of_h[None, :] * HIDDEN + n[:, None]
        tl.store(to, acc, mask=(of_h >= 0)[None, :] & (n < HIDDEN)[:, None])
    else:
        wait_for_previous(PDL)
    add_when_last(parts, weights, arrived, y, tokens, tile, n, HIDDEN, TOP_K, BLOCK_M)


def few_packed_gate_up(
    x: torch.Tensor,
    w: PackedTensors,
    bias: torch.Tensor | None,
    choice: ExpertChoice,
    kind: str,
    tile: PackedFewTile | None = None,
) -> torch.Tensor:
    """Return act(gate) * up of each token's experts: [tokens * top_k, width].

    Args:
        x: [tokens, hidden], contiguous, at most 16 tokens.
        w: gate|up of all experts, [experts, 2 * width, hidden].
        bias: [experts, 2 * width], or None.
        choice: the experts of the tokens.
        kind: the activation.
        tile: the sizes of a program, for tuning.
    """
    (tokens, hidden), width, active = x.shape, w.outputs // 2, choice.active
    assert active is not None
    h = torch.empty(choice.ids.numel(), width, device=x.device, dtype=x.dtype)
    outputs, most_bytes, warps, stages, splits = tile or _tile_for(
        w.format, tokens, (32, 128, 4, 4), (16, 128, 4, 3)
    )
    arguments, target = weight_arguments(w, most_bytes, 16, splits), target_of(x.device)
    block_m, pdl = rows_with_splits(tokens, splits), target.has_dependent_launch
    _few_packed_gate_up[(len(active), triton.cdiv(width, outputs))](
        x, bias=w.codes if bias is None else bias, ids=choice.ids, active=active, h=h, tokens=tokens,
        HIDDEN=hidden, WIDTH=width, TOP_K=choice.ids.shape[1], K_PAD=triton.next_power_of_2(choice.ids.shape[1]),
        KIND=kind, BIAS=bias is not None, BLOCK_M=block_m, OUTPUTS=outputs, ASM=target.has_ptx, PDL=pdl,
        num_warps=warps, num_stages=stages_for(arguments, 2 * outputs, block_m, x, stages), launch_pdl=pdl,
        **arguments,
    )  # fmt: skip
    return h


def few_packed_down(
    h: torch.Tensor,
    w: PackedTensors,
    bias: torch.Tensor | None,
    choice: ExpertChoice,
    arrived: torch.Tensor,
    tile: PackedFewTile | None = None,
) -> torch.Tensor:
    """Return the weighted sum of the outputs of each token's experts: [tokens, hidden].

    Args:
        h: [tokens * top_k, width], from `few_packed_gate_up`, which must be the kernel before this one.
        w: [experts, hidden, width].
        bias: [experts, hidden], or None.
        choice: the experts of the tokens, and their weights.
        arrived: int32 zeros, one for every `FEWEST_OUTPUTS` outputs; zero again when the kernel has ended.
        tile: the sizes of a program, for tuning.
    """
    (tokens, top_k), active = choice.ids.shape, choice.active
    assert active is not None
    hidden, width = w.outputs, w.inputs
    y = torch.empty(tokens, hidden, device=h.device, dtype=h.dtype)
    parts = torch.empty(tokens * top_k, hidden, device=h.device, dtype=torch.float32)
    outputs, most_bytes, warps, stages, splits = tile or _tile_for(
        w.format, tokens, (64, 128, 4, 4), (16, 128, 4, 3) if w.half else (16, 64, 4, 5)
    )
    arguments, target = weight_arguments(w, most_bytes, 16, splits), target_of(h.device)
    block_m, pdl = rows_with_splits(tokens, splits), target.has_dependent_launch
    _few_packed_down[(len(active), triton.cdiv(hidden, outputs))](
        h, bias=w.codes if bias is None else bias, ids=choice.ids, weights=choice.weights, active=active,
        parts=parts, arrived=arrived, y=y, tokens=tokens, HIDDEN=hidden, WIDTH=width, TOP_K=top_k,
        K_PAD=triton.next_power_of_2(top_k), BIAS=bias is not None, BLOCK_M=block_m, OUTPUTS=outputs,
        ASM=target.has_ptx, PDL=pdl, num_warps=warps,
        num_stages=stages_for(arguments, outputs, block_m, h, stages), launch_pdl=pdl, **arguments,
    )  # fmt: skip
    return y


def _tile_for(
    format: str, tokens: int, alone: tuple[int, int, int, int], split: tuple[int, int, int, int]
) -> PackedFewTile:
    """Return the sizes of a program: `alone` are those without splits, `split` those with some.

    The matrix units multiply 8 rows of x at least. With fewer tokens, the rest holds other parts of the columns, so
    that more programs and warps share the work of converting a weight. Tiles were chosen on an H200
    (benchmarks/quantised_experts.py).
    """
    most = 8 if format == "int4" else 4
    splits = max(min(most, 8 // triton.next_power_of_2(tokens)), 1)
    if splits == 1:
        return (*alone, 1)
    return (16, 64, 4, 4, splits) if format == "int4" else (*split, splits)


def rows_with_splits(tokens: int, splits: int) -> int:
    """Return the rows of x that a program has for each part of the columns."""
    return max(triton.next_power_of_2(tokens), 8 // splits)
