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
_LEAST = tl.constexpr(-2147483648)  # below the order of every number
_MOST_LANES = 128  # experts of a row that a warp holds in 4 registers
_WARP_ROWS = 4  # rows of one part that a warp has, where there are many

# A tile of logits has parts, rows and lanes, and holds expert part * LANES + lane. With as many warps as rows, a row
# belongs to one warp: reductions over parts stay in a thread, those over lanes in a warp. That takes loads of four logits
# per thread, so rows in memory begin at multiples of 16 bytes (`padded`). Loads of one logit spread a row of 128 lanes
# over four warps, which wait for each other nine times for each expert that they choose. And it takes that warps are
# divided over rows, not parts: Triton divides them over the second axis first since 3.7, before that over the first.
PARTS_AXIS = tl.constexpr(0 if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7) else 1)
ROWS_AXIS = tl.constexpr(1 - PARTS_AXIS.value)


@triton.jit
def experts_of_tile(PARTS: tl.constexpr, LANES: tl.constexpr):
    """Return the experts of a tile of logits: parts and lanes of one row."""
    parts = tl.expand_dims(tl.expand_dims(tl.arange(0, PARTS), ROWS_AXIS), 2)
    return parts * LANES + tl.arange(0, LANES)[None, None, :]


@triton.jit
def _largest(values):
    """Return the largest number of each row of a tile: [ROWS]."""
    return tl.max(tl.max(values, PARTS_AXIS), 1)


@triton.jit
def wide(of_rows):
    """Return numbers of rows in the shape of a tile of one part and one lane."""
    return tl.expand_dims(tl.expand_dims(of_rows, PARTS_AXIS), 2)


@triton.jit
def count_chosen(chosen):
    """Return how many rows of a tile chose each expert: [PARTS * LANES]."""
    counts = tl.sum(chosen.to(tl.int32), ROWS_AXIS)
    return tl.reshape(counts, [counts.shape[0] * counts.shape[1]])


@triton.jit
def _ordered(numbers):
    """Return int32 numbers in the order of these fp32 numbers: a warp finds their maximum in one instruction."""
    bits = numbers.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _first(order, best, e, E_PAD: tl.constexpr):
    """Return the first expert of each row whose `order` is the `best` of the row: [ROWS]."""
    return tl.min(tl.min(tl.where(order == wide(best), e, E_PAD), PARTS_AXIS), 1)


@triton.jit
def _group_score(ranked, inside, e, E_PAD: tl.constexpr, TWO: tl.constexpr):
    """Return the largest score of the experts `inside` the group, or the sum of the two largest: [ROWS]."""
    scores = tl.where(inside, ranked, _TAKEN)
    best = _largest(scores)
    if TWO:
        first = _first(scores, best, e, E_PAD)
        best += _largest(tl.where(e == wide(first), _TAKEN, scores))
    return best


