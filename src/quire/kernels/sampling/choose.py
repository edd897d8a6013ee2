"""Choice of a token for each row of logits: greedy, a Gumbel-max draw, or a draw among the tokens that filters keep.

Two kernels serve greedy rows and unfiltered draws in one pass over the logits. Each program of the first kernel finds
the best token of a span of a row, and one program of the second takes the best of a row's spans. Ties go to the lowest
id. Rows with filters pass through both kernels too (kernels/sampling/filters.py says why) and through two more, in
which the other rows end at once. The parameters of a row are read on the device, from its slot, so a batch may mix all
kinds of rows, and a captured graph serves any mix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.jit import kernel
from quire.kernels.sampling import filtered_draw, filters
from quire.kernels.sampling.filters import (
    BOUNDS,
    COLLECT,
    FLOOR,
    FROM_FLOOR,
    HIGH,
    LOW,
    SETTLED,
    SUMS,
    TOP,
    WHOLE_ROW,
)
from quire.kernels.sampling.row import (
    COLUMNS,
    INF,
    LOWEST,
    NEVER,
    NO_TOKEN,
    NOT_FINITE,
    SAME_BITS,
    UNIT,
    best_of,
    contend,
    is_filtered,
    keys_of,
    log_min_p_of,
    scale_of,
    scaled,
    temperature_of,
    top_k_of,
    top_p_of,
)
from quire.kernels.target import target_of

_BLOCK = 1024  # tokens per iteration
_WARPS = 4
_STAGES = 3  # blocks in flight
# Programs per multiprocessor: as many as fit at once. A longer row gives each program several blocks.
_SCANNING = 6
_COLLECTING = 5  # with _REGISTERS each
_REGISTERS = 96  # per thread
_ROW_WARPS = 16  # of a kernel with one program per row


@dataclass(slots=True, frozen=True)
class Scratch:
    """Device memory that the sampling kernels of a step pass to each other, for R rows.

    It holds nothing between steps, so one object serves all steps of a stream.
    """

    best: torch.Tensor  # float32 [R, spans]
    best_ids: torch.Tensor  # int32 [R, spans]
    heads: torch.Tensor  # float32 [R, groups]
    weights: torch.Tensor  # float32 [R, groups]
    kinds: torch.Tensor  # int32 [R]
    bounds: torch.Tensor  # float32 [R, BOUNDS]
    sums: torch.Tensor  # int64 [R, SUMS]
    groups: torch.Tensor  # int32 [R, most groups]
    listed: torch.Tensor  # int32 [R, capacity]

    @classmethod
    def empty(cls, rows: int, vocab: int, device: torch.device) -> Scratch:
        """Allocate scratch memory for at most `rows` rows of `vocab` logits."""

        def of(dtype: torch.dtype, *width: int) -> torch.Tensor:
            return torch.empty(rows, *width, dtype=dtype, device=device)

        spans, groups = triton.cdiv(vocab, _BLOCK), triton.cdiv(vocab, filters.GROUP)
        return cls(
            of(torch.float32, spans),
            of(torch.int32, spans),
            of(torch.float32, groups),
            of(torch.float32, groups),
            of(torch.int32),
            of(torch.float32, BOUNDS.value),
            of(torch.int64, SUMS.value),
            of(torch.int32, filters.MOST_GROUPS),
            of(torch.int32, filters.CAPACITY),
        )


@kernel(do_not_specialize=["rounds"])  # one kernel for every batch size
def _scan(
    logits,  # [rows, vocab], rows `stride` apart
    stride,
    vocab,
    slots,  # [rows]
    table,  # int64 [slots, COLUMNS]
    lengths,  # int32 [rows]
    best,  # float32 [rows, spans]
    best_ids,  # int32 [rows, spans]
    heads,  # float32 [rows, groups]
    weights,  # float32 [rows, groups]
    rounds,  # blocks in a span
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, span = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    temperature, scale = temperature_of(table, slot), scale_of(table, slot)
    at = logits + row.to(tl.int64) * stride
    begin = span * rounds * BLOCK

    if is_filtered(table, slot):
        groups = row.to(tl.int64) * tl.cdiv(vocab, GROUP)  # of the previous rows
        weigh = (top_k_of(table, slot) == 0) & (top_p_of(table, slot) < 1)
        filters.survey(
            at, vocab, begin, scale, weigh, rounds, heads + groups, weights + groups, GROUP, BLOCK, STAGES
        )
    else:
        ids = begin + tl.arange(0, BLOCK)
        k0, k1 = keys_of(table, slot, tl.load(lengths + row))
        record = tl.full([], NEVER, tl.float32)
        value, token = tl.full([BLOCK], NEVER, tl.float32), ids  # the best of each lane, the first of equals
        sick = tl.zeros([BLOCK], tl.int1)  # lanes that have seen a NaN or +inf
        for _ in tl.range(rounds, num_stages=STAGES):
            raw = tl.load(at + ids, mask=ids < vocab, other=NEVER)
            sick |= (raw.to(tl.float32) < INF) == 0
            if temperature == 0.0:
                x = raw.to(tl.float32)
                token = tl.where(x > value, ids, token)
                value = tl.maximum(x, value)
            else:
                record, value, token = contend(scaled(raw, scale), ids, k0, k1, record, value, token)
            ids += BLOCK
        winner_value, winner = best_of(value, token)
        winner_value = tl.where(tl.max(sick.to(tl.int32), 0) > 0, INF, winner_value)
        place = row * tl.num_programs(1) + span
        tl.store(best + place, winner_value)
        tl.store(best_ids + place, winner)


@triton.jit
def _or_failure(token, top):
    """Return the token, or the failure that the row's best logit implies; INF stands for a NaN or +inf."""
    return tl.where(top == INF, NOT_FINITE, tl.where(top == NEVER, NO_TOKEN, token))


