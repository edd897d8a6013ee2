"""top_k, top_p and min_p without a sort: the parts of kernels/sampling.py that rows with filters need.

What is kept is what sampling/filters.py keeps: the tokens at or above a cutoff, found exactly.

    survey    the largest logit (head) of each group of tokens, and its sum of exp: the first reading
    bracket   bounds of the cutoff: the k-th head lies at or below the k-th token, and where heads alone
              have the mass that top_p asks for, so have the tokens above the last of them. That is tight
              where few tokens are kept. Where many are, a sample of the row tells between which two
              logits the cutoff must lie (with a margin of `_Z` standard errors).
    collect   the second reading: tokens above the bracket are kept for certain and drawn from at once;
              those inside it are written to a list; exact counts and masses tell whether it was right
    draw      the cutoff by bisection over the list, the draw among what is kept of it, and the better of
              that and the draw above the bracket

If the sample misled or the list overflows (a great many equal logits), `draw` bisects over the whole row:
slow, and as exact. Masses are integers, so their sums, and with them the kept set, are the same in any order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.row import (
    LOWEST,
    NEVER,
    best_of,
    float_of,
    gumbel,
    key_of,
    keys_of,
    load_scaled,
    mass_of,
    mix,
    scale_of,
    top_k_of,
    top_p_of,
)

GROUP = 64  # tokens with a head
SAMPLES = 8192
CAPACITY = 8192  # of a row's list of candidates
FEW = 512  # candidates that take no more than a glance
ROW_BLOCK = 4096  # tokens at a time where a whole row is searched
_Z = tl.constexpr(4.0)
_MISSED = tl.constexpr(8.0)  # so many tokens just below a bound may have escaped the sample: (Z^2) / 2
_STEPS = tl.constexpr(16)  # halvings of a range whose ends need not be exact
_BOUNDS = tl.constexpr(4)  # top, floor (what min_p leaves), lo, hi; lo = inf: the row has its token
_SUMS = tl.constexpr(5)  # masses from the floor, lo and hi on; tokens from hi on; candidates
_LANE = tl.constexpr(8)
_INF = tl.constexpr(float("inf"))


@triton.jit
def survey(
    at, vocab, begin, scale, weigh, rounds, heads, weights,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """heads, weights: this row's. `weigh`: the sums of exp(logit - head) are wanted too."""
    group = begin // GROUP + tl.arange(0, BLOCK // GROUP)
    for _ in tl.range(rounds, num_stages=STAGES):
        ids = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        x = load_scaled(at, ids, ids < vocab, scale)
        head = tl.max(x, 1)
        inside = group * GROUP < vocab
        tl.store(heads + group, head, mask=inside)
        if weigh:
            reference = tl.maximum(head, LOWEST)  # finite, where a whole group is out
            tl.store(weights + group, tl.sum(tl.exp(x - reference[:, None]), 1), mask=inside)
        group += BLOCK // GROUP


