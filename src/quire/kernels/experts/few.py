"""Experts for up to 16 tokens: two kernels, bound by the bandwidth of reading the chosen experts.

A program multiplies some rows of one chosen expert's weight with all tokens at once, on the matrix units, and keeps the
results of the tokens that chose this expert. So no token is moved, and each chosen expert is read once.

The first kernel computes gate and up, and applies the activation. The second one multiplies by the down projection. The
last of its programs to arrive adds the results of a token's experts, weighted, in the order of the token's choice. So
the result does not depend on the order in which programs run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.activation import gate_up_product
from quire.kernels.experts.choice import ExpertChoice, rows_of_tile
from quire.kernels.experts.packed_sums import wait_for_previous
from quire.kernels.jit import kernel
from quire.kernels.target import target_of

# Tiles were tuned on an H200 (benchmarks/experts.py).
BLOCK_DOWN = 64  # outputs of a program of `few_down`
_EARLY_TOKENS = 4  # with more, loading weights before the wait is slower


@triton.jit
def chosen_by(ids, expert, m, tokens, TOP_K: tl.constexpr, K_PAD: tl.constexpr):
    """Return for each token m its row, token * TOP_K + place of the expert in its choice; -1 without it."""
    k = tl.arange(0, K_PAD)[None, :]
    row = m[:, None] * TOP_K + k
    mine = tl.load(ids + row, mask=(m < tokens)[:, None] & (k < TOP_K), other=-1, cache_modifier=".cg")
    return tl.sum(tl.where(mine == expert, row + 1, 0), 1) - 1


@triton.jit
def add_when_last(
    parts,  # float32 [tokens * TOP_K, HIDDEN]
    weights,  # float32 [tokens, TOP_K]
    arrived,  # int32 [tiles], 0 before and after
    y,  # [tokens, HIDDEN]
    tokens,
    tile,
    n,  # [BLOCK_N]: the outputs of the tile
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Add the weighted results of each token's experts, if this program is the last of its tile to arrive."""
    tl.debug_barrier()  # complete the program's stores before its arrival is counted
    if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(arrived + tile, 0)
        m = tl.arange(0, BLOCK_M)
        here = (m < tokens)[:, None] & (n < HIDDEN)[None, :]
        total = tl.zeros([BLOCK_M, n.shape[0]], tl.float32)
        for j in tl.static_range(TOP_K):
            share = tl.load(weights + m * TOP_K + j, mask=m < tokens, other=0.0, cache_modifier=".cg")
            at = parts + (m * TOP_K + j)[:, None] * HIDDEN + n[None, :]
            total += share[:, None] * tl.load(at, mask=here, other=0.0, cache_modifier=".cg")
        tl.store(y + m[:, None] * HIDDEN + n[None, :], total.to(y.dtype.element_ty), mask=here)


