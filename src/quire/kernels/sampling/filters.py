"""top_k, top_p and min_p without a sort: bounds of each row's cutoff, and a list of the tokens in doubt.

The kernels keep exactly the tokens that sampling/filters.py keeps: those at or above a cutoff. They run in four stages:

    survey    The first pass over the row computes the largest logit (head) of each group of tokens, and the group's
              sum of exp.
    bracket   Bounds of the cutoff follow from the heads. The k-th largest head is at most the k-th largest logit; and
              if the heads alone have the mass that top_p needs, so have the tokens above the last of these heads. The
              bound is tight if few tokens are kept: then only groups with a head above the bound are read again. If
              many are kept, a sample of the row gives two logits that the cutoff lies between, with a margin of `_Z`
              standard errors.
    collect   For rows with a sampled bracket, the second pass draws from the tokens above the bracket, which are
              certainly kept. Of the tokens inside the bracket it lists only the few that score higher.
    draw      (kernels/sampling/filtered_draw.py) decides exactly, from the list.

Correctness does not depend on the sample: `draw` detects a wrong bracket and then searches the whole row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.jit import kernel
from quire.kernels.sampling.row import (
    INF,
    LOWEST,
    NEVER,
    UNIT,
    any_beats,
    best_of,
    gumbel_of,
    keys_of,
    load_scaled,
    mix,
    scale_of,
    scaled,
    top_k_of,
    top_p_of,
    uniform,
)

GROUP = 64  # tokens that share a head
MOST_GROUPS = 256  # groups of a row that the last kernel can read again
SAMPLES = 4096
BINS = 1024
CAPACITY = 4096  # tokens in a row's list

# The kind of a row after `_settle`: the work that remains. A positive kind is the number of groups to read again.
SETTLED = tl.constexpr(0)  # the token is chosen
COLLECT = tl.constexpr(-1)  # make a list in a second pass
WHOLE_ROW = tl.constexpr(-2)  # search the whole row; neither a list nor a bracket helps

BOUNDS = tl.constexpr(4)  # columns of the bounds:
TOP = tl.constexpr(0)  # the largest scaled logit
FLOOR = tl.constexpr(1)  # the cutoff of min_p
LOW = tl.constexpr(2)  # the cutoff is at or above it
HIGH = tl.constexpr(3)  # tokens at or above it are certainly kept; above TOP if no such bound is known

SUMS = tl.constexpr(4)  # columns of the sums; a weight is the mass, or UNIT for each token:
FROM_FLOOR = tl.constexpr(0)  # weight of the tokens at or above the floor
FROM_LOW = tl.constexpr(1)  # weight of the tokens at or above the low bound
FROM_HIGH = tl.constexpr(2)  # weight of the tokens at or above the high bound
NUM_LISTED = tl.constexpr(3)  # tokens in the list, also those beyond CAPACITY

_Z = tl.constexpr(4.0)  # margin of a sampled bound in standard errors
_MISSED = tl.constexpr(8.0)  # tokens just below a bound that the sample may have missed: (Z^2) / 2
_HALVINGS = tl.constexpr(12)  # steps of the bisection over the heads
_LANE = tl.constexpr(8)  # neighbouring elements that one thread holds


@triton.jit
def survey(
    at, vocab, begin, scale, weigh, rounds, heads, weights,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the heads of a span of groups and, if `weigh`, their sums of exp(logit - head).

    `heads` and `weights` point to the row. The head of a group with a NaN or +inf is INF.
    """
    group = begin // GROUP + tl.arange(0, BLOCK // GROUP)
    for _ in tl.range(rounds, num_stages=STAGES):
        ids = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        raw = tl.load(at + ids, mask=ids < vocab, other=NEVER).to(tl.float32)
        x = scaled(raw, scale)
        head = tl.max(x, 1)
        sick = tl.max(((raw < INF) == 0).to(tl.int32), 1) > 0
        inside = group * GROUP < vocab
        tl.store(heads + group, tl.where(sick, INF, head), mask=inside)
        if weigh:
            reference = tl.maximum(head, LOWEST)  # finite, even if all logits of a group are -inf
            tl.store(weights + group, tl.sum(tl.exp(x - reference[:, None]), 1), mask=inside)
        group += BLOCK // GROUP


