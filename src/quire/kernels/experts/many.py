"""Experts for more than a few tokens: grouped products over rows sorted by expert (group.py).

The first kernel reads the rows of tokens where they are, so no token is moved, and applies the activation. The second
one multiplies by the down projection. The third adds the results of a token's experts, weighted, in the order of the
token's choice. A program finds the expert and the rows of its tile in a list; surplus programs end at once. Sums are
fp32 and always in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from quire.kernels.activation import gate_up_product
from quire.kernels.experts.group import GroupedRows
from quire.kernels.jit import kernel
from quire.kernels.target import Target, target_of


@dataclass(frozen=True, slots=True)
class GroupedTile:
    """The tile of a program.

    Attributes:
        rows, outputs, inputs: its sizes.
        warps, stages: its warps, and the depth of its pipeline of loads.
        by_rows: whether neighbouring programs have the same rows and different outputs. That reads rows once; the
            other order reads each weight once.
    """

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int
    by_rows: bool


@triton.jit
def place_of(BY_ROWS: tl.constexpr):
    """Return the tile of rows and the tile of outputs of this program."""
    if BY_ROWS:
        return tl.program_id(1), tl.program_id(0)
    else:
        return tl.program_id(0), tl.program_id(1)


@kernel
def _many_gate_up(
    x,  # [tokens, HIDDEN]
    weight,  # [experts, 2 * WIDTH, HIDDEN]
    bias,  # [experts, 2 * WIDTH], if BIAS
    source,  # int32 [rows]: the token of a row
    ends,  # int32 [experts]
    tile_expert,  # int32 [most tiles]
    tile_first,  # int32 [most tiles]
    h,  # [rows, WIDTH]
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BY_ROWS: tl.constexpr,
    SWAP: tl.constexpr,  # compute the transposed product, for few rows
    PDL: tl.constexpr,
) -> None:
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tile, part = place_of(BY_ROWS)
    expert = tl.load(tile_expert + tile)
    if expert < 0:
        return
    row = tl.load(tile_first + tile) + tl.arange(0, BLOCK_M)
    inside = row < tl.load(ends + expert)
    token = tl.load(source + row, mask=inside, other=0)
    n = part * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_at = x + token.to(tl.int64)[:, None] * HIDDEN + k[None, :]
    # Gate and up of one output are neighbours, so that one product computes both.
    r = tl.arange(0, 2 * BLOCK_N)
    of_weight = tl.minimum(part * BLOCK_N + r // 2, WIDTH - 1) + r % 2 * WIDTH
    w_at = weight + (expert.to(tl.int64) * (2 * WIDTH) + of_weight)[:, None] * HIDDEN + k[None, :]
    acc = tl.zeros([2 * BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, 2 * BLOCK_N], tl.float32)
    for start in range(0, HIDDEN, BLOCK_K):
        if HIDDEN % BLOCK_K == 0:  # a row behind the end computes another token's row, which is not stored
            a = tl.load(x_at + start)
            w = tl.load(w_at + start)
        else:
            there = (start + k < HIDDEN)[None, :]
            a = tl.load(x_at + start, mask=there, other=0.0)
            w = tl.load(w_at + start, mask=there, other=0.0)
        if SWAP:
            acc = tl.dot(w, tl.trans(a), acc, input_precision="ieee")
        else:
            acc = tl.dot(a, tl.trans(w), acc, input_precision="ieee")
    if SWAP:
        acc = tl.trans(acc)
    gate, up = tl.split(tl.reshape(acc, [BLOCK_M, BLOCK_N, 2]))
    if BIAS:
        b_at = bias + expert * (2 * WIDTH) + n
        gate += tl.load(b_at, mask=n < WIDTH, other=0.0).to(tl.float32)[None, :]
        up += tl.load(b_at + WIDTH, mask=n < WIDTH, other=0.0).to(tl.float32)[None, :]
    value = gate_up_product(gate, up, KIND, h.dtype.element_ty).to(h.dtype.element_ty)
    to = h + row.to(tl.int64)[:, None] * WIDTH + n[None, :]
    tl.store(to, value, mask=inside[:, None] & (n < WIDTH)[None, :])


@kernel
def _many_down(
    h,  # [rows, WIDTH]
    weight,  # [experts, HIDDEN, WIDTH]
    bias,  # [experts, HIDDEN], if BIAS
    ends,  # int32 [experts]
    tile_expert,  # int32 [most tiles]
    tile_first,  # int32 [most tiles]
    out,  # [rows, HIDDEN]
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BY_ROWS: tl.constexpr,
    SWAP: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tile, part = place_of(BY_ROWS)
    expert = tl.load(tile_expert + tile)
    if expert < 0:
        return
    row = tl.load(tile_first + tile) + tl.arange(0, BLOCK_M)
    end = tl.load(ends + expert)
    inside = row < end
    n = part * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    h_at = h + tl.minimum(row, end - 1).to(tl.int64)[:, None] * WIDTH + k[None, :]
    w_at = weight + (expert.to(tl.int64) * HIDDEN + tl.minimum(n, HIDDEN - 1))[:, None] * WIDTH + k[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, WIDTH, BLOCK_K):
        if WIDTH % BLOCK_K == 0:
            a = tl.load(h_at + start)
            w = tl.load(w_at + start)
        else:
            there = (start + k < WIDTH)[None, :]
            a = tl.load(h_at + start, mask=there, other=0.0)
            w = tl.load(w_at + start, mask=there, other=0.0)
        if SWAP:
            acc = tl.dot(w, tl.trans(a), acc, input_precision="ieee")
        else:
            acc = tl.dot(a, tl.trans(w), acc, input_precision="ieee")
    if SWAP:
        acc = tl.trans(acc)
    if BIAS:
        acc += tl.load(bias + expert * HIDDEN + n, mask=n < HIDDEN, other=0.0).to(tl.float32)[None, :]
    to = out + row.to(tl.int64)[:, None] * HIDDEN + n[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=inside[:, None] & (n < HIDDEN)[None, :])


@kernel
def _weighted_sum(
    rows,  # [tokens * TOP_K, HIDDEN], in the order of experts
    place,  # int32 [tokens, TOP_K]
    weights,  # float32 [tokens, TOP_K]
    y,  # [tokens, HIDDEN]
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (tokens, tiles of HIDDEN)."""
    token = tl.program_id(0)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):
        row = tl.load(place + token * TOP_K + j).to(tl.int64)
        value = tl.load(rows + row * HIDDEN + n, mask=n < HIDDEN, other=0.0)
        total += tl.load(weights + token * TOP_K + j) * value.to(tl.float32)
    tl.store(y + token.to(tl.int64) * HIDDEN + n, total.to(y.dtype.element_ty), mask=n < HIDDEN)


