"""The exact draw among the tokens that filters keep, from the list of tokens in doubt, with one program per row.

The listed token with the best score wins if the filters keep it. That is quick to decide: fewer than top_k tokens
have a higher logit, and they have less mass than top_p needs. If the token is not kept, no token with a lower logit
is. So a few checks settle what a search for the cutoff needs 32 iterations for. There are four cases:

    few        The list is complete and short: compare each token with every other.
    many       The list is complete and long: check one winner after the other.
    partial    Tokens above the bracket are certainly kept, and the best of them is the rival. The list holds the tokens
               inside the bracket that score higher than the rival. Usually there are none; otherwise another pass over
               the row decides.
    whole row  The bracket was wrong or the list overflowed: search the row.

If one token of the largest logit alone has the mass that top_p needs, the first such token wins.

Masses are integers, so their sums do not depend on the order. Sums in floats, where they saved a pass, decide only if
they leave no doubt (`slack`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.jit import kernel
from quire.kernels.sampling.filters import (
    BOUNDS,
    FLOOR,
    FROM_FLOOR,
    FROM_HIGH,
    FROM_LOW,
    HIGH,
    LOW,
    NUM_LISTED,
    SETTLED,
    SUMS,
    TOP,
    WHOLE_ROW,
    append,
)
from quire.kernels.sampling.row import (
    INF,
    NEVER,
    best_of,
    contend,
    float_of,
    gumbel_of,
    key_of,
    keys_of,
    load_scaled,
    mass_of,
    scale_of,
    scaled,
    top_k_of,
    top_p_of,
    uniform,
)

FEW = 128  # tokens of a short list
LISTING = 64  # groups per iteration
_ONE = tl.constexpr(1 << 40)  # the mass of one token of the largest logit
ROW_BLOCK = 4096  # tokens per iteration of a search of the whole row


@kernel(do_not_specialize=["spans"])
def draw(
    logits,  # [rows, vocab], rows `stride` apart
    stride,
    vocab,
    slots,  # [rows]
    table,  # int64 [slots, columns]
    lengths,  # int32 [rows]
    kinds,  # int32 [rows]
    bounds,  # float32 [rows, BOUNDS]
    sums,  # int64 [rows, SUMS]
    groups,  # int32 [rows, MOST_GROUPS]
    listed,  # int32 [rows, CAPACITY]
    best,  # float32 [rows, spans]
    best_ids,  # int32 [rows, spans]
    tokens,  # int32 [rows]
    spans,
    SPANS: tl.constexpr,
    GROUP: tl.constexpr,
    MOST_GROUPS: tl.constexpr,
    LISTING: tl.constexpr,
    FEW: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    kind = tl.load(kinds + row)
    if kind == SETTLED:
        return
    top, floor = tl.load(bounds + row * BOUNDS + TOP), tl.load(bounds + row * BOUNDS + FLOOR)
    lo, hi = tl.load(bounds + row * BOUNDS + LOW), tl.load(bounds + row * BOUNDS + HIGH)
    slot = tl.load(slots + row).to(tl.int64)
    scale, top_k, top_p = scale_of(table, slot), top_k_of(table, slot), top_p_of(table, slot)
    k0, k1 = keys_of(table, slot, tl.load(lengths + row))
    at = logits + row.to(tl.int64) * stride
    listed += row.to(tl.int64) * CAPACITY
    sums += row * SUMS
    if kind > 0:
        own = groups + row * MOST_GROUPS
        _list(at, vocab, scale, lo, own, kind, listed, sums + NUM_LISTED, GROUP, LISTING, CAPACITY)
    all_mass = tl.load(sums + FROM_FLOOR)
    count = tl.atomic_add(sums + NUM_LISTED, tl.full([], 0, tl.int64))  # a load that bypasses the caches

    right, token = kind > kind, tl.full([], 0, tl.int32)  # False: the token is not known yet
    if kind != WHOLE_ROW:
        if hi <= top:
            if count <= FEW:
                i = tl.arange(0, SPANS)
                value = tl.load(best + row * spans + i, mask=i < spans, other=NEVER)
                value_ids = tl.load(best_ids + row * spans + i, mask=i < spans, other=0x7FFFFFFF)
                rival, rival_id = best_of(value, value_ids)
                right, token = _draw_partial(
                    at, vocab, scale, listed, count, top, floor, lo == floor, top_k, top_p,
                    all_mass, tl.load(sums + FROM_LOW), tl.load(sums + FROM_HIGH), rival, rival_id, k0, k1, FEW, BLOCK,
                )  # fmt: skip
        elif count <= FEW:
            right, token = _draw_few(
                at, scale, listed, count, top, lo == floor, top_k, top_p, all_mass, k0, k1, FEW
            )
        elif count <= CAPACITY:
            right, token = _draw_many(
                at, scale, listed, count, top, lo, lo == floor, top_k, top_p, all_mass, k0, k1, CAPACITY
            )
    if right == 0:
        cut = tl.where(hi > top, lo, floor)
        token = _draw_from_row(at, vocab, scale, top, cut, top_k, top_p, floor, k0, k1, BLOCK)
    tl.store(tokens + row, token)


@triton.jit
def _list(
    at, vocab, scale, lo, groups, count, listed, counter,
    GROUP: tl.constexpr, LISTING: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """List the tokens of the groups that are at or above `lo`."""
    for begin in range(0, count, LISTING):
        i = begin + tl.arange(0, LISTING)
        group = tl.load(groups + i, mask=i < count, other=vocab)
        ids = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        x = load_scaled(at, ids, (i < count)[:, None] & (ids < vocab), scale)
        append(ids, x >= lo, listed, counter, CAPACITY)
    tl.debug_barrier()


@triton.jit
def _needed_mass(total, top_p):
    """Return the mass that top_p needs, with a tolerance of 1e-6 as in sampling/filters.py."""
    asked = total.to(tl.float64) * (top_p - 1e-6)
    floor = asked.to(tl.int64)
    return tl.maximum(floor + (floor.to(tl.float64) < asked).to(tl.int64), 1)


@triton.jit
def _first_if_enough(x, ids, top, asked, slack, right, token):
    """Replace `token` by the first token of the largest logit if one such token alone has the needed mass.

    If there are several such tokens and the mass is not known precisely enough, `right` becomes False.
    """
    at_top = x == top
    doubtful = (asked + slack > _ONE) & (asked - slack <= _ONE) & (tl.sum(at_top.to(tl.int32), 0) > 1)
    first = tl.min(tl.where(at_top, ids, 0x7FFFFFFF), 0)
    return right & (doubtful == 0), tl.where(asked + slack <= _ONE, first, token)


@triton.jit
def _slack(asked, exact):
    """Return the possible error of the needed mass: 0 if its total was exact."""
    return tl.where(exact, 0, (asked >> 14) + 1)


@triton.jit
def _draw_few(at, scale, listed, count, top, whole, top_k, top_p, all_mass, k0, k1, FEW: tl.constexpr):
    """Draw from a short, complete list: return whether the list decides, and the token.

    `whole`: the list holds every token that passes min_p.
    """
    i = tl.arange(0, FEW)
    ids = tl.load(listed + i, mask=i < count, other=0)
    x = load_scaled(at, ids, i < count, scale)
    mass = mass_of(x, top)
    higher = x[None, :] > x[:, None]
    above = tl.sum(higher.to(tl.int32), 1)
    above_mass = tl.sum(tl.where(higher, mass[None, :], 0), 1)
    kept = (i < count) & ((top_k == 0) | (above < top_k))
    score = x + gumbel_of(uniform(ids, k0, k1))
    right = (top_k == 0) | (count >= top_k) | whole
    if top_p < 1:
        listed_mass = tl.sum(tl.where(kept, mass, 0), 0)
        exact = (top_k > 0) | whole
        asked = _needed_mass(tl.where(exact, listed_mass, all_mass), top_p)
        slack = _slack(asked, exact)
        kept &= above_mass < asked + slack
        _, token = best_of(tl.where(kept, score, NEVER), ids)
        at_winner = tl.max(tl.where(kept & (ids == token), above_mass, 0), 0)
        right &= (at_winner < asked - slack) & (listed_mass >= asked + slack)
        right, token = _first_if_enough(x, ids, top, asked, slack, right, token)
    else:
        _, token = best_of(tl.where(kept, score, NEVER), ids)
    return right, token


@triton.jit
def _draw_many(
    at, scale, listed, count, top, lo, whole, top_k, top_p, all_mass, k0, k1, CAPACITY: tl.constexpr
):
    """Draw from a long, complete list; see `_draw_few`."""
    i = tl.arange(0, CAPACITY)
    ids = tl.load(listed + i, mask=i < count, other=0)
    x = load_scaled(at, ids, i < count, scale)
    right = (top_k == 0) | (count >= top_k) | whole
    cut = lo
    weight = (i < count).to(tl.int64)
    need = tl.where(top_k > 0, top_k, count + 1)
    slack = tl.full([], 0, tl.int64)
    if top_p < 1:
        if top_k > 0:
            cut = tl.maximum(lo, _search(x, top_k, key_of(lo), key_of(top) + 1))
        weight = tl.where(x >= cut, mass_of(x, top), 0)
        listed_mass, exact = tl.sum(weight, 0), (top_k > 0) | whole
        need = _needed_mass(tl.where(exact, listed_mass, all_mass), top_p)
        slack = _slack(need, exact)
        right &= listed_mass >= need + slack
    score = tl.where(x >= cut, x + gumbel_of(uniform(ids, k0, k1)), NEVER)
    value, token = best_of(score, ids)
    going = right
    while going:
        at_winner = tl.max(tl.where((score == value) & (ids == token), x, NEVER), 0)
        above = tl.sum(tl.where(x > at_winner, weight, 0), 0)
        kept = above < need - slack
        right = kept | (above >= need + slack)
        going = right & (kept == 0)
        score = tl.where((x > at_winner) | kept, score, NEVER)
        value, token = best_of(score, ids)
    if top_p < 1:
        right, token = _first_if_enough(x, ids, top, need, slack, right, token)
    return right, token


@triton.jit
def _draw_partial(
    at, vocab, scale, listed, count, top, floor, whole, top_k, top_p, from_floor, from_lo, from_hi,
    rival, rival_id, k0, k1, FEW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Draw among the rival and a partial list: return whether they decide, and the token.

    At most one of top_k and top_p is on. The sums `from_floor`, `from_lo` and `from_hi` count tokens with top_k, and
    masses with top_p.
    """
    counts = top_k > 0
    asked = tl.where(counts, tl.minimum(top_k, vocab + 1) << 40, _needed_mass(from_floor, top_p))
    slack = _slack(asked, counts)
    right = (counts == 0) & (top_p >= 1)
    right |= (from_hi + slack < asked) & (whole | (from_lo >= asked + slack))
    i = tl.arange(0, FEW)
    ids = tl.load(listed + i, mask=i < count, other=0x7FFFFFFF)
    x = load_scaled(at, ids, i < count, scale)
    score = tl.where(x > NEVER, x + gumbel_of(uniform(ids, k0, k1)), NEVER)
    value, token = best_of(score, ids)
    going = right & ((value > rival) | ((value == rival) & (token < rival_id)))
    need = top_k
    if going & (counts == 0):
        need = _needed_mass(_weigh_row(at, vocab, scale, top, floor, NEVER, False, BLOCK), top_p)
    while going:
        at_winner = tl.max(tl.where(ids == token, x, NEVER), 0)
        kept = _weigh_row(at, vocab, scale, top, floor, at_winner, counts, BLOCK) < need
        score = tl.where((x > at_winner) | kept, score, NEVER)
        value, token = best_of(score, ids)
        going = (kept == 0) & ((value > rival) | ((value == rival) & (token < rival_id)))
    return right, tl.where((value > rival) | ((value == rival) & (token < rival_id)), token, rival_id)


