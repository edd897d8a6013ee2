"""top_k, top_p and min_p without a sort: bounds of what a row keeps, and a list of what is in doubt.

What is kept is what sampling/filters.py keeps: the tokens at or above a cutoff, no more and no less.

    survey    the largest logit (head) of each group of tokens, and its sum of exp: the first reading
    bracket   bounds of the cutoff: the k-th head lies at or below the k-th token, and where heads alone
              have the mass that top_p asks for, so have the tokens above the last of them. That is tight
              where few tokens are kept: only groups whose head is above the bound are looked at again.
              Where many are kept, a sample of the row tells between which two logits the cutoff lies (with
              a margin of `_Z` standard errors).
    collect   for those rows, a second reading: tokens above the bracket are kept for certain and drawn from
              at once; of those inside it, only the few that score higher than these are listed
    draw      (kernels/sampling/filtered_draw.py) decides exactly, over the list

Nothing rests on the sample being right: `draw` finds out if it was not, and then searches the whole row.
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

GROUP = 64  # tokens with a head
MOST_GROUPS = 256  # of a row to be looked at again one by one
SAMPLES = 4096
BINS = 1024
CAPACITY = 4096  # of a row's list of tokens

# What a row needs after `_settle`; a positive number: so many groups are to be looked at.
SETTLED = tl.constexpr(0)
COLLECT = tl.constexpr(-1)
WHOLE_ROW = tl.constexpr(-2)  # neither a list nor a bracket helps
BOUNDS = tl.constexpr(4)  # top, floor (what min_p leaves), lo, hi
# Weight (mass, or UNIT for each token) from the floor, lo and hi on; number of tokens listed.
SUMS = tl.constexpr(4)
_Z = tl.constexpr(4.0)
_MISSED = tl.constexpr(8.0)  # so many tokens just below a bound may have escaped the sample: (Z^2) / 2
_HALVINGS = tl.constexpr(12)  # of the range of heads
_LANE = tl.constexpr(8)


@triton.jit
def survey(
    at, vocab, begin, scale, weigh, rounds, heads, weights,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """heads, weights: this row's. `weigh`: the sums of exp(logit - head) are wanted too.

    The head of a group with a NaN or +inf is INF.
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
            reference = tl.maximum(head, LOWEST)  # finite, where a whole group is out
            tl.store(weights + group, tl.sum(tl.exp(x - reference[:, None]), 1), mask=inside)
        group += BLOCK // GROUP


@triton.jit
def bracket(
    at, vocab, scale, head, weight, top, floor, top_k, top_p,
    GROUP: tl.constexpr, SAMPLES: tl.constexpr, BINS: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """lo <= cutoff; hi, from which on all tokens are kept (above top: none is known to be); all mass."""
    lo = floor
    hi = tl.full([], INF, tl.float32)
    above = tl.exp(head - top)
    total = tl.sum(above * weight, 0)
    counts = top_k > 0
    if counts | (top_p < 1):
        above = tl.where(counts, (head > NEVER).to(tl.float32), above)
        # In float32, so a little more is asked for than needed: that can only lower the bound.
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
        # If most groups have tokens above the bound, far too many tokens are above it.
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
    """Bounds from a sample, one token from each of SAMPLES strata, counted in bins of equal width.

    What is known is the weight below the cutoff: vocab - top_k tokens, or (1 - top_p) of the mass. Tokens
    below the cutoff all weigh little, so a sample measures it well.
    """
    i = tl.arange(0, SAMPLES)
    jitter = mix(i.to(tl.uint32)) % (vocab // SAMPLES).to(tl.uint32)
    ids = (i.to(tl.int64) * vocab // SAMPLES).to(tl.int32) + jitter.to(tl.int32)
    x = load_scaled(at, ids, ids < vocab, scale)
    counts = top_k > 0
    each = vocab.to(tl.float32) / SAMPLES
    # Below a 2^-40th of the top token there is no mass.
    start = tl.maximum(floor, tl.min(tl.where(x > NEVER, x, top), 0))
    start = tl.where(counts, start, tl.maximum(start, top - 28.0))
    width = tl.maximum((top - start) / BINS, 1e-30)
    place = tl.minimum(((x - start) / width), BINS - 1.0).to(tl.int32)
    found = tl.histogram(tl.maximum(place, 0), BINS, mask=x >= start).to(tl.float32)

    # min_p takes out what is below the floor before top_p is measured: p of that mass is made up for.
    under = tl.sum(tl.where(x < start, tl.where(counts, 1.0, tl.exp(x - top)), 0.0), 0)
    rest = ((1 - top_p) * total / each + top_p * tl.where(start > floor, 0.0, under)).to(tl.float32)
    rest = tl.where(counts, (vocab - top_k).to(tl.float32) / each, rest)
    edge = start + width * tl.arange(0, BINS)
    least, most = tl.exp(edge - top), tl.exp(edge + width - top)  # that a token of the bin may weigh
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
    num_tokens,  # int32 [slots]
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
    top, floor = tl.load(bounds + row * BOUNDS), tl.load(bounds + row * BOUNDS + 1)
    lo, hi = tl.load(bounds + row * BOUNDS + 2), tl.load(bounds + row * BOUNDS + 3)
    slot = tl.load(slots + row).to(tl.int64)
    scale = scale_of(table, slot)
    k0, k1 = keys_of(table, slot, num_tokens)
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
                append(ids, (x >= lo) & (x < hi) & (score >= record), listed, sums + 3, CAPACITY)
        else:
            append(ids, x >= lo, listed, sums + 3, CAPACITY)
        ids += BLOCK
    if weighs:
        tl.atomic_add(sums, (tl.sum(from_floor, 0) * UNIT).to(tl.int64), sem="relaxed")
        tl.atomic_add(sums + 1, (tl.sum(from_lo, 0) * UNIT).to(tl.int64), sem="relaxed")
        tl.atomic_add(sums + 2, (tl.sum(from_hi, 0) * UNIT).to(tl.int64), sem="relaxed")
    if draws:
        winner_value, winner = best_of(value, token)
        at_span = row * tl.num_programs(1) + span
        tl.store(best + at_span, winner_value)
        tl.store(best_ids + at_span, winner)


@triton.jit
def append(ids, mask, listed, counter, CAPACITY: tl.constexpr):
    """Adds ids to the list. Their order depends on chance; nothing that follows depends on the order."""
    one = tl.zeros(ids.shape, tl.int64) + 1
    place = tl.atomic_add(counter + tl.zeros(ids.shape, tl.int32), one, mask=mask, sem="relaxed")
    tl.store(listed + place, ids, mask=mask & (place < CAPACITY))


@triton.jit
def _lane_sum(x):
    """Sums of what lies in one thread: fewer registers hold them than all of `x`."""
    return tl.sum(tl.reshape(x, [x.shape[0] // _LANE, _LANE]), 1)