@triton.jit
def bracket(
    at, vocab, scale, head, weight, top, floor, top_k, top_p,
    GROUP: tl.constexpr, SAMPLES: tl.constexpr, BINS: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Return bounds lo <= cutoff <= hi, and the mass of the row. hi is above `top` if no upper bound is known."""
    lo = floor
    hi = tl.full([], INF, tl.float32)
    above = tl.exp(head - top)
    total = tl.sum(above * weight, 0)
    counts = top_k > 0
    if counts | (top_p < 1):
        above = tl.where(counts, (head > NEVER).to(tl.float32), above)
        # In float32, so require a little more mass than necessary: that can only lower the bound.
        need = tl.where(counts, top_k.to(tl.float32), (top_p * total * (1 + 1e-4)).to(tl.float32))
        low, high = tl.min(tl.where(head > NEVER, head, top), 0), top
        enough = tl.sum(above, 0) >= need
        steps = tl.where(enough, 0, _HALVINGS)
        while steps < _HALVINGS:
            middle = low * 0.5 + high * 0.5
            reached = tl.sum(tl.where(head >= middle, above, 0.0), 0)
            low = tl.where(reached >= need, middle, low)
            high = tl.where(reached >= need, high, middle)
            steps = tl.where(reached == need, _HALVINGS, steps + 1)
        # If most groups have tokens above the bound, too many tokens are above it to list them.
        tight = enough & (2 * tl.sum((head >= low).to(tl.int32), 0) <= tl.cdiv(vocab, GROUP))
        if tight:
            lo = tl.maximum(floor, low)
        elif vocab > CAPACITY:
            lo, hi = _sampled(at, vocab, scale, top, floor, top_k, top_p, total, SAMPLES, BINS)
    return lo, hi, total


@triton.jit
def _sampled(
    at, vocab, scale, top, floor, top_k, top_p, total, SAMPLES: tl.constexpr, BINS: tl.constexpr
):  # fmt: skip
    """Return bounds of the cutoff from a sample: one token from each of SAMPLES strata, in bins of equal width.

    The weight below the cutoff is known: vocab - top_k tokens, or (1 - top_p) of the mass. A sample measures it well,
    because every token below the cutoff has a small weight.
    """
    i = tl.arange(0, SAMPLES)
    jitter = mix(i.to(tl.uint32)) % (vocab // SAMPLES).to(tl.uint32)
    ids = (i.to(tl.int64) * vocab // SAMPLES).to(tl.int32) + jitter.to(tl.int32)
    x = load_scaled(at, ids, ids < vocab, scale)
    counts = top_k > 0
    each = vocab.to(tl.float32) / SAMPLES
    # Tokens below 2^-40 of the top token have no mass.
    start = tl.maximum(floor, tl.min(tl.where(x > NEVER, x, top), 0))
    start = tl.where(counts, start, tl.maximum(start, top - 28.0))
    width = tl.maximum((top - start) / BINS, 1e-30)
    place = tl.minimum(((x - start) / width), BINS - 1.0).to(tl.int32)
    found = tl.histogram(tl.maximum(place, 0), BINS, mask=x >= start).to(tl.float32)

    # min_p removes the tokens below the floor before top_p is measured, so top_p of their mass is added back.
    under = tl.sum(tl.where(x < start, tl.where(counts, 1.0, tl.exp(x - top)), 0.0), 0)
    rest = ((1 - top_p) * total / each + top_p * tl.where(start > floor, 0.0, under)).to(tl.float32)
    rest = tl.where(counts, (vocab - top_k).to(tl.float32) / each, rest)
    edge = start + width * tl.arange(0, BINS)
    least, most = tl.exp(edge - top), tl.exp(edge + width - top)  # bounds of the weight of a token in the bin
    least, most = tl.where(counts, 1.0, least), tl.where(counts, 1.0, most)
    below_least = under + tl.cumsum(found * least, 0) - found * least
    below_most = under + tl.cumsum(found * most, 0) - found * most
    error = tl.sqrt(tl.cumsum(found * most * most, 0) - found * most * most + most * most)
    fits = below_most + _Z * error + _MISSED * most <= rest
    over = below_least - _Z * error >= rest
    lo = tl.maximum(floor, tl.max(tl.where(fits, edge, floor), 0))
    return lo, tl.maximum(lo, tl.min(tl.where(over, edge, INF), 0))


@kernel(do_not_specialize=["rounds"])
def collect(
    logits,  # [rows, vocab], rows `stride` apart
    stride,
    vocab,
    slots,  # [rows]
    table,  # int64 [slots, columns]
    lengths,  # int32 [rows]
    kinds,  # int32 [rows]
    bounds,  # float32 [rows, BOUNDS]
    sums,  # int64 [rows, SUMS]
    listed,  # int32 [rows, CAPACITY]
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
    if tl.load(kinds + row) != COLLECT:
        return
    top, floor = tl.load(bounds + row * BOUNDS + TOP), tl.load(bounds + row * BOUNDS + FLOOR)
    lo, hi = tl.load(bounds + row * BOUNDS + LOW), tl.load(bounds + row * BOUNDS + HIGH)
    slot = tl.load(slots + row).to(tl.int64)
    scale = scale_of(table, slot)
    k0, k1 = keys_of(table, slot, tl.load(lengths + row))
    draws, counts = hi <= top, top_k_of(table, slot) > 0
    weighs = (counts & draws) | ((counts == 0) & (top_p_of(table, slot) < 1))
    at = logits + row.to(tl.int64) * stride
    listed += row.to(tl.int64) * CAPACITY
    sums += row * SUMS

    ids = span * rounds * BLOCK + tl.arange(0, BLOCK)
    record = tl.full([], NEVER, tl.float32)
    value, token = tl.full([BLOCK], NEVER, tl.float32), ids
    from_floor = tl.zeros([BLOCK // _LANE], tl.float32)
    from_lo, from_hi = from_floor, from_floor
    for _ in tl.range(rounds, num_stages=STAGES):
        x = load_scaled(at, ids, ids < vocab, scale)
        if weighs:
            weight = tl.where(counts, 1.0, tl.exp(x - top))
            from_floor += _lane_sum(tl.where(x >= floor, weight, 0.0))
            from_lo += _lane_sum(tl.where(x >= lo, weight, 0.0))
            from_hi += _lane_sum(tl.where(x >= hi, weight, 0.0))
        if draws:
            u = uniform(ids, k0, k1)
            if any_beats(tl.where(x >= lo, x, NEVER), u, record):
                score = x + gumbel_of(u)
                better = (x >= hi) & (score > value)
                token, value = tl.where(better, ids, token), tl.where(better, score, value)
                record = tl.max(value, 0)
                append(ids, (x >= lo) & (x < hi) & (score >= record), listed, sums + NUM_LISTED, CAPACITY)
        else:
            append(ids, x >= lo, listed, sums + NUM_LISTED, CAPACITY)
        ids += BLOCK
    if weighs:
        tl.atomic_add(sums + FROM_FLOOR, (tl.sum(from_floor, 0) * UNIT).to(tl.int64), sem="relaxed")
        tl.atomic_add(sums + FROM_LOW, (tl.sum(from_lo, 0) * UNIT).to(tl.int64), sem="relaxed")
        tl.atomic_add(sums + FROM_HIGH, (tl.sum(from_hi, 0) * UNIT).to(tl.int64), sem="relaxed")
    if draws:
        winner_value, winner = best_of(value, token)
        at_span = row * tl.num_programs(1) + span
        tl.store(best + at_span, winner_value)
        tl.store(best_ids + at_span, winner)


@triton.jit
def append(ids, mask, listed, counter, CAPACITY: tl.constexpr):
    """Append the ids under the mask to the list. Their order is random; no result depends on it."""
    one = tl.zeros(ids.shape, tl.int64) + 1
    place = tl.atomic_add(counter + tl.zeros(ids.shape, tl.int32), one, mask=mask, sem="relaxed")
    tl.store(listed + place, ids, mask=mask & (place < CAPACITY))


@triton.jit
def _lane_sum(x):
    """Return sums of the neighbouring elements that one thread holds; they need fewer registers than `x`."""
    return tl.sum(tl.reshape(x, [x.shape[0] // _LANE, _LANE]), 1)
