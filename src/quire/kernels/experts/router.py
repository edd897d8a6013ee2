"""The router's product in fp32. For up to 16 tokens one kernel also contains the norm in front and the routing behind.

For few tokens the columns are split over programs. The last program to arrive adds the partial logits, in a fixed order,
and routes all tokens. With a norm, the programs multiply by its weight, and the last one by the scale of the row, which
is known only then; it also writes the normed rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from quire.kernels.experts.choice import ExpertChoice, rows_of_tile
from quire.kernels.experts.route import (
    FEW_TOKENS,
    PARTS_AXIS,
    block_rows,
    count_chosen,
    empty_choice,
    experts_of_tile,
    list_chosen,
    padded,
    route,
    route_rows,
    wide,
)
from quire.kernels.jit import kernel
from quire.kernels.target import Target, target_of

_BLOCK_E = 16  # experts per program
_BLOCK_K = 256  # columns per program


@triton.jit
def _normed_rows(
    source,  # [tokens, HIDDEN]
    norm,  # [HIDDEN]
    scale,  # [ROWS]: of each row
    normed,  # [tokens, HIDDEN]
    tokens,
    HIDDEN: tl.constexpr,
    NORMED: tl.constexpr,  # rows of a tile: there may be fewer tokens than ROWS
    COLUMNS: tl.constexpr,  # of a tile
):
    """Write the normed rows."""
    t = tl.arange(0, NORMED)
    own_scale = tl.gather(scale, t, 0)
    for start in range(0, HIDDEN, COLUMNS):
        c = start + tl.arange(0, COLUMNS)
        real = (t < tokens)[:, None] & (c < HIDDEN)[None, :]
        to = t[:, None] * HIDDEN + c[None, :]
        summed = tl.load(source + to, mask=real, other=0.0, cache_modifier=".cg").to(tl.float32)
        column = tl.load(norm + c, mask=c < HIDDEN, other=0.0).to(tl.float32)
        result = summed * own_scale[:, None] * column[None, :]
        tl.store(normed + to, result.to(normed.dtype.element_ty), mask=real)


@kernel(do_not_specialize=["tokens", "slots", "top_k"])
def _router_few(
    x,  # [tokens, HIDDEN]
    residual,  # [tokens, HIDDEN], if ADD
    norm,  # [HIDDEN], if NORM
    weight,  # [OUTPUTS, HIDDEN]
    bias,  # [E], if BIAS
    correction,  # float32 [E], if CORRECTION
    parts,  # float32 [SPLITS, BLOCK_M, STRIDE]
    squares,  # float32 [SPLITS, BLOCK_M], if NORM
    arrived,  # int32 [1], 0 before and after
    total,  # [tokens, HIDDEN]: x + residual, if ADD
    normed,  # [tokens, HIDDEN], if NORM
    ids,  # int32 [tokens, TOP_K + SHARED]
    weights,  # float32 [tokens, TOP_K + SHARED]
    active,  # int32 [slots + SHARED], unless ONE
    tokens,
    slots,
    eps,
    scale,
    top_k,  # TOP_K, for a loop that is not unrolled
    HIDDEN: tl.constexpr,
    E: tl.constexpr,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
    SHARED_GATE: tl.constexpr,
    K_PAD: tl.constexpr,
    SIGMOID: tl.constexpr,
    CORRECTION: tl.constexpr,
    RENORMALISE: tl.constexpr,
    GROUPS: tl.constexpr,
    G_PAD: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TWO: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    ADD: tl.constexpr,
    ONE: tl.constexpr,  # there is one token, whose experts need no list
    ROWS: tl.constexpr,  # routed rows, at least the number of tokens
    NORMED: tl.constexpr,  # normed rows, at least the number of tokens
    STRIDE: tl.constexpr,  # of rows of partial logits
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COLUMNS: tl.constexpr,  # of the rows that are normed at once
    PDL: tl.constexpr,
) -> None:
    """Grid (tiles of experts, SPLITS)."""
    OUTPUTS: tl.constexpr = E + SHARED_GATE
    tile, split = tl.program_id(0), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    e = tile * BLOCK_E + tl.arange(0, BLOCK_E)
    k = split * BLOCK_K + tl.arange(0, BLOCK_K)
    m = tl.arange(0, BLOCK_M)
    has_expert = e < OUTPUTS
    w = tl.load(
        weight + e[:, None] * HIDDEN + k[None, :], mask=has_expert[:, None] & (k < HIDDEN)[None, :], other=0.0
    )
    if NORM:
        gain = tl.load(norm + k, mask=k < HIDDEN, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    at = m[:, None] * HIDDEN + k[None, :]
    inside = (m < tokens)[:, None] & (k < HIDDEN)[None, :]
    a = tl.load(x + at, mask=inside, other=0.0)
    if NORM:
        value = a.to(tl.float32)
        if ADD:
            value += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
            rounded = value.to(total.dtype.element_ty)
            if tile == 0:
                tl.store(total + at, rounded, mask=inside)
            value = rounded.to(tl.float32)
        if tile == 0:
            tl.store(squares + split * BLOCK_M + m, tl.sum(value * value, 1), mask=m < tokens)
        a = (value * gain[None, :]).to(a.dtype)
    part = tl.dot(w, tl.trans(a), input_precision="ieee")
    to_part = parts + (split * BLOCK_M + m[None, :]) * STRIDE + e[:, None]
    tl.store(to_part, part, mask=has_expert[:, None] & (m < tokens)[None, :])
    tl.debug_barrier()  # complete the program's stores before its arrival is counted
    programs = tl.num_programs(0) * SPLITS
    if tl.atomic_add(arrived, 1, sem="acq_rel") == programs - 1:
        tl.store(arrived, 0)
        r = tl.arange(0, ROWS)
        every = experts_of_tile(PARTS, LANES)
        of_tile = wide(r)
        j = tl.arange(0, K_PAD)
        there = (r < tokens)[:, None] & (j < TOP_K + SHARED)[None, :]
        logits = tl.zeros([PARTS, ROWS, LANES] if PARTS_AXIS == 0 else [ROWS, PARTS, LANES], tl.float32)
        gate = tl.zeros([ROWS, K_PAD], tl.float32)
        for s in tl.static_range(SPLITS):
            place = parts + (s * BLOCK_M + of_tile) * STRIDE + every
            logits += tl.load(place, mask=(of_tile < tokens) & (every < E), other=0.0, cache_modifier=".cg")
            if SHARED_GATE:
                of_gate = parts + (s * BLOCK_M + r[:, None]) * STRIDE + E + 0 * j[None, :]
                gate += tl.load(of_gate, mask=there, other=0.0, cache_modifier=".cg")
        if NORM:
            power = tl.zeros([ROWS], tl.float32)
            for s in tl.static_range(SPLITS):
                power += tl.load(squares + s * BLOCK_M + r, mask=r < tokens, other=0.0, cache_modifier=".cg")
            row_scale = tl.rsqrt(power / HIDDEN + eps)
            logits *= wide(row_scale)
            gate *= row_scale[:, None]
            _normed_rows(
                total if ADD else x, norm, row_scale, normed, tokens, HIDDEN, NORMED, COLUMNS
            )  # fmt: skip
        if BIAS:
            logits += tl.load(bias + every, mask=every < E, other=0.0).to(tl.float32)
        mine, share, chosen = route_rows(
            logits, gate, correction, scale, top_k, E, TOP_K, SHARED, SHARED_GATE, K_PAD, SIGMOID, CORRECTION, RENORMALISE,
            GROUPS, G_PAD, TOP_GROUPS, TWO,
        )  # fmt: skip
        tl.store(ids + r[:, None] * (TOP_K + SHARED) + j[None, :], mine, mask=there)
        tl.store(weights + r[:, None] * (TOP_K + SHARED) + j[None, :], share, mask=there)
        if not ONE:
            list_chosen(count_chosen(chosen & (of_tile < tokens)), active, slots, E, SHARED)


def norm_and_route(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm: torch.Tensor | None,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    correction: torch.Tensor | None,
    rule: dict[str, Any],
    arrived: torch.Tensor,
) -> tuple[ExpertChoice, torch.Tensor, torch.Tensor]:
    """Route at most 16 tokens, after an optional norm.

    Args:
        x: [tokens, hidden], contiguous.
        residual: added to x before the norm, or None.
        norm: weight of the RMS norm [hidden], or None: x is the input of the router.
        eps: of the norm.
        weight: of the router, [experts, hidden], contiguous; behind it the gate of the shared experts, if they have one.
        bias: of the router, [experts], or None.
        correction: float32 [experts], or None.
        rule: from `rule_arguments`.
        arrived: int32 zero; zero again when the kernel has ended.

    Returns:
        The choice; the normed rows [tokens, hidden]; and the sum x + residual. Without a norm both are x.
    """
    (tokens, hidden), outputs = x.shape, weight.shape[0]

    def scratch(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, device=x.device, dtype=dtype)

    splits = triton.cdiv(hidden, _BLOCK_K)
    rows, normed_rows, block_m = block_rows(tokens), triton.next_power_of_2(tokens), rows_of_tile(tokens)
    ids, weights, slots = empty_choice(tokens, rule, x.device)
    active = ids[0] if tokens == 1 else scratch(slots + rule["SHARED"], dtype=torch.int32)
    normed = x if norm is None else torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    pdl = target_of(x.device).has_dependent_launch
    _router_few[(triton.cdiv(outputs, _BLOCK_E), splits)](
        x, total if residual is None else residual, x if norm is None else norm, weight,
        weight if bias is None else bias, weights if correction is None else correction,
        scratch(splits, block_m, padded(outputs)), scratch(splits, block_m), arrived, total, normed, ids, weights, active,
        tokens, slots, eps, HIDDEN=hidden, CORRECTION=correction is not None, BIAS=bias is not None,
        NORM=norm is not None, ADD=residual is not None, ONE=tokens == 1, ROWS=rows, NORMED=normed_rows,
        STRIDE=padded(outputs), SPLITS=splits, BLOCK_M=block_m, BLOCK_E=_BLOCK_E, BLOCK_K=_BLOCK_K,
        COLUMNS=min(triton.next_power_of_2(hidden), (1 << 13) // normed_rows), PDL=pdl,
        num_warps=rows,  # so that no two warps share a routed row
        launch_pdl=pdl, **rule,
    )  # fmt: skip
    return ExpertChoice(ids, weights, active=active), normed, total


@kernel(do_not_specialize=["tokens"])
def _router_logits(
    x,  # [tokens, HIDDEN]
    weight,  # [E, HIDDEN]
    bias,  # [E], if BIAS
    logits,  # float32 [tokens, STRIDE]; columns behind E become 0
    tokens,
    HIDDEN: tl.constexpr,
    E: tl.constexpr,
    STRIDE: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (tiles of tokens, tiles of experts)."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    k = tl.arange(0, BLOCK_K)
    x_at = x + m.to(tl.int64)[:, None] * HIDDEN + k[None, :]
    w_at = weight + e[:, None] * HIDDEN + k[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    for start in range(0, HIDDEN, BLOCK_K):
        there = (start + k < HIDDEN)[None, :]
        a = tl.load(x_at + start, mask=(m < tokens)[:, None] & there, other=0.0)
        w = tl.load(w_at + start, mask=(e < E)[:, None] & there, other=0.0)
        acc = tl.dot(a, tl.trans(w), acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias + e, mask=e < E, other=0.0).to(tl.float32)[None, :]
    to = logits + m.to(tl.int64)[:, None] * STRIDE + e[None, :]
    tl.store(to, acc, mask=(m < tokens)[:, None] & (e < STRIDE)[None, :])


class LogitsTile(NamedTuple):
    """The tile of a program of the router's product: tokens, experts, columns, and warps."""

    rows: int
    outputs: int
    inputs: int
    warps: int


