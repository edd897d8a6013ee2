"""Experts with quantised weights for more than a few tokens: many.py with packed weights.

Weights are converted in registers and multiplied with inputs of 16 bits. Those in FP8 may be multiplied with e4m3 inputs
instead, which have a scale per row and 128 columns, or per row if the weight has: the first product then needs no
scales between its steps. The first kernel rounds what it hands to the second one, per 128 columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.activation import gate_up_product
from quire.kernels.experts.group import GroupedRows
from quire.kernels.experts.many import GroupedTile, grid_of, place_of
from quire.kernels.experts.packed_sums import (
    gate_up_rows,
    packed_sums,
    scale_sums,
    stages_for,
    weight_arguments,
)
from quire.kernels.jit import kernel
from quire.kernels.matmul.packed import PackedTensors
from quire.kernels.matmul.round_fp8 import GROUP as X_GROUP
from quire.kernels.target import target_of

_LARGEST = tl.constexpr(448.0)  # e4m3 number
_TINY = tl.constexpr(1e-12)  # scale of zeros


@kernel
def _many_packed_gate_up(
    x,  # [tokens, HIDDEN]; e4m3 as bytes with ROUNDED
    x_scales,  # fp32 [tokens, HIDDEN / 128], if ROUNDED; with X_ROWS [tokens, 1]
    codes,  # [experts, 2 * WIDTH, HIDDEN or HIDDEN / 2], as are the next three: see packed_sums.py
    scale,
    zero,
    offset,
    factor,  # fp32 [experts, 2 * WIDTH], if FACTOR
    bias,  # [experts, 2 * WIDTH], if BIAS
    source,  # int32 [rows]: the token of a row
    ends,  # int32 [experts]
    tile_expert,  # int32 [most tiles]
    tile_first,  # int32 [most tiles]
    h,  # [rows, WIDTH]; e4m3 with ROUNDED
    h_scales,  # fp32 [rows, WIDTH / 128], if ROUNDED
    scale_stride,
    scale_size,  # of an expert
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
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
    ROUNDED: tl.constexpr,
    X_ROWS: tl.constexpr,
    HALF: tl.constexpr,
    BYTES: tl.constexpr,
    SPLITS: tl.constexpr,
    LENGTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BY_ROWS: tl.constexpr,
    DTYPE: tl.constexpr,  # of activations
    ASM: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (tiles of rows, tiles of WIDTH), or the other way round."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tile, part = place_of(BY_ROWS)
    expert = tl.load(tile_expert + tile).to(tl.int64)
    if expert < 0:
        return
    at = tl.load(tile_first + tile) + tl.arange(0, BLOCK_M)
    inside = at < tl.load(ends + expert)
    token = tl.load(source + at, mask=inside, other=0).to(tl.int64)
    row = gate_up_rows(part * OUTPUTS, OUTPUTS, WIDTH, 1)
    of_scales = expert * scale_size
    BLOCKS: tl.constexpr = ROUNDED and SCALE_ROWS == OUTPUTS and WIDTH % OUTPUTS == 0 and GROUP == BYTES
    # A row behind the end computes another token's row, which is not stored.
    acc = packed_sums(
        x + token * HIDDEN, token >= 0, x_scales + token * (1 if X_ROWS else (HIDDEN + 127) // 128),
        codes + expert * (2 * WIDTH * (HIDDEN // 2 if HALF > 0 else HIDDEN)),
        scale + of_scales, zero + of_scales, offset + of_scales, row, part, part + WIDTH // OUTPUTS, scale_stride,
        HIDDEN, FORMAT, GROUP, SCALE_ROWS, E8M0, ZERO, OFFSET, BY_SUMS, ROUNDED, X_ROWS, BLOCKS, HALF, BYTES, SPLITS,
        LENGTH, ASM, False,
    )  # fmt: skip
    acc = scale_sums(acc, row, scale + of_scales, factor, bias, expert * (2 * WIDTH), GROUP, FACTOR, BIAS)
    gate, up = tl.split(tl.permute(tl.reshape(acc, [2, OUTPUTS, BLOCK_M]), (2, 1, 0)))
    value = gate_up_product(gate, up, KIND, DTYPE)
    n = part * OUTPUTS + tl.arange(0, OUTPUTS)
    if ROUNDED:
        tl.static_assert(OUTPUTS == 128)
        value = tl.where((n < WIDTH)[None, :], value.to(DTYPE).to(tl.float32), 0.0)
        of_row = tl.maximum(tl.max(tl.abs(value), 1) / _LARGEST, _TINY) + tl.sum(value * 0.0, 1)
        tl.store(h_scales + at * ((WIDTH + 127) // 128) + part, of_row, mask=inside)
        value = tl.minimum(tl.maximum(value / of_row[:, None], -_LARGEST), _LARGEST)
    to = h + at.to(tl.int64)[:, None] * WIDTH + n[None, :]
    tl.store(to, value.to(h.dtype.element_ty), mask=inside[:, None] & (n < WIDTH)[None, :])


@kernel
def _many_packed_down(
    h,  # [rows, WIDTH]; e4m3 as bytes with ROUNDED
    h_scales,  # fp32 [rows, WIDTH / 128], if ROUNDED
    codes,  # [experts, HIDDEN, WIDTH or WIDTH / 2], as are the next three: see packed_sums.py
    scale,
    zero,
    offset,
    factor,  # fp32 [experts, HIDDEN], if FACTOR
    bias,  # [experts, HIDDEN], if BIAS
    ends,  # int32 [experts]
    tile_expert,  # int32 [most tiles]
    tile_first,  # int32 [most tiles]
    out,  # [rows, HIDDEN]
    scale_stride,
    scale_size,  # of an expert
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    E8M0: tl.constexpr,
    ZERO: tl.constexpr,
    OFFSET: tl.constexpr,
    FACTOR: tl.constexpr,
    BY_SUMS: tl.constexpr,
    ROUNDED: tl.constexpr,
    HALF: tl.constexpr,
    BYTES: tl.constexpr,
    SPLITS: tl.constexpr,
    LENGTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BY_ROWS: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (tiles of rows, tiles of HIDDEN), or the other way round."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tile, part = place_of(BY_ROWS)
    expert = tl.load(tile_expert + tile).to(tl.int64)
    if expert < 0:
        return
    at = tl.load(tile_first + tile) + tl.arange(0, BLOCK_M)
    end = tl.load(ends + expert)
    inside = at < end
    from_row = tl.minimum(at, end - 1).to(tl.int64)
    n = part * OUTPUTS + tl.arange(0, OUTPUTS)
    row = n if HIDDEN % OUTPUTS == 0 else tl.minimum(n, HIDDEN - 1)
    of_scales = expert * scale_size
    BLOCKS: tl.constexpr = (
        ROUNDED
        and OUTPUTS <= 2 * SCALE_ROWS
        and OUTPUTS % SCALE_ROWS == 0
        and HIDDEN % OUTPUTS == 0
        and GROUP == BYTES
    )
    block = part * (OUTPUTS // SCALE_ROWS)
    acc = packed_sums(
        h + from_row * WIDTH, from_row >= 0, h_scales + from_row * ((WIDTH + 127) // 128),
        codes + expert * (HIDDEN * (WIDTH // 2 if HALF > 0 else WIDTH)),
        scale + of_scales, zero + of_scales, offset + of_scales, row, block, block + OUTPUTS // SCALE_ROWS - 1, scale_stride,
        WIDTH, FORMAT, GROUP, SCALE_ROWS, E8M0, ZERO, OFFSET, BY_SUMS, ROUNDED, False, BLOCKS, HALF, BYTES, SPLITS,
        LENGTH, ASM, False,
    )  # fmt: skip
    acc = scale_sums(acc, row, scale + of_scales, factor, bias, expert * HIDDEN, GROUP, FACTOR, BIAS)
    to = out + at.to(tl.int64)[:, None] * HIDDEN + n[None, :]
    tl.store(to, tl.trans(acc).to(out.dtype.element_ty), mask=inside[:, None] & (n < HIDDEN)[None, :])


def many_packed_gate_up(
    x: torch.Tensor,
    x_scales: torch.Tensor | None,
    w: PackedTensors,
    bias: torch.Tensor | None,
    grouped: GroupedRows,
    kind: str,
    tile: GroupedTile,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return act(gate) * up of each row, in the order of experts: [rows, width], and its scales if x has some.

    Args:
        x: [tokens, hidden], contiguous; e4m3 with scales.
        x_scales: fp32 [tokens, hidden / 128 rounded up], or [tokens, 1] for a weight with one scale per row; or None.
        w: gate|up of all experts, [experts, 2 * width, hidden].
        bias: [experts, 2 * width], or None.
        grouped: the rows, in tiles of `tile.rows`.
        kind: the activation.
        tile: the tile of a program; with scales, of 128 outputs.
        dtype: of activations.
    """
    hidden, width, rows, rounded = x.shape[1], w.outputs // 2, len(grouped.source), x_scales is not None
    h = torch.empty(rows, width, device=x.device, dtype=torch.float8_e4m3fn if rounded else dtype)
    h_scales = None
    if rounded:
        h_scales = torch.empty(rows, triton.cdiv(width, X_GROUP), device=x.device, dtype=torch.float32)
    _many_packed_gate_up[grid_of(grouped, width, tile)](
        x.view(torch.uint8) if rounded else x, x if x_scales is None else x_scales,
        bias=w.codes if bias is None else bias, source=grouped.source, ends=grouped.ends,
        tile_expert=grouped.tile_expert, tile_first=grouped.tile_first, h=h,
        h_scales=h if h_scales is None else h_scales, HIDDEN=hidden, WIDTH=width, KIND=kind,
        BIAS=bias is not None, ROUNDED=rounded, X_ROWS=x_scales is not None and x_scales.shape[1] == 1 < hidden // X_GROUP,
        DTYPE=_TRITON_TYPES[dtype],
        **_arguments(w, x, tile, 2 * tile.outputs),
    )  # fmt: skip
    return h, h_scales


