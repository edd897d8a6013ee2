"""Routing in one kernel: from router logits to the experts of each token, their weights, and how often each is chosen.

The rule is `choose_experts` in layers/routing.py. Of equal scores the first expert is chosen. A row that is not finite
gets valid experts, all different, and weights that are not finite.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from quire.kernels.experts.choice import ExpertChoice
from quire.kernels.jit import kernel
from quire.kernels.target import target_of

FEW_TOKENS = 16  # up to so many tokens are routed by one program, which also lists the chosen experts

_UNORDERED = tl.constexpr(-1e38)  # rank of a score that is not a number
_CLOSED = tl.constexpr(-2e38)  # of an expert in a group that was not chosen
_TAKEN = tl.constexpr(float("-inf"))  # of an expert that was chosen before


@triton.jit
def _group_score(ranked, inside, TWO: tl.constexpr):
    """Return the largest score of the experts `inside` the group, or the sum of the two largest: [rows]."""
    e = tl.arange(0, ranked.shape[1])[None, :]
    scores = tl.where(inside, ranked, _TAKEN)
    best = tl.max(scores, 1)
    if TWO:
        first = tl.min(tl.where(scores == best[:, None], e, ranked.shape[1]), 1)
        best += tl.max(tl.where(e == first[:, None], _TAKEN, scores), 1)
    return best


@triton.jit
def route_rows(
    logits,  # float32 [ROWS, E_PAD]
    correction,  # float32 [E], if CORRECTION
    scale,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    K_PAD: tl.constexpr,
    SIGMOID: tl.constexpr,
    CORRECTION: tl.constexpr,
    RENORMALISE: tl.constexpr,
    GROUPS: tl.constexpr,
    G_PAD: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TWO: tl.constexpr,
):
    """Return ids and weights [ROWS, K_PAD], and which experts were chosen, bool [ROWS, E_PAD]."""
    ROWS: tl.constexpr = logits.shape[0]
    E_PAD: tl.constexpr = logits.shape[1]
    e = tl.arange(0, E_PAD)[None, :]
    there = e < E
    if SIGMOID:
        scores = tl.sigmoid(logits)
    else:
        top = tl.max(tl.where(there, logits, _TAKEN), 1)
        powers = tl.where(there, tl.exp(logits - top[:, None]), 0.0)
        scores = powers / tl.sum(powers, 1)[:, None]
    ranked = scores
    if CORRECTION:
        ranked += tl.load(correction + e, mask=there, other=0.0)
    ranked = tl.where(ranked == ranked, ranked, _UNORDERED)
    ranked = tl.where(there, ranked, _TAKEN)
    if GROUPS > 1:
        group = e // (E // GROUPS)
        open_experts = tl.zeros([ROWS, E_PAD], tl.int1)
        g = tl.arange(0, G_PAD)[None, :]
        of_groups = tl.full([ROWS, G_PAD], _TAKEN, tl.float32)
        for i in tl.static_range(GROUPS):
            of_groups = tl.where(g == i, _group_score(ranked, group == i, TWO)[:, None], of_groups)
        for _ in tl.static_range(TOP_GROUPS):
            first = tl.argmax(of_groups, 1)[:, None]
            open_experts = open_experts | (group == first)
            of_groups = tl.where(g == first, _TAKEN, of_groups)
        ranked = tl.where(open_experts | (e >= E), ranked, _CLOSED)
    k = tl.arange(0, K_PAD)[None, :]
    ids = tl.zeros([ROWS, K_PAD], tl.int32)
    chosen = tl.zeros([ROWS, E_PAD], tl.int1)
    for i in tl.static_range(TOP_K):
        best = tl.argmax(ranked, 1)[:, None]  # the first of equal ones
        mine = e == best
        ids = tl.where(k == i, best, ids)
        ranked = tl.where(mine, _TAKEN, ranked)
        chosen = chosen | mine
    weights = tl.where(k < TOP_K, tl.gather(scores, ids, 1), 0.0)
    if RENORMALISE:
        weights = weights / (tl.sum(weights, 1)[:, None] + 1e-20)
    return ids, weights * scale, chosen


@triton.jit
def list_chosen(count, active, slots, E: tl.constexpr):
    """Write the experts with a `count` [E_PAD] above 0 to `active`, in order, and -1 into the rest of its `slots`."""
    e = tl.arange(0, count.shape[0])
    is_chosen = (count > 0).to(tl.int32)
    place = tl.cumsum(is_chosen, 0) - is_chosen
    tl.store(active + place, e, mask=is_chosen > 0)
    number = tl.sum(is_chosen, 0)
    # An expert that was not chosen marks one of the free slots.
    rest = number + e - place
    tl.store(active + rest, tl.full([count.shape[0]], -1, tl.int32), mask=(is_chosen == 0) & (rest < slots))


@kernel(do_not_specialize=["tokens", "slots"])
def _route(
    logits,  # [tokens, E]
    correction,  # float32 [E], if CORRECTION
    ids,  # int32 [tokens, TOP_K]
    weights,  # float32 [tokens, TOP_K]
    counts,  # int32 [programs, E] how many rows of a program chose each expert; if FEW: the chosen experts [slots]
    tokens,
    slots,
    scale,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    TOP_K: tl.constexpr,
    K_PAD: tl.constexpr,
    SIGMOID: tl.constexpr,
    CORRECTION: tl.constexpr,
    RENORMALISE: tl.constexpr,
    GROUPS: tl.constexpr,
    G_PAD: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TWO: tl.constexpr,
    FEW: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    e = tl.arange(0, E_PAD)
    real = row < tokens
    found = tl.load(logits + row.to(tl.int64) * E + e[None, :], mask=real & (e < E)[None, :], other=0.0)
    mine, weight, chosen = route_rows(
        found.to(tl.float32), correction, scale, E, TOP_K, K_PAD, SIGMOID, CORRECTION, RENORMALISE, GROUPS, G_PAD,
        TOP_GROUPS, TWO,
    )  # fmt: skip
    k = tl.arange(0, K_PAD)[None, :]
    tl.store(ids + row * TOP_K + k, mine, mask=real & (k < TOP_K))
    tl.store(weights + row * TOP_K + k, weight, mask=real & (k < TOP_K))
    count = tl.sum((chosen & real).to(tl.int32), 0)
    if FEW:
        list_chosen(count, counts, slots, E)
    else:
        tl.store(counts + tl.program_id(0) * E + e, count, mask=e < E)


def route(logits: torch.Tensor, correction: torch.Tensor | None, rule: dict[str, Any]) -> ExpertChoice:
    """Choose the experts of each token.

    Args:
        logits: [tokens, experts], contiguous.
        correction: float32 [experts], or None.
        rule: from `rule_arguments`.
    """
    tokens, experts = logits.shape
    top_k = rule["TOP_K"]
    few = tokens <= FEW_TOKENS
    rows = block_rows(tokens)
    blocks = triton.cdiv(tokens, rows)
    ids = torch.empty(tokens, top_k, device=logits.device, dtype=torch.int32)
    weights = torch.empty(tokens, top_k, device=logits.device, dtype=torch.float32)
    slots = min(experts, tokens * top_k)
    counts = torch.empty((slots,) if few else (blocks, experts), device=logits.device, dtype=torch.int32)
    pdl = target_of(logits.device).has_dependent_launch
    if tokens:
        _route[(blocks,)](
            logits, weights if correction is None else correction, ids, weights, counts, tokens, slots,
            CORRECTION=correction is not None, FEW=few, ROWS=rows, PDL=pdl,
            num_warps=4 if rows <= 16 else 8, launch_pdl=pdl, **rule,
        )  # fmt: skip
    return (
        ExpertChoice(ids, weights, active=counts)
        if few
        else ExpertChoice(ids, weights, counts=counts, rows=rows)
    )


def block_rows(tokens: int) -> int:
    """Return the number of tokens per program: all of a few, else such that there are at most a few hundred blocks.

    There are at least four, one for each warp, because a row that several warps share is slower.
    """
    if tokens <= FEW_TOKENS:
        return max(4, triton.next_power_of_2(tokens))
    return 4 if tokens <= 512 else 16 if tokens <= 2048 else 32


def rule_arguments(
    experts: int,
    top_k: int,
    sigmoid: bool = False,
    renormalise: bool = False,
    scale: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
    two: bool = False,
) -> dict[str, Any]:
    """Return a routing rule as arguments of the kernel; the names are those of `Routing`."""
    return {
        "E": experts,
        "E_PAD": triton.next_power_of_2(experts),
        "TOP_K": top_k,
        "K_PAD": triton.next_power_of_2(top_k),
        "SIGMOID": sigmoid,
        "RENORMALISE": renormalise,
        "scale": float(scale),
        "GROUPS": groups,
        "G_PAD": triton.next_power_of_2(groups),
        "TOP_GROUPS": top_groups,
        "TWO": two,
    }