_SMALL, _MEDIUM, _LARGE = LogitsTile(16, 32, 256, 4), LogitsTile(64, 64, 128, 4), LogitsTile(128, 128, 64, 8)


def _logits_tile(tokens: int, experts: int, target: Target) -> LogitsTile:
    """Return the largest tile that occupies the GPU: twice the size reads inputs and weights half as often."""
    if tokens <= 1024:
        return _SMALL
    programs = triton.cdiv(tokens, _LARGE.rows) * triton.cdiv(experts, _LARGE.outputs)
    return _LARGE if programs >= target.sms and target.shared_bytes >= 200_000 else _MEDIUM


def router_logits(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return x @ weight.T + bias in float32: [tokens, experts], with rows of `padded` length.

    Args:
        x: [tokens, hidden], contiguous.
        weight: [experts, hidden], contiguous.
        bias: [experts], or None.
    """
    (tokens, hidden), experts = x.shape, weight.shape[0]
    stride, target = padded(experts), target_of(x.device)
    logits = torch.empty(tokens, stride, device=x.device, dtype=torch.float32)
    tile = _logits_tile(tokens, experts, target)
    block_k = min(tile.inputs, max(triton.next_power_of_2(hidden), 16)) * 2 // x.element_size()
    pdl = target.has_dependent_launch
    if tokens:
        _router_logits[(triton.cdiv(tokens, tile.rows), triton.cdiv(experts, tile.outputs))](
            x, weight, weight if bias is None else bias, logits, tokens, HIDDEN=hidden, E=experts, STRIDE=stride,
            BIAS=bias is not None, BLOCK_M=tile.rows, BLOCK_E=tile.outputs, BLOCK_K=max(block_k, 16), PDL=pdl,
            num_warps=tile.warps, num_stages=3, launch_pdl=pdl,
        )  # fmt: skip
    return logits[:, :experts]


def route_all(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    correction: torch.Tensor | None,
    rule: dict[str, Any],
    arrived: torch.Tensor,
) -> ExpertChoice:
    """Route any number of tokens x [tokens, hidden]; for the arguments see `norm_and_route`."""
    if 0 < x.shape[0] <= FEW_TOKENS:
        return norm_and_route(x, None, None, 0.0, weight, bias, correction, rule, arrived)[0]
    return route(router_logits(x, weight, bias), correction, rule)