def many_packed_down(
    h: torch.Tensor,
    h_scales: torch.Tensor | None,
    w: PackedTensors,
    bias: torch.Tensor | None,
    grouped: GroupedRows,
    tile: GroupedTile,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return each row's product with its expert's weight: [rows, hidden].

    Args:
        h, h_scales: from `many_packed_gate_up`.
        w: [experts, hidden, width].
        bias: [experts, hidden], or None.
        grouped: the rows, in tiles of `tile.rows`.
        tile: the tile of a program.
        dtype: of the result.
    """
    hidden, width, rounded = w.outputs, w.inputs, h_scales is not None
    out = torch.empty(h.shape[0], hidden, device=h.device, dtype=dtype)
    _many_packed_down[grid_of(grouped, hidden, tile)](
        h.view(torch.uint8) if rounded else h, h if h_scales is None else h_scales,
        bias=w.codes if bias is None else bias, ends=grouped.ends, tile_expert=grouped.tile_expert,
        tile_first=grouped.tile_first, out=out, HIDDEN=hidden, WIDTH=width, BIAS=bias is not None,
        ROUNDED=rounded, **_arguments(w, h, tile, tile.outputs),
    )  # fmt: skip
    return out


_TRITON_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def _arguments(w: PackedTensors, x: torch.Tensor, tile: GroupedTile, outputs: int) -> dict[str, object]:
    target, of_weight = target_of(x.device), weight_arguments(w, tile.inputs, tile.rows)
    return {
        **of_weight,
        "BLOCK_M": tile.rows,
        "OUTPUTS": tile.outputs,
        "BY_ROWS": tile.by_rows,
        "ASM": target.has_ptx,
        "PDL": target.has_dependent_launch,
        "num_warps": tile.warps,
        "num_stages": stages_for(of_weight, outputs, tile.rows, x, tile.stages),
        "launch_pdl": target.has_dependent_launch,
    }


def packed_tiles_for(mean: float, rounded: bool) -> tuple[GroupedTile, GroupedTile]:
    """Return the tiles of the two products for `mean` rows per expert; they have the same number of rows.

    They were chosen on an H200 (benchmarks/quantised_experts.py).

    Args:
        mean: rows per expert.
        rounded: whether inputs are e4m3.
    """
    if rounded:
        rows, by_rows = 16 if mean <= 8 else 32 if mean <= 24 else 64, mean > 100
        return GroupedTile(rows, 128, 128, 8, 4, by_rows), GroupedTile(rows, 128, 128, 4, 4, by_rows)
    if mean <= 24:
        small = GroupedTile(16 if mean <= 8 else 32, 64, 64, 4, 4, False)
        return small, small
    return GroupedTile(64, 64, 64, 4, 3, False), GroupedTile(64, 128, 64, 8, 3, False)