@kernel(do_not_specialize=["spans"])
def _settle(
    logits,
    stride,
    vocab,
    slots,
    table,
    best,  # float32 [rows, spans]
    best_ids,  # int32 [rows, spans]
    heads,  # float32 [rows, groups]
    weights,  # float32 [rows, groups]
    kinds,  # int32 [rows]
    bounds,  # float32 [rows, BOUNDS]
    sums,  # int64 [rows, SUMS]
    groups,  # int32 [rows, MOST_GROUPS]
    tokens,  # int32 [rows]
    spans,
    SPANS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    MOST_GROUPS: tl.constexpr,
    SAMPLES: tl.constexpr,
    BINS: tl.constexpr,
    CAPACITY: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (rows,). Choose the token of a row without filters, or the bounds of the cutoff of a row with filters."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    if is_filtered(table, slot) == 0:
        i = tl.arange(0, SPANS)
        value = tl.load(best + row * spans + i, mask=i < spans, other=NEVER)
        winner = tl.argmax(value, 0)  # the first of equals
        token = tl.load(best_ids + row * spans + winner)
        tl.store(tokens + row, _or_failure(token, tl.max(value, 0)))
        tl.store(kinds + row, SETTLED)
        return
    top_k, top_p, log_min_p = top_k_of(table, slot), top_p_of(table, slot), log_min_p_of(table, slot)
    count = tl.cdiv(vocab, GROUP)
    i = tl.arange(0, GROUPS)
    at_group = row.to(tl.int64) * count + i
    head = tl.load(heads + at_group, mask=i < count, other=NEVER)
    weighed = tl.where((top_k == 0) & (top_p < 1), count, 0)
    weight = tl.load(weights + at_group, mask=i < weighed, other=0.0)
    top = tl.max(head, 0)
    if (top == NEVER) | (top == INF):
        tl.store(tokens + row, _or_failure(0, top))
        tl.store(kinds + row, SETTLED)
        return
    floor = tl.maximum(top + log_min_p, LOWEST)
    lo, hi, mass = filters.bracket(
        logits + row.to(tl.int64) * stride, vocab, scale_of(table, slot), head, weight, top, floor,
        top_k, top_p, GROUP, SAMPLES, BINS, CAPACITY,
    )  # fmt: skip
    # The last kernel reads a few groups itself, unless it needs the mass below them.
    chosen = (head >= lo).to(tl.int32)
    few = tl.sum(chosen, 0)
    direct = (few <= MOST_GROUPS) & (hi > top)
    direct &= (top_k > 0) | (top_p >= 1) | (log_min_p == NEVER) | (lo == floor)
    if direct:
        tl.store(groups + row * MOST_GROUPS + tl.cumsum(chosen, 0) - 1, i, mask=chosen > 0)
    elif (top_k == 0) & (top_p >= 1):
        hi = lo  # min_p alone: the cutoff is the floor
    both = (hi <= top) & (top_k > 0) & (top_p < 1)  # the mass of the top_k tokens is unknown
    tl.store(kinds + row, tl.where(direct, few, tl.where(both, WHOLE_ROW, COLLECT)))
    tl.store(bounds + row * BOUNDS + TOP, top)
    tl.store(bounds + row * BOUNDS + FLOOR, floor)
    tl.store(bounds + row * BOUNDS + LOW, lo)
    tl.store(bounds + row * BOUNDS + HIGH, hi)
    tl.store(sums + row * SUMS + FROM_FLOOR, tl.where(direct, (mass * UNIT).to(tl.int64), 0))
    for j in tl.static_range(1, SUMS):
        tl.store(sums + row * SUMS + j, tl.zeros([], tl.int64))


def choose(
    logits: torch.Tensor,
    slots: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    scratch: Scratch,
    tokens: torch.Tensor,
    filtered: bool = True,
) -> None:
    """Choose a token for each row of logits and write it to `tokens`.

    Args:
        logits: [rows, vocab], the last dimension contiguous.
        slots: [rows].
        table: int64 [slots, COLUMNS], the parameters of each slot; floats as the bits of a float64. A temperature of 0
            means greedy.
        lengths: int32 [rows], the position of each draw, which seeds its noise.
        scratch: memory for at least as many rows, and for this vocabulary.
        tokens: written, int32 [rows]; NOT_FINITE or NO_TOKEN for a row without a valid choice.
        filtered: whether any row has filters; False saves two launches.

    Raises:
        ValueError: if `scratch` has too few rows.
    """
    rows, vocab = logits.shape
    if rows > scratch.bounds.shape[0]:
        raise ValueError(f"{rows} rows of logits, but scratch has memory for {scratch.bounds.shape[0]}")
    assert table.shape[1] == len(COLUMNS)
    target = target_of(logits.device)
    pdl = target.has_dependent_launch
    options = {"PDL": pdl, "launch_pdl": pdl, **SAME_BITS}
    # The largest number of spans, whatever the number of rows, so that one kernel serves every batch size.
    widest = triton.next_power_of_2(triton.cdiv(vocab, _BLOCK))
    inputs = logits, logits.stride(0), vocab, slots, table
    s = scratch
    rounds, spans = _split(rows, vocab, _SCANNING * target.sms)
    _scan[(rows, spans)](
        *inputs, lengths, s.best, s.best_ids, s.heads, s.weights, rounds,
        GROUP=filters.GROUP, BLOCK=_BLOCK, STAGES=_STAGES, num_warps=_WARPS, **options,
    )  # fmt: skip
    _settle[(rows,)](
        *inputs, s.best, s.best_ids, s.heads, s.weights, s.kinds, s.bounds, s.sums, s.groups, tokens, spans,
        SPANS=widest, GROUP=filters.GROUP, GROUPS=triton.next_power_of_2(triton.cdiv(vocab, filters.GROUP)),
        MOST_GROUPS=filters.MOST_GROUPS, SAMPLES=filters.SAMPLES, BINS=filters.BINS,
        CAPACITY=filters.CAPACITY, num_warps=_ROW_WARPS, **options,
    )  # fmt: skip
    if not filtered:
        return
    rounds, spans = _split(rows, vocab, _COLLECTING * target.sms)
    filters.collect[(rows, spans)](
        *inputs, lengths, s.kinds, s.bounds, s.sums, s.listed, s.best, s.best_ids, rounds,
        CAPACITY=filters.CAPACITY, BLOCK=_BLOCK, STAGES=_STAGES, num_warps=_WARPS, maxnreg=_REGISTERS, **options,
    )  # fmt: skip
    filtered_draw.draw[(rows,)](
        *inputs, lengths, s.kinds, s.bounds, s.sums, s.groups, s.listed, s.best, s.best_ids, tokens, spans,
        SPANS=widest, GROUP=filters.GROUP, MOST_GROUPS=filters.MOST_GROUPS, LISTING=filtered_draw.LISTING,
        FEW=filtered_draw.FEW, CAPACITY=filters.CAPACITY, BLOCK=filtered_draw.ROW_BLOCK,
        num_warps=_ROW_WARPS, **options,
    )  # fmt: skip


def _split(rows: int, vocab: int, programs: int) -> tuple[int, int]:
    """Return the blocks per program, and the programs per row, for about `programs` programs in all."""
    blocks = triton.cdiv(vocab, _BLOCK)
    rounds = triton.cdiv(blocks, max(programs // rows, 1))
    return rounds, triton.cdiv(blocks, rounds)