@triton.jit
def route_rows(
    logits,  # float32, a tile
    gate,  # float32 [ROWS, K_PAD], the logit of the shared experts in every column, if SHARED_GATE
    correction,  # float32 [E], if CORRECTION
    scale,
    top_k,  # TOP_K
    E: tl.constexpr,
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
):
    """Return ids and weights [ROWS, K_PAD], and which routed experts were chosen, as a tile.

    The shared experts E, E + 1, ... come behind the TOP_K routed ones.
    """
    PARTS: tl.constexpr = logits.shape[PARTS_AXIS]
    ROWS: tl.constexpr = logits.shape[ROWS_AXIS]
    LANES: tl.constexpr = logits.shape[2]
    E_PAD: tl.constexpr = PARTS * LANES
    e = experts_of_tile(PARTS, LANES)
    there = e < E
    if SIGMOID:
        scores = tl.sigmoid(logits)
    else:
        top = _largest(tl.where(there, logits, _TAKEN))
        powers = tl.where(there, tl.exp(logits - wide(top)), 0.0)
        scores = powers / wide(tl.sum(tl.sum(powers, PARTS_AXIS), 1))
    ranked = scores
    if CORRECTION:
        ranked += tl.load(correction + e, mask=there, other=0.0)
    ranked = tl.where(ranked == ranked, ranked, _UNORDERED)
    ranked = tl.where(there, ranked, _TAKEN)
    if GROUPS > 1:
        group = e // (E // GROUPS)
        open_experts = tl.zeros_like(ranked).to(tl.int1)
        g = tl.arange(0, G_PAD)[None, :]
        of_groups = tl.full([ROWS, G_PAD], _TAKEN, tl.float32)
        for i in tl.static_range(GROUPS):
            score = _group_score(ranked, group == i, e, E_PAD, TWO)
            of_groups = tl.where(g == i, score[:, None], of_groups)
        for _ in tl.static_range(TOP_GROUPS):
            first = tl.argmax(of_groups, 1)
            open_experts = open_experts | (group == wide(first))
            of_groups = tl.where(g == first[:, None], _TAKEN, of_groups)
        ranked = tl.where(open_experts | (e >= E), ranked, _CLOSED)
    order = _ordered(ranked)
    bits = scores.to(tl.int32, bitcast=True)
    k = tl.arange(0, K_PAD)[None, :]
    ids = tl.zeros([ROWS, K_PAD], tl.int32)
    found = tl.zeros([ROWS, K_PAD], tl.int32)  # the bits of the scores
    # Not unrolled: with 512 experts, fetching the instructions would take most of the time.
    for i in range(top_k):
        best = _first(order, _largest(order), e, E_PAD)  # the first of equal ones
        mine = e == wide(best)
        ids = tl.where(k == i, best[:, None], ids)
        found = tl.where(k == i, _largest(tl.where(mine, bits, _LEAST))[:, None], found)
        order = tl.where(mine, _LEAST, order)
    chosen = order == _LEAST
    weights = tl.where(k < TOP_K, found.to(tl.float32, bitcast=True), 0.0)
    if RENORMALISE:
        weights = weights / (tl.sum(weights, 1)[:, None] + 1e-20)
    weights = weights * scale
    if SHARED > 0:
        ids = tl.where(k < TOP_K, ids, E + k - TOP_K)
        beside = tl.full([ROWS, K_PAD], 1.0, tl.float32)
        if SHARED_GATE:
            beside = tl.sigmoid(gate)
        weights = tl.where(k < TOP_K, weights, beside)
    return ids, weights, chosen


@triton.jit
def list_chosen(count, active, slots, E: tl.constexpr, SHARED: tl.constexpr):
    """Write the shared experts to `active`, then those with a `count` [E_PAD] above 0, in order.

    The rest of its `slots` behind the shared experts become -1.
    """
    e = tl.arange(0, count.shape[0])
    is_chosen = (count > 0).to(tl.int32)
    place = tl.cumsum(is_chosen, 0) - is_chosen
    tl.store(active + SHARED + place, e, mask=is_chosen > 0)
    number = tl.sum(is_chosen, 0)
    # An expert that was not chosen marks one of the free slots.
    rest = number + e - place
    free = (is_chosen == 0) & (rest < slots)
    tl.store(active + SHARED + rest, tl.full([count.shape[0]], -1, tl.int32), mask=free)
    if SHARED > 0:
        tl.store(active + e, E + e, mask=e < SHARED)