def many_gate_up(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    grouped: GroupedRows,
    kind: str,
    tile: GroupedTile,
) -> torch.Tensor:
    """Return act(gate) * up of each row, in the order of experts: [rows, width].

    Args:
        x: [tokens, hidden], contiguous.
        weight: [experts, 2 * width, hidden], contiguous.
        bias: [experts, 2 * width], or None.
        grouped: the rows, in tiles of `tile.rows`.
        kind: the activation.
        tile: the tile of a program.
    """
    hidden, width = x.shape[1], weight.shape[1] // 2
    h = torch.empty(len(grouped.source), width, device=x.device, dtype=x.dtype)
    pdl = target_of(x.device).has_dependent_launch
    _many_gate_up[grid_of(grouped, width, tile)](
        x, weight, weight if bias is None else bias, grouped.source, grouped.ends, grouped.tile_expert,
        grouped.tile_first, h, HIDDEN=hidden, WIDTH=width, KIND=kind, BIAS=bias is not None,
        PDL=pdl, launch_pdl=pdl, **_arguments(tile, hidden),
    )  # fmt: skip
    return h


def many_down(
    h: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, grouped: GroupedRows, tile: GroupedTile
) -> torch.Tensor:
    """Return each row's product with its expert's weight: [rows, hidden].

    Args:
        h: [rows, width], in the order of experts.
        weight: [experts, hidden, width], contiguous.
        bias: [experts, hidden], or None.
        grouped: the rows, in tiles of `tile.rows`.
        tile: the tile of a program.
    """
    hidden, width = weight.shape[1:]
    out = torch.empty(h.shape[0], hidden, device=h.device, dtype=h.dtype)
    pdl = target_of(h.device).has_dependent_launch
    _many_down[grid_of(grouped, hidden, tile)](
        h, weight, weight if bias is None else bias, grouped.ends, grouped.tile_expert, grouped.tile_first, out,
        HIDDEN=hidden, WIDTH=width, BIAS=bias is not None, PDL=pdl, launch_pdl=pdl, **_arguments(tile, width),
    )  # fmt: skip
    return out


def weighted_sum(rows: torch.Tensor, place: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum of each token's rows: [tokens, hidden].

    Args:
        rows: [tokens * top_k, hidden], contiguous.
        place: the rows of each token, int32 [tokens, top_k].
        weights: float32 [tokens, top_k].
    """
    (tokens, top_k), hidden = place.shape, rows.shape[1]
    y = torch.empty(tokens, hidden, device=rows.device, dtype=rows.dtype)
    block = min(1024, triton.next_power_of_2(hidden))
    pdl = target_of(rows.device).has_dependent_launch
    _weighted_sum[(tokens, triton.cdiv(hidden, block))](
        rows, place, weights, y, HIDDEN=hidden, TOP_K=top_k, BLOCK=block, PDL=pdl, num_warps=4, launch_pdl=pdl
    )
    return y


def grid_of(grouped: GroupedRows, outputs: int, tile: GroupedTile) -> tuple[int, int]:
    """Return the grid of programs with these tiles."""
    assert grouped.tile == tile.rows
    sizes = len(grouped.tile_expert), triton.cdiv(outputs, tile.outputs)
    return sizes[::-1] if tile.by_rows else sizes


def _arguments(tile: GroupedTile, inputs: int) -> dict[str, int | bool]:
    return {
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.outputs,
        "BLOCK_K": min(tile.inputs, max(triton.next_power_of_2(inputs), 16)),
        "BY_ROWS": tile.by_rows,
        "SWAP": tile.rows < 64,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def tiles_for(mean: float, target: Target) -> tuple[GroupedTile, GroupedTile]:
    """Return the tiles of the two products for `mean` rows per expert; they have the same number of rows.

    They were tuned on an H200 (benchmarks/experts.py).
    """
    if mean <= 8:
        pair = GroupedTile(16, 64, 128, 4, 4, False), GroupedTile(16, 64, 128, 4, 4, False)
    elif mean <= 24:
        pair = GroupedTile(32, 64, 128, 4, 4, True), GroupedTile(32, 128, 64, 4, 5, True)
    elif mean <= 96:
        pair = GroupedTile(64, 128, 64, 8, 4, False), GroupedTile(64, 128, 64, 4, 4, True)
    else:
        pair = GroupedTile(128, 128, 64, 8, 3, False), GroupedTile(128, 256, 64, 8, 4, True)
    first, second = (
        replace(tile, stages=target.stages(2 * tile.inputs * (tile.rows + gates * tile.outputs), tile.stages))
        for tile, gates in zip(pair, (2, 1))
    )
    return first, second