@triton.jit
def _search(x, need, low, high):
    """Return a float t such that top_k = `need` keeps exactly the elements of x that are >= t, by bisection over keys.

    `low` is the smallest key to consider, `high` is one past the largest.
    """
    while high - low > 1:
        middle = (low + high) >> 1
        reached = tl.sum((x >= float_of(middle)).to(tl.int32), 0)
        low = tl.where(reached >= need, middle, low)
        high = tl.where(reached == need, middle + 1, tl.where(reached >= need, high, middle))
    return float_of(low)


@triton.jit
def _weigh_row(at, vocab, scale, top, t, above, counts, BLOCK: tl.constexpr):
    """Return the number (if `counts`) or the mass of the row's tokens with x >= t and x > above."""
    weight = tl.zeros([BLOCK], tl.int64)
    for begin in range(0, vocab, BLOCK):
        ids = begin + tl.arange(0, BLOCK)
        x = load_scaled(at, ids, ids < vocab, scale)
        mass = tl.where(counts, 1, mass_of(x, top))
        weight += tl.where((x >= t) & (x > above), mass, 0)
    return tl.sum(weight, 0)


@triton.jit
def _first_at(at, vocab, scale, top, BLOCK: tl.constexpr):
    """Return the first token of the row with the scaled logit `top`."""
    first = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
    for begin in range(0, vocab, BLOCK):
        ids = begin + tl.arange(0, BLOCK)
        x = load_scaled(at, ids, ids < vocab, scale)
        first = tl.minimum(first, tl.where(x == top, ids, 0x7FFFFFFF))
    return tl.min(first, 0)