@kernel(do_not_specialize=["tokens", "slots", "top_k"])
def _route(
    logits,  # [tokens, E], and with SHARED_GATE one more column; row stride STRIDE
    correction,  # float32 [E], if CORRECTION
    ids,  # int32 [tokens, TOP_K + SHARED]
    weights,  # float32 [tokens, TOP_K + SHARED]
    counts,  # int32 [programs, E + SHARED] how many rows of a program chose each expert; if FEW: the chosen experts
    tokens,
    slots,  # of chosen experts, without the shared ones
    scale,
    top_k,  # TOP_K, for a loop that is not unrolled
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
    FEW: tl.constexpr,
    STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    EACH: tl.constexpr = TOP_K + SHARED
    first_row = tl.program_id(0) * ROWS
    of_tile = wide(first_row + tl.arange(0, ROWS))
    e = experts_of_tile(PARTS, LANES)
    from_logits = logits + of_tile.to(tl.int64) * STRIDE
    found = tl.load(from_logits + e, mask=(of_tile < tokens) & (e < E), other=0.0)
    k = tl.arange(0, K_PAD)[None, :]
    row = first_row + tl.arange(0, ROWS)[:, None]
    real = (row < tokens) & (k < EACH)
    gate = tl.zeros([ROWS, K_PAD], tl.float32)
    if SHARED_GATE:
        gate = tl.load(logits + row.to(tl.int64) * STRIDE + E + 0 * k, mask=real, other=0.0).to(tl.float32)
    mine, weight, chosen = route_rows(
        found.to(tl.float32), gate, correction, scale, top_k, E, TOP_K, SHARED, SHARED_GATE, K_PAD, SIGMOID, CORRECTION,
        RENORMALISE, GROUPS, G_PAD, TOP_GROUPS, TWO,
    )  # fmt: skip
    tl.store(ids + row * EACH + k, mine, mask=real)
    tl.store(weights + row * EACH + k, weight, mask=real)
    count = count_chosen(chosen & (of_tile < tokens))
    if FEW:
        list_chosen(count, counts, slots, E, SHARED)
    else:
        at = tl.arange(0, PARTS * LANES)
        of_program = counts + tl.program_id(0) * (E + SHARED)
        tl.store(of_program + at, count, mask=at < E)
        if SHARED > 0:
            tl.store(of_program + E + at, tl.minimum(tokens - first_row, ROWS) + 0 * at, mask=at < SHARED)


def route(logits: torch.Tensor, correction: torch.Tensor | None, rule: dict[str, Any]) -> ExpertChoice:
    """Choose the experts of each token.

    Args:
        logits: [tokens, experts]; behind them the logit of the shared experts, if they have a gate. Float32 rows should
            be `padded`.
        correction: float32 [experts], or None.
        rule: from `rule_arguments`.
    """
    tokens, experts = logits.shape[0], rule["E"]
    few = tokens <= FEW_TOKENS
    rows = block_rows(tokens, rule["PARTS"])
    blocks = triton.cdiv(tokens, rows)
    ids, weights, slots = empty_choice(tokens, rule, logits.device)
    shape = (slots + rule["SHARED"],) if few else (blocks, experts + rule["SHARED"])
    counts = torch.empty(shape, device=logits.device, dtype=torch.int32)
    pdl = target_of(logits.device).has_dependent_launch
    if tokens:
        _route[(blocks,)](
            logits, weights if correction is None else correction, ids, weights, counts, tokens, slots,
            CORRECTION=correction is not None, FEW=few, STRIDE=logits.stride(0), ROWS=rows, PDL=pdl,
            num_warps=min(max(rows * rule["PARTS"] // _WARP_ROWS, 4), rows, 8), launch_pdl=pdl, **rule,
        )  # fmt: skip
    return (
        ExpertChoice(ids, weights, active=counts)
        if few
        else ExpertChoice(ids, weights, counts=counts, rows=rows)
    )


def padded(outputs: int) -> int:
    """Return the row stride of float32 logits of `outputs` numbers: rows begin at multiples of 16 bytes."""
    return -(-outputs // 4) * 4


def empty_choice(
    tokens: int, rule: dict[str, Any], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Allocate ids and weights of a choice, and return them with the largest number of routed experts chosen."""
    each = rule["TOP_K"] + rule["SHARED"]
    ids = torch.empty(tokens, each, device=device, dtype=torch.int32)
    weights = torch.empty(tokens, each, device=device, dtype=torch.float32)
    return ids, weights, min(rule["E"], tokens * rule["TOP_K"])


def block_rows(tokens: int, parts: int = 1) -> int:
    """Return the number of tokens per program: all of a few, else such that there are at most a few hundred blocks.

    There are at least four, one for each warp, because a row that several warps share is slower.

    Args:
        tokens: of the step.
        parts: PARTS of a row. Rows of several parts are divided among more programs: a warp would not have registers for
            four of them.
    """
    if tokens <= FEW_TOKENS:
        return max(4, triton.next_power_of_2(tokens))
    return 4 if tokens <= 512 else max(4, (16 if tokens <= 2048 else 32) // parts)


def rule_arguments(
    experts: int,
    top_k: int,
    sigmoid: bool = False,
    renormalise: bool = False,
    scale: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
    two: bool = False,
    shared: int = 0,
    shared_gate: bool = False,
) -> dict[str, Any]:
    """Return a routing rule as arguments of the kernel; the names are those of `Routing`.

    The `shared` experts are those behind the routed ones, which every token has. Their weight is 1, or with a
    `shared_gate` the sigmoid of one more logit.
    """
    lanes = min(triton.next_power_of_2(experts), _MOST_LANES)
    return {
        "E": experts,
        "PARTS": triton.next_power_of_2(experts) // lanes,
        "LANES": lanes,
        "TOP_K": top_k,
        "SHARED": shared,
        "SHARED_GATE": shared_gate,
        "K_PAD": triton.next_power_of_2(top_k + shared),
        "SIGMOID": sigmoid,
        "RENORMALISE": renormalise,
        "scale": float(scale),
        "top_k": top_k,
        "GROUPS": groups,
        "G_PAD": triton.next_power_of_2(groups),
        "TOP_GROUPS": top_groups,
        "TWO": two,
    }
