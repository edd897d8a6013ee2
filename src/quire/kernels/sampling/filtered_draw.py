"""The draw among what filters keep, from the list of tokens in doubt: exact, one program a row.

The best score of all listed tokens is the row's if its token is kept, and that is soon known: fewer than
top_k tokens above it, and less mass than top_p asks for. If it is not, neither is anything below it. So a
few looks settle what a search for the cutoff would take 32 for.

    few       complete lists, each token compared with each
    many      complete lists
    partial   tokens above the bracket are kept for certain; listed is what scores higher than the best of
              them (the rival) and may be kept, which mostly is nothing; else one more reading decides
    whole row where the bracket was wrong or the list overflowed

Where a single token of the largest logit has the mass that top_p asks for, the first of them is the token.

Masses are integers: their sums do not depend on the order. Sums made in floats, where that saved a reading,
decide only where they leave no doubt (`slack`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.jit import kernel
from quire.kernels.sampling.filters import BOUNDS, SETTLED, SUMS, WHOLE_ROW, append
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

FEW = 128  # tokens that are compared each with each
LISTING = 64  # groups at a time
_ONE = tl.constexpr(1 << 40)  # the mass of one token of the largest logit
ROW_BLOCK = 4096  # tokens at a time where a whole row is searched


@kernel(do_not_specialize=["spans"])
def draw(
    logits,  # [rows, vocab], rows `stride` apart
    stride,
    vocab,
    slots,  # [rows]
    table,  # int64 [slots, columns]
    num_tokens,  # int32 [slots]
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
    top, floor = tl.load(bounds + row * BOUNDS), tl.load(bounds + row * BOUNDS + 1)
    lo, hi = tl.load(bounds + row * BOUNDS + 2), tl.load(bounds + row * BOUNDS + 3)
    slot = tl.load(slots + row).to(tl.int64)
    scale, top_k, top_p = scale_of(table, slot), top_k_of(table, slot), top_p_of(table, slot)
    k0, k1 = keys_of(table, slot, num_tokens)
    at = logits + row.to(tl.int64) * stride
    listed += row.to(tl.int64) * CAPACITY
    sums += row * SUMS
    if kind > 0:
        own = groups + row * MOST_GROUPS
        _list(at, vocab, scale, lo, own, kind, listed, sums + 3, GROUP, LISTING, CAPACITY)
    all_mass = tl.load(sums)
    count = tl.atomic_add(sums + 3, tl.full([], 0, tl.int64))  # as a load that no cache answers

    right, token = kind > kind, tl.full([], 0, tl.int32)  # not yet
    if kind != WHOLE_ROW:
        if hi <= top:
            if count <= FEW:
                i = tl.arange(0, SPANS)
                value = tl.load(best + row * spans + i, mask=i < spans, other=NEVER)
                value_ids = tl.load(best_ids + row * spans + i, mask=i < spans, other=0x7FFFFFFF)
                rival, rival_id = best_of(value, value_ids)
                right, token = _draw_partial(
                    at, vocab, scale, listed, count, top, floor, lo == floor, top_k, top_p,
                    all_mass, tl.load(sums + 1), tl.load(sums + 2), rival, rival_id, k0, k1, FEW, BLOCK,
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
    """Lists the tokens from lo on of the groups."""
    for begin in range(0, count, LISTING):
        i = begin + tl.arange(0, LISTING)
        group = tl.load(groups + i, mask=i < count, other=vocab)
        ids = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        x = load_scaled(at, ids, (i < count)[:, None] & (ids < vocab), scale)
        append(ids, x >= lo, listed, counter, CAPACITY)
    tl.debug_barrier()


@triton.jit
def _needed_mass(total, top_p):
    """The mass that top_p asks for. A part in 10^6 is forgiven, as in sampling/filters.py."""
    asked = total.to(tl.float64) * (top_p - 1e-6)
    floor = asked.to(tl.int64)
    return tl.maximum(floor + (floor.to(tl.float64) < asked).to(tl.int64), 1)


@triton.jit
def _first_if_enough(x, ids, top, asked, slack, right, token):
    """`right` and `token`, but the first token of the largest logit where one of these has the mass asked for.

    Where the mass is not known well enough to tell, and there are several, the list does not decide.
    """
    at_top = x == top
    doubtful = (asked + slack > _ONE) & (asked - slack <= _ONE) & (tl.sum(at_top.to(tl.int32), 0) > 1)
    first = tl.min(tl.where(at_top, ids, 0x7FFFFFFF), 0)
    return right & (doubtful == 0), tl.where(asked + slack <= _ONE, first, token)


@triton.jit
def _slack(asked, exact):
    """By how much it may be wrong, if its total was not exact."""
    return tl.where(exact, 0, (asked >> 14) + 1)


@triton.jit
def _draw_few(at, scale, listed, count, top, whole, top_k, top_p, all_mass, k0, k1, FEW: tl.constexpr):
    """Whether the list decides, and the token. `whole`: the list is all that filters other than min_p see."""
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
    """As `_draw_few`."""
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
    """Of top_k and top_p at most one is on; the sums are of tokens or of masses."""
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
    """A float t, as keys from `low` on and below `high`, so that top_k keeps x >= t: the most that has as
    many tokens as needed."""
    while high - low > 1:
        middle = (low + high) >> 1
        reached = tl.sum((x >= float_of(middle)).to(tl.int32), 0)
        low = tl.where(reached >= need, middle, low)
        high = tl.where(reached == need, middle + 1, tl.where(reached >= need, high, middle))
    return float_of(low)


@triton.jit
def _weigh_row(at, vocab, scale, top, t, above, counts, BLOCK: tl.constexpr):
    """Number (if `counts`) or mass of the row's tokens with x >= t and x > above."""
    weight = tl.zeros([BLOCK], tl.int64)
    for begin in range(0, vocab, BLOCK):
        ids = begin + tl.arange(0, BLOCK)
        x = load_scaled(at, ids, ids < vocab, scale)
        mass = tl.where(counts, 1, mass_of(x, top))
        weight += tl.where((x >= t) & (x > above), mass, 0)
    return tl.sum(weight, 0)


@triton.jit
def _first_at(at, vocab, scale, top, BLOCK: tl.constexpr):
    """The first token of the row with the scaled logit `top`."""
    first = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
    for begin in range(0, vocab, BLOCK):
        ids = begin + tl.arange(0, BLOCK)
        x = load_scaled(at, ids, ids < vocab, scale)
        first = tl.minimum(first, tl.where(x == top, ids, 0x7FFFFFFF))
    return tl.min(first, 0)


@triton.jit
def _draw_from_row(at, vocab, scale, top, cut, top_k, top_p, floor, k0, k1, BLOCK: tl.constexpr):
    """The same over the whole row; `cut`: nothing below it is kept."""
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
    if (top_p < 1) & (need <= _ONE):  # one token of the largest logit is enough: the first
        cut = tl.full([], INF, tl.float32)
        token = _first_at(at, vocab, scale, top, BLOCK)
    above = tl.full([], NEVER, tl.float32)  # only tokens above it may be kept
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