@triton.jit
def bracket(
    at, vocab, scale, head, weight, top, floor, top_k, top_p,
    SAMPLES: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """lo <= cutoff, and hi, from which on all tokens are kept; hi > top: none is known to be."""
    lo = floor
    hi = tl.full([], _INF, tl.float32)
    counts = top_k > 0
    if counts | (top_p < 1):
        if vocab > CAPACITY:
            above = tl.exp(head - top)
            total = tl.sum(above * weight, 0)
            above = tl.where(counts, (head > NEVER).to(tl.float32), above)
            # In float32, so a little more is asked for than needed: that can only lower the bound.
            need = tl.where(counts, top_k.to(tl.float32), (top_p * total * (1 + 1e-4)).to(tl.float32))
            if tl.sum(above, 0) >= need:
                low, high = key_of(tl.min(tl.where(head > NEVER, head, top), 0)), key_of(top) + 1
                tolerance = tl.maximum((high - low) >> _STEPS, 1)
                lo = tl.maximum(floor, _search(head, above, need, low, high, tolerance, True))
            else:
                lo, hi = _sampled(at, vocab, scale, top, floor, top_k, top_p, total, SAMPLES)
    else:
        hi = floor
    return lo, hi


@triton.jit
def _search(x, weight, need, low, high, tolerance, STOP: tl.constexpr):
    """The largest float t from key `low` on, below `high`, with as much weight in x >= t as needed.

    STOP: any t with exactly that weight will do, as where every weight is 1.
    """
    while high - low > tolerance:
        middle = (low + high) >> 1
        reached = tl.sum(tl.where(x >= float_of(middle), weight, 0), 0)
        low = tl.where(reached >= need, middle, low)
        high = tl.where(reached >= need, high, middle)
        if STOP:
            high = tl.where(reached == need, middle + 1, high)
    return float_of(low)


@triton.jit
def _sampled(at, vocab, scale, top, floor, top_k, top_p, total, SAMPLES: tl.constexpr):
    """Bounds from a sample, one token from each of SAMPLES strata: the weight below the cutoff is known
    (vocab - top_k tokens, or (1 - top_p) of the mass), and tokens below it all weigh little."""
    i = tl.arange(0, SAMPLES)
    jitter = mix(i.to(tl.uint32)) % (vocab // SAMPLES).to(tl.uint32)
    ids = (i.to(tl.int64) * vocab // SAMPLES).to(tl.int32) + jitter.to(tl.int32)
    x = load_scaled(at, ids, ids < vocab, scale)
    counts = top_k > 0
    weight = tl.where(counts, 1.0, tl.exp(x - top))
    each = vocab.to(tl.float32) / SAMPLES
    under = tl.sum(tl.where(x < floor, weight, 0.0), 0)  # min_p takes these out before top_p is measured
    rest = ((1 - top_p) * total / each + top_p * under).to(tl.float32)
    rest = tl.where(counts, (vocab - top_k).to(tl.float32) / each, rest)
    start = key_of(tl.maximum(floor, tl.min(tl.where(x > NEVER, x, top), 0))) - 1
    low, high, low_2, high_2 = start, key_of(top) + 1, start, key_of(top) + 1
    tolerance = tl.maximum((high - low) >> _STEPS, 1)
    while tl.maximum(high - low, high_2 - low_2) > tolerance:
        middle, middle_2 = (low + high) >> 1, (low_2 + high_2) >> 1
        below, error, one = _below(x, weight, float_of(middle), top, counts)
        fits = below + _Z * error + _MISSED * one <= rest
        low, high = tl.where(fits, middle, low), tl.where(fits, high, middle)
        below, error, one = _below(x, weight, float_of(middle_2), top, counts)
        over = below - _Z * error >= rest
        low_2, high_2 = tl.where(over, low_2, middle_2), tl.where(over, middle_2, high_2)
    lo = tl.maximum(floor, tl.where(low > start, float_of(low), floor))
    return lo, tl.maximum(float_of(high_2), lo)


@triton.jit
def _below(x, weight, t, top, counts):
    """Weight of the sample below t, the standard error of that, and the weight of a token at t."""
    one = tl.where(counts, 1.0, tl.exp(t - top))
    part = tl.where(x < t, weight, 0.0)
    return tl.sum(part, 0), tl.sqrt(tl.sum(part * weight, 0) + one * one), one


@triton.jit
def _lane_sum(x):
    """Sums of what lies in one thread: fewer registers hold them than all of `x`."""
    return tl.sum(tl.reshape(x, [x.shape[0] // _LANE, _LANE]), 1)


@triton.jit(do_not_specialize=["rounds"])
def collect(
    logits,  # [rows, vocab], rows `stride` apart
    stride,
    vocab,
    slots,  # [rows]
    table,  # int64 [slots, columns]
    num_tokens,  # int32 [slots]
    bounds,  # float32 [rows, _BOUNDS]
    sums,  # int64 [rows, _SUMS]
    candidates,  # int32 [rows, CAPACITY]
    best,  # float32 [rows, spans]
    best_ids,  # int32 [rows, spans]
    rounds,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, span = tl.program_id(0), tl.program_id(1)
    lo = tl.load(bounds + row * _BOUNDS + 2)
    if lo == _INF:
        return
    top, floor = tl.load(bounds + row * _BOUNDS), tl.load(bounds + row * _BOUNDS + 1)
    hi = tl.load(bounds + row * _BOUNDS + 3)
    slot = tl.load(slots + row).to(tl.int64)
    scale, top_k, top_p = scale_of(table, slot), top_k_of(table, slot), top_p_of(table, slot)
    k0, k1 = keys_of(table, slot, num_tokens)
    draws = hi <= top
    weighs = (top_p < 1) & ((top_k == 0) | draws)
    at = logits + row.to(tl.int64) * stride
    listed = candidates + row.to(tl.int64) * CAPACITY
    sums += row * _SUMS

    ids = span * rounds * BLOCK + tl.arange(0, BLOCK)
    counter = sums + 4 + tl.zeros([BLOCK], tl.int32)
    value, token = tl.full([BLOCK], NEVER, tl.float32), ids
    all_mass = tl.zeros([BLOCK // _LANE], tl.int64)
    lo_mass, hi_mass, count = all_mass, all_mass, tl.zeros([BLOCK // _LANE], tl.int32)
    for _ in tl.range(rounds, num_stages=STAGES):
        x = load_scaled(at, ids, ids < vocab, scale)
        listing = (x >= lo) & (x < hi)
        # The order in the list depends on chance; nothing that follows depends on the order.
        place = tl.atomic_add(counter, tl.full([BLOCK], 1, tl.int64), mask=listing, sem="relaxed")
        tl.store(listed + place, ids, mask=listing & (place < CAPACITY))
        if weighs:
            mass = mass_of(x, top)
            all_mass += _lane_sum(tl.where(x >= floor, mass, 0))
            lo_mass += _lane_sum(tl.where(x >= lo, mass, 0))
            hi_mass += _lane_sum(tl.where(x >= hi, mass, 0))
        if draws:
            score = tl.where(x >= hi, x + gumbel(ids, k0, k1), NEVER)
            count += _lane_sum((x >= hi).to(tl.int32))
            token = tl.where(score > value, ids, token)
            value = tl.maximum(score, value)
        ids += BLOCK
    if weighs:
        tl.atomic_add(sums, tl.sum(all_mass, 0), sem="relaxed")
        tl.atomic_add(sums + 1, tl.sum(lo_mass, 0), sem="relaxed")
        tl.atomic_add(sums + 2, tl.sum(hi_mass, 0), sem="relaxed")
    if draws:
        tl.atomic_add(sums + 3, tl.sum(count, 0).to(tl.int64), sem="relaxed")
        winner_value, winner = best_of(value, token)
        at_span = row * tl.num_programs(1) + span
        tl.store(best + at_span, winner_value)
        tl.store(best_ids + at_span, winner)


@triton.jit
def _needed(total, top_p):
    """The mass that top_p asks for; a part in 10^6 is forgiven, as in sampling/filters.py."""
    asked = total.to(tl.float64) * (top_p - 1e-6)
    whole = asked.to(tl.int64)
    return tl.maximum(whole + (whole.to(tl.float64) < asked).to(tl.int64), 1)


@triton.jit
def _draw_listed(
    at, scale, listed, listed_count, top, floor, lo, hi, top_k, top_p, all_mass, lo_mass, hi_mass,
    count, k0, k1, SIZE: tl.constexpr,
):  # fmt: skip
    """Whether the bracket was right, and the best score and its id among what is kept of the list."""
    i = tl.arange(0, SIZE)
    inside = i < listed_count
    ids = tl.load(listed + i, mask=inside, other=0)
    x = load_scaled(at, ids, inside, scale)
    low, high = key_of(lo), tl.minimum(key_of(hi), key_of(top) + 1)
    cut = lo
    right = count >= 0  # true
    if top_k > 0:
        right = (count < top_k) & ((count + listed_count >= top_k) | (lo == floor))
        need = (top_k - count).to(tl.int32)
        cut = tl.maximum(cut, _search(x, inside.to(tl.int32), need, low, high, 1, True))
    if top_p < 1:
        mass = tl.where(x >= cut, mass_of(x, top), 0)
        lo_mass = tl.where(top_k > 0, hi_mass + tl.sum(mass, 0), lo_mass)
        asked = _needed(tl.where(top_k > 0, lo_mass, all_mass), top_p)
        right &= (hi_mass < asked) & (asked <= lo_mass)
        cut = tl.maximum(cut, _search(x, mass, asked - hi_mass, key_of(cut), high, 1, False))
    score = tl.where(x >= cut, x + gumbel(ids, k0, k1), NEVER)
    value, token = best_of(score, ids)
    return right, value, token


@triton.jit
def _search_row(at, vocab, scale, top, need, low, high, COUNTS: tl.constexpr, BLOCK: tl.constexpr):
    """As `_search`, over all tokens of a row, each weighing 1 (COUNTS) or its mass."""
    while high - low > 1:
        middle = (low + high) >> 1
        reached = _weigh_row(at, vocab, scale, top, float_of(middle), COUNTS, BLOCK)
        low = tl.where(reached >= need, middle, low)
        high = tl.where(reached >= need, high, middle)
        if COUNTS:
            high = tl.where(reached == need, middle + 1, high)
    return float_of(low)


@triton.jit
def _weigh_row(at, vocab, scale, top, t, COUNTS: tl.constexpr, BLOCK: tl.constexpr):
    weight = tl.zeros([BLOCK], tl.int64)
    for begin in range(0, vocab, BLOCK):
        ids = begin + tl.arange(0, BLOCK)
        x = load_scaled(at, ids, ids < vocab, scale)
        if COUNTS:
            weight += (x >= t).to(tl.int64)
        else:
            weight += tl.where(x >= t, mass_of(x, top), 0)
    return tl.sum(weight, 0)


@triton.jit
def _draw_from_row(
    at, vocab, scale, top, floor, lo, hi, top_k, top_p, all_mass, lo_mass, hi_mass, k0, k1,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The best score and its id, by bisection over the whole row; what is known of the bracket helps."""
    low, high = key_of(tl.where(hi > top, lo, floor)), key_of(top) + 1
    cut = floor
    if top_k > 0:
        cut = tl.maximum(cut, _search_row(at, vocab, scale, top, top_k, low, high, True, BLOCK))
        low = key_of(cut)
        if top_p < 1:
            all_mass = _weigh_row(at, vocab, scale, top, cut, False, BLOCK)
    need = _needed(all_mass, top_p)
    if top_p < 1:
        if top_k == 0:
            low = key_of(tl.where(lo_mass >= need, lo, floor))
            high = tl.where(hi_mass < need, tl.minimum(key_of(hi), high), high)
        cut = tl.maximum(cut, _search_row(at, vocab, scale, top, need, low, high, False, BLOCK))
    value, token = tl.full([BLOCK], NEVER, tl.float32), tl.arange(0, BLOCK)
    for begin in range(0, vocab, BLOCK):
        ids = begin + tl.arange(0, BLOCK)
        x = load_scaled(at, ids, ids < vocab, scale)
        score = tl.where(x >= cut, x + gumbel(ids, k0, k1), NEVER)
        token = tl.where(score > value, ids, token)
        value = tl.maximum(score, value)
    return best_of(value, token)


@triton.jit(do_not_specialize=["spans"])
def draw(
    logits,
    stride,
    vocab,
    slots,
    table,
    num_tokens,
    bounds,  # float32 [rows, _BOUNDS]
    sums,  # int64 [rows, _SUMS]
    candidates,  # int32 [rows, CAPACITY]
    best,  # float32 [rows, spans]
    best_ids,  # int32 [rows, spans]
    tokens,  # int32 [rows]
    spans,
    SPANS: tl.constexpr,
    FEW: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    lo = tl.load(bounds + row * _BOUNDS + 2)
    if lo == _INF:
        return
    top, floor = tl.load(bounds + row * _BOUNDS), tl.load(bounds + row * _BOUNDS + 1)
    hi = tl.load(bounds + row * _BOUNDS + 3)
    slot = tl.load(slots + row).to(tl.int64)
    scale, top_k, top_p = scale_of(table, slot), top_k_of(table, slot), top_p_of(table, slot)
    k0, k1 = keys_of(table, slot, num_tokens)
    at = logits + row.to(tl.int64) * stride
    listed = candidates + row.to(tl.int64) * CAPACITY
    sums += row * _SUMS
    all_mass, lo_mass, hi_mass = tl.load(sums), tl.load(sums + 1), tl.load(sums + 2)
    count, listed_count = tl.load(sums + 3), tl.load(sums + 4)

    right = count < 0  # false
    value, token = tl.full([], NEVER, tl.float32), tl.full([], 0, tl.int32)
    if listed_count <= FEW:
        right, value, token = _draw_listed(
            at, scale, listed, listed_count, top, floor, lo, hi, top_k, top_p,
            all_mass, lo_mass, hi_mass, count, k0, k1, FEW,
        )  # fmt: skip
    elif listed_count <= CAPACITY:
        right, value, token = _draw_listed(
            at, scale, listed, listed_count, top, floor, lo, hi, top_k, top_p,
            all_mass, lo_mass, hi_mass, count, k0, k1, CAPACITY,
        )  # fmt: skip
    if right:
        if hi <= top:
            i = tl.arange(0, SPANS)
            sure = tl.load(best + row * spans + i, mask=i < spans, other=NEVER)
            sure_ids = tl.load(best_ids + row * spans + i, mask=i < spans, other=0x7FFFFFFF)
            sure_value, sure_token = best_of(sure, sure_ids)
            better = (sure_value > value) | ((sure_value == value) & (sure_token < token))
            value, token = tl.where(better, sure_value, value), tl.where(better, sure_token, token)
    else:
        value, token = _draw_from_row(
            at, vocab, scale, top, floor, lo, hi, top_k, top_p, all_mass, lo_mass, hi_mass, k0, k1, BLOCK
        )
    tl.store(tokens + row, token)