@kernel(do_not_specialize=["tokens"])
def _few_gate_up(
    x,  # [tokens, HIDDEN]
    weight,  # [experts, 2 * WIDTH, HIDDEN]
    bias,  # [experts, 2 * WIDTH], if BIAS
    ids,  # int32 [tokens, TOP_K]
    active,  # int32 [slots]: the chosen experts, then -1
    h,  # [tokens * TOP_K, WIDTH]
    tokens,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    K_PAD: tl.constexpr,
    KIND: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (slots, tiles of WIDTH)."""
    if PDL:  # the next kernel reads `active` before it waits, so it may start only after this wait
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.load(active + tl.program_id(0), cache_modifier=".cg")
    if expert < 0:
        return
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    gate_at = (
        weight + (expert.to(tl.int64) * (2 * WIDTH) + tl.minimum(n, WIDTH - 1))[:, None] * HIDDEN + k[None, :]
    )
    up_at = gate_at + WIDTH * HIDDEN
    x_at = x + m[:, None] * HIDDEN + k[None, :]
    real = (m < tokens)[:, None]
    gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(0, HIDDEN, BLOCK_K):
        if HIDDEN % BLOCK_K == 0:
            w_gate = tl.load(gate_at + start, eviction_policy="evict_first")
            w_up = tl.load(up_at + start, eviction_policy="evict_first")
            a = tl.load(x_at + start, mask=real, other=0.0)
        else:
            there = (start + k < HIDDEN)[None, :]
            w_gate = tl.load(gate_at + start, mask=there, other=0.0, eviction_policy="evict_first")
            w_up = tl.load(up_at + start, mask=there, other=0.0, eviction_policy="evict_first")
            a = tl.load(x_at + start, mask=real & there, other=0.0)
        gate = tl.dot(w_gate, tl.trans(a), gate, input_precision="ieee")
        up = tl.dot(w_up, tl.trans(a), up, input_precision="ieee")
    if BIAS:
        b_at = bias + expert * (2 * WIDTH) + n
        gate += tl.load(b_at, mask=n < WIDTH, other=0.0).to(tl.float32)[:, None]
        up += tl.load(b_at + WIDTH, mask=n < WIDTH, other=0.0).to(tl.float32)[:, None]
    value = gate_up_product(gate, up, KIND, h.dtype.element_ty)
    row = chosen_by(ids, expert, m, tokens, TOP_K, K_PAD)
    to = h + row[None, :] * WIDTH + n[:, None]
    tl.store(to, value.to(h.dtype.element_ty), mask=(row >= 0)[None, :] & (n < WIDTH)[:, None])


@kernel(do_not_specialize=["tokens"])
def _few_down(
    h,  # [tokens * TOP_K, WIDTH]
    weight,  # [experts, HIDDEN, WIDTH]
    bias,  # [experts, HIDDEN], if BIAS
    ids,  # int32 [tokens, TOP_K]
    weights,  # float32 [tokens, TOP_K]
    active,  # int32 [slots]: the chosen experts, then -1
    parts,  # float32 [tokens * TOP_K, HIDDEN]
    arrived,  # int32 [tiles], 0 before and after
    y,  # [tokens, HIDDEN]
    tokens,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    K_PAD: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,  # weights are loaded before the wait
    PDL: tl.constexpr,
) -> None:
    """Grid (slots, tiles of HIDDEN)."""
    if PDL:
        if not EARLY:
            tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # The routing has ended even before the wait, because the kernel before this one let it start only then.
    expert = tl.load(active + tl.program_id(0), cache_modifier=".cg")
    tile = tl.program_id(1)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    if expert >= 0:
        k = tl.arange(0, BLOCK_K)
        w_at = (
            weight + (expert.to(tl.int64) * HIDDEN + tl.minimum(n, HIDDEN - 1))[:, None] * WIDTH + k[None, :]
        )
        row = chosen_by(ids, expert, m, tokens, TOP_K, K_PAD)
        real = (row >= 0)[:, None]
        h_at = h + tl.maximum(row, 0)[:, None] * WIDTH + k[None, :]
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        if EARLY:
            zero = 0
            a = tl.zeros([BLOCK_M, BLOCK_K], h.dtype.element_ty)
            for start in range(0, WIDTH, BLOCK_K):
                if WIDTH % BLOCK_K == 0:
                    w = tl.load(w_at + start, eviction_policy="evict_first")
                else:
                    w = tl.load(
                        w_at + start,
                        mask=(start + k < WIDTH)[None, :],
                        other=0.0,
                        eviction_policy="evict_first",
                    )
                if start == 0:  # after the first loads of the weight have been issued
                    zero = wait_for_previous(PDL)
                    a = tl.load(h_at + 16 * zero, mask=real & (k < WIDTH)[None, :], other=0.0)
                later = start + BLOCK_K
                next_a = tl.load(
                    h_at + (later + 16 * zero), mask=real & (later + k < WIDTH)[None, :], other=0.0
                )
                acc = tl.dot(w, tl.trans(a), acc, input_precision="ieee")
                a = next_a
        else:
            for start in range(0, WIDTH, BLOCK_K):
                there = (start + k < WIDTH)[None, :]
                if WIDTH % BLOCK_K == 0:
                    w = tl.load(w_at + start, eviction_policy="evict_first")
                else:
                    w = tl.load(w_at + start, mask=there, other=0.0, eviction_policy="evict_first")
                a = tl.load(h_at + start, mask=real & there, other=0.0)
                acc = tl.dot(w, tl.trans(a), acc, input_precision="ieee")
        if BIAS:
            b = tl.load(bias + expert * HIDDEN + n, mask=n < HIDDEN, other=0.0)
            acc += b.to(tl.float32)[:, None]
        to = parts + row[None, :] * HIDDEN + n[:, None]
        tl.store(to, acc, mask=(row >= 0)[None, :] & (n < HIDDEN)[:, None])
    else:
        if EARLY:
            wait_for_previous(PDL)
    add_when_last(parts, weights, arrived, y, tokens, tile, n, HIDDEN, TOP_K, BLOCK_M)


def few_gate_up(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    choice: ExpertChoice,
    kind: str,
    tile: tuple[int, int, int, int] | None = None,
) -> torch.Tensor:
    """Return act(gate) * up of each token's experts: [tokens * top_k, width].

    Args:
        x: [tokens, hidden], contiguous, at most 16 tokens.
        weight: [experts, 2 * width, hidden], contiguous.
        bias: [experts, 2 * width], or None.
        choice: the experts of the tokens.
        kind: the activation.
        tile: (outputs, inputs, warps, stages) of a program, for tuning.
    """
    (tokens, hidden), width, active = x.shape, weight.shape[1] // 2, choice.active
    assert active is not None
    h = torch.empty(choice.ids.numel(), width, device=x.device, dtype=x.dtype)
    outputs, inputs, warps, stages = tile or (64, 128, 4, 3)
    block_k, target = min(inputs, max(triton.next_power_of_2(hidden), 16)), target_of(x.device)
    stage_bytes, pdl = (
        x.element_size() * block_k * (2 * outputs + rows_of_tile(tokens)),
        target.has_dependent_launch,
    )
    _few_gate_up[(len(active), triton.cdiv(width, outputs))](
        x, weight, weight if bias is None else bias, choice.ids, active, h, tokens,
        HIDDEN=hidden, WIDTH=width, TOP_K=choice.ids.shape[1], K_PAD=triton.next_power_of_2(choice.ids.shape[1]),
        KIND=kind, BIAS=bias is not None, BLOCK_M=rows_of_tile(tokens), BLOCK_N=outputs, BLOCK_K=block_k, PDL=pdl,
        num_warps=warps, num_stages=target.stages(stage_bytes, stages), launch_pdl=pdl,
    )  # fmt: skip
    return h


def few_down(
    h: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    choice: ExpertChoice,
    arrived: torch.Tensor,
    tile: tuple[int, int, int, int] | None = None,
    early: bool | None = None,
) -> torch.Tensor:
    """Return the weighted sum of the outputs of each token's experts: [tokens, hidden].

    Args:
        h: [tokens * top_k, width], from `few_gate_up`, which must be the kernel before this one.
        weight: [experts, hidden, width], contiguous.
        bias: [experts, hidden], or None.
        choice: the experts of the tokens, and their weights.
        arrived: int32 zeros, one for every `BLOCK_DOWN` outputs; zero again when the kernel has ended.
        tile: (outputs, inputs, warps, stages) of a program, for tuning.
        early: whether weights are loaded before the wait, for tuning.
    """
    (tokens, top_k), active = choice.ids.shape, choice.active
    assert active is not None
    hidden, width = weight.shape[1:]
    y = torch.empty(tokens, hidden, device=h.device, dtype=h.dtype)
    parts = torch.empty(tokens * top_k, hidden, device=h.device, dtype=torch.float32)
    few = tokens <= _EARLY_TOKENS
    outputs, inputs, warps, stages = tile or ((BLOCK_DOWN, 256, 4, 3) if few else (BLOCK_DOWN, 128, 4, 5))
    block_k, target = min(inputs, max(triton.next_power_of_2(width), 16)), target_of(h.device)
    stage_bytes, pdl = (
        h.element_size() * block_k * (outputs + rows_of_tile(tokens)),
        target.has_dependent_launch,
    )
    _few_down[(len(active), triton.cdiv(hidden, outputs))](
        h, weight, weight if bias is None else bias, choice.ids, choice.weights, active, parts, arrived, y,
        tokens, HIDDEN=hidden, WIDTH=width, TOP_K=top_k, K_PAD=triton.next_power_of_2(top_k), BIAS=bias is not None,
        BLOCK_M=rows_of_tile(tokens), BLOCK_N=outputs, BLOCK_K=block_k, EARLY=few if early is None else early, PDL=pdl,
        num_warps=warps, num_stages=target.stages(stage_bytes, stages), launch_pdl=pdl,
    )  # fmt: skip
    return y