@triton.jit
def _draw_from_row(at, vocab, scale, top, cut, top_k, top_p, floor, k0, k1, BLOCK: tl.constexpr):
    """Draw from the whole row, of which no token below `cut` is kept."""
    need = tl.where(top_k > 0, top_k, tl.full([], 1, tl.int64) + vocab)
    counts = top_p >= 1
    if top_p < 1:
        t = floor
        if top_k > 0:
            low, high = key_of(cut), key_of(top) + 1
            while high - low > 1:
                middle = (low + high) >> 1
                reached = _weigh_row(at, vocab, scale, top, float_of(middle), NEVER, True, BLOCK)
                low = tl.where(reached >= top_k, middle, low)
                high = tl.where(reached == top_k, middle + 1, tl.where(reached >= top_k, high, middle))
            t = tl.maximum(floor, float_of(low))
            cut = t
        need = _needed_mass(_weigh_row(at, vocab, scale, top, t, NEVER, False, BLOCK), top_p)
    token = tl.full([], 0, tl.int32)
    if (top_p < 1) & (need <= _ONE):  # one token of the largest logit is enough: take the first
        cut = tl.full([], INF, tl.float32)
        token = _first_at(at, vocab, scale, top, BLOCK)
    above = tl.full([], NEVER, tl.float32)  # only tokens with a higher logit may be kept
    going = cut < INF
    while going:
        record = tl.full([], NEVER, tl.float32)
        value, place = tl.full([BLOCK], NEVER, tl.float32), tl.arange(0, BLOCK)
        for begin in range(0, vocab, BLOCK):
            ids = begin + tl.arange(0, BLOCK)
            x = load_scaled(at, ids, ids < vocab, scale)
            x = tl.where((x >= cut) & (x > above), x, NEVER)
            record, value, place = contend(x, ids, k0, k1, record, value, place)
        record, token = best_of(value, place)
        above = scaled(tl.load(at + token), scale)
        going = _weigh_row(at, vocab, scale, top, cut, above, counts, BLOCK) >= need
    return token
