"""A token for each row of logits: the best one, a Gumbel-max draw, or a draw among what the filters keep.

Two kernels serve greedy rows and plain draws in one reading of the logits: each program of the first finds
the best token of a span of a row; one program of the second takes the best of a row's spans. Ties go to
the lowest id. Rows with filters go through both as well (kernels/sampling/filters.py says what for), and two more
kernels, in which all other rows end at once. What a row wants is read from the slots' parameters on the
device, so a batch may mix all kinds, and one captured graph serves any mix of so many rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.jit import kernel
from quire.kernels.sampling import filtered_draw, filters
from quire.kernels.sampling.filters import BOUNDS, COLLECT, SETTLED, SUMS, WHOLE_ROW
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

_BLOCK = 1024  # tokens at a time
_WARPS = 4
_STAGES = 3  # blocks on their way while one is worked on
# Programs per multiprocessor, as many as it holds at once; beyond that a program takes several blocks.
_SCANNING = 6
_COLLECTING = 5  # with _REGISTERS each
_REGISTERS = 96
_ROW_WARPS = 16  # of a kernel with one program for a row


@dataclass(slots=True, frozen=True)
class Scratch:
    """Device memory that the kernels of a step hand to each other; R rows, V tokens. Holds nothing between
    steps, so one serves all steps of a stream."""

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
    num_tokens,  # int32 [slots]
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
        groups = row.to(tl.int64) * tl.cdiv(vocab, GROUP)  # of the rows before
        weigh = (top_k_of(table, slot) == 0) & (top_p_of(table, slot) < 1)
        filters.survey(
            at, vocab, begin, scale, weigh, rounds, heads + groups, weights + groups, GROUP, BLOCK, STAGES
        )
    else:
        ids = begin + tl.arange(0, BLOCK)
        k0, k1 = keys_of(table, slot, num_tokens)
        record = tl.full([], NEVER, tl.float32)
        value, token = tl.full([BLOCK], NEVER, tl.float32), ids  # each lane's best, the first of equals
        sick = tl.zeros([BLOCK], tl.int1)  # lanes that met a NaN or +inf
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
    """The token, unless the row's best, which is INF where a logit is NaN or +inf, allows none."""
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
    """The token of a row without filters; for one with filters, between which bounds its cutoff lies."""
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
    # A few groups are looked at by the last kernel itself, if it need not know the mass below them.
    chosen = (head >= lo).to(tl.int32)
    few = tl.sum(chosen, 0)
    direct = (few <= MOST_GROUPS) & (hi > top)
    direct &= (top_k > 0) | (top_p >= 1) | (log_min_p == NEVER) | (lo == floor)
    if direct:
        tl.store(groups + row * MOST_GROUPS + tl.cumsum(chosen, 0) - 1, i, mask=chosen > 0)
    elif (top_k == 0) & (top_p >= 1):
        hi = lo  # min_p alone: everything that is kept is known
    both = (hi <= top) & (top_k > 0) & (top_p < 1)  # the mass of the top_k tokens is not known
    tl.store(kinds + row, tl.where(direct, few, tl.where(both, WHOLE_ROW, COLLECT)))
    tl.store(bounds + row * BOUNDS, top)
    tl.store(bounds + row * BOUNDS + 1, floor)
    tl.store(bounds + row * BOUNDS + 2, lo)
    tl.store(bounds + row * BOUNDS + 3, hi)
    tl.store(sums + row * SUMS, tl.where(direct, (mass * UNIT).to(tl.int64), 0))
    for j in tl.static_range(1, SUMS):
        tl.store(sums + row * SUMS + j, tl.zeros([], tl.int64))


def choose(
    logits: torch.Tensor,
    slots: torch.Tensor,
    table: torch.Tensor,
    num_tokens: torch.Tensor,
    scratch: Scratch,
    tokens: torch.Tensor,
    filtered: bool = True,
) -> None:
    """Into `tokens` int32 [rows]: the token of each row of `logits` [rows, vocab] (last dimension contiguous).

    `table` int64 [slots, COLUMNS] holds each slot's parameters, floats as the bits of float64; a
    temperature of 0 asks for the best token. `num_tokens` int32 [slots] is the position of the draw.
    `filtered` False says that no row has filters, which saves two launches.
    """
    rows, vocab = logits.shape
    if rows > scratch.bounds.shape[0]:
        raise ValueError(f"{rows} rows of logits, but scratch memory for {scratch.bounds.shape[0]}")
    assert table.shape[1] == len(COLUMNS)
    target = target_of(logits.device)
    pdl = target.has_dependent_launch
    how = {"PDL": pdl, "launch_pdl": pdl, **SAME_BITS}
    # The widest a row can be split, whatever the number of rows: one kernel for every batch size.
    widest = triton.next_power_of_2(triton.cdiv(vocab, _BLOCK))
    given = logits, logits.stride(0), vocab, slots, table
    s = scratch
    rounds, spans = _split(rows, vocab, _SCANNING * target.sms)
    _scan[(rows, spans)](
        *given, num_tokens, s.best, s.best_ids, s.heads, s.weights, rounds,
        GROUP=filters.GROUP, BLOCK=_BLOCK, STAGES=_STAGES, num_warps=_WARPS, **how,
    )  # fmt: skip
    _settle[(rows,)](
        *given, s.best, s.best_ids, s.heads, s.weights, s.kinds, s.bounds, s.sums, s.groups, tokens, spans,
        SPANS=widest, GROUP=filters.GROUP, GROUPS=triton.next_power_of_2(triton.cdiv(vocab, filters.GROUP)),
        MOST_GROUPS=filters.MOST_GROUPS, SAMPLES=filters.SAMPLES, BINS=filters.BINS,
        CAPACITY=filters.CAPACITY, num_warps=_ROW_WARPS, **how,
    )  # fmt: skip
    if not filtered:
        return
    rounds, spans = _split(rows, vocab, _COLLECTING * target.sms)
    filters.collect[(rows, spans)](
        *given, num_tokens, s.kinds, s.bounds, s.sums, s.listed, s.best, s.best_ids, rounds,
        CAPACITY=filters.CAPACITY, BLOCK=_BLOCK, STAGES=_STAGES, num_warps=_WARPS, maxnreg=_REGISTERS, **how,
    )  # fmt: skip
    filtered_draw.draw[(rows,)](
        *given, num_tokens, s.kinds, s.bounds, s.sums, s.groups, s.listed, s.best, s.best_ids, tokens, spans,
        SPANS=widest, GROUP=filters.GROUP, MOST_GROUPS=filters.MOST_GROUPS, LISTING=filtered_draw.LISTING,
        FEW=filtered_draw.FEW, CAPACITY=filters.CAPACITY, BLOCK=filtered_draw.ROW_BLOCK,
        num_warps=_ROW_WARPS, **how,
    )  # fmt: skip


def _split(rows: int, vocab: int, programs: int) -> tuple[int, int]:
    """Blocks that a program takes, and programs to a row: about so many programs in all."""
    blocks = triton.cdiv(vocab, _BLOCK)
    rounds = triton.cdiv(blocks, max(programs // rows, 1))
    return rounds, triton.cdiv(blocks, rounds)
