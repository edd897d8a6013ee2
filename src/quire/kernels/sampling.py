"""A token for each row of logits in one reading of them: the best one, or a Gumbel-max draw.

Two stages: each program finds the best token of a span of a row; then one program per row finds the
best of these. Ties go to the lowest id. The noise is that of sampling/noise.py, hashed in uint32. What
a row wants is read from the slot columns, so a batch may mix greedy rows and draws.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024  # tokens at a time
_WARPS = 4
_PROGRAMS = 132 * 8  # enough to fill a large GPU; beyond that a program takes several blocks in turn
_MOST_ROUNDS = 16


@triton.jit
def _mix(x):
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


@triton.jit
def _log1p_of_minus(u):
    """log(1 - u) for 0 < u < 1: a series where 1 - u would lose the digits of u."""
    series = 1 / 7 + u * (1 / 8)
    series = 1 / 5 + u * (1 / 6 + u * series)
    series = 1 / 3 + u * (1 / 4 + u * series)
    series = 1.0 + u * (1 / 2 + u * series)
    return tl.where(u < 0.125, -u * series, tl.log(1.0 - u))


@triton.jit(do_not_specialize=["rounds"])  # one kernel for every batch size
def _best_of_span(
    logits,  # [rows, vocab], rows `stride` apart
    stride,
    vocab,
    slots,  # [rows]
    temperatures,  # float64, a column with a number per slot, TABLE apart; 0: greedy
    seeds_low,  # int64, likewise
    seeds_high,  # int64, likewise
    num_tokens,  # int32 [slots]
    best,  # float32 [rows, spans]
    best_ids,  # int32 [rows, spans]
    rounds,  # blocks in a span
    TABLE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row, span = tl.program_id(0), tl.program_id(1)
    begin = span * rounds * BLOCK
    slot = tl.load(slots + row).to(tl.int64)
    temperature = tl.load(temperatures + slot * TABLE).to(tl.float32)
    low = tl.load(seeds_low + slot * TABLE).to(tl.uint32)
    high = tl.load(seeds_high + slot * TABLE).to(tl.uint32)
    position = tl.load(num_tokens + slot).to(tl.uint32)
    k0 = _mix(_mix(_mix(low ^ 0x9E3779B9) ^ high) ^ position)
    k1 = _mix(_mix(_mix(low ^ 0x3C6EF372) ^ high) ^ position)
    scale = 1.0 / tl.where(temperature == 0.0, 1.0, temperature)

    # Each lane keeps the best of its own ids, which ascend; they are compared once, at the end.
    ids = begin + tl.arange(0, BLOCK)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    top_ids = ids
    at = logits + row.to(tl.int64) * stride
    for _ in range(rounds):
        x = tl.load(at + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
        if temperature == 0.0:
            x = tl.where(x == x, x, float("inf"))  # torch's order: nothing is above a nan
        else:
            x = tl.where(x == x, x * scale, float("-inf"))
            x = tl.minimum(x, 3.4028234663852886e38)  # a finite number, as all noise is
            bits = _mix(_mix(ids.to(tl.uint32) ^ k0) ^ k1) & 0x7FFFFFFF
            u = bits.to(tl.int32).to(tl.float32) + 0.5
            u = tl.minimum(u, 2147483520.0) * 4.656612873077393e-10  # 2^31 - 128, 2^-31
            x -= tl.log(-_log1p_of_minus(u))
        better = x > top
        top = tl.where(better, x, top)
        top_ids = tl.where(better, ids, top_ids)
        ids += BLOCK
    value = tl.max(top, 0)
    place = row * tl.num_programs(1) + span
    tl.store(best + place, value)
    tl.store(best_ids + place, tl.min(tl.where(top == value, top_ids, 0x7FFFFFFF), 0))


@triton.jit(do_not_specialize=["spans"])
def _best_of_row(
    best,  # float32 [rows, spans]
    best_ids,  # int32 [rows, spans]
    tokens,  # int32 [rows]
    spans,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    value = tl.load(best + row * spans + at, mask=at < spans, other=float("-inf"))
    winner = tl.argmax(value, 0)  # the first of equals
    tl.store(tokens + row, tl.load(best_ids + row * spans + winner))


def choose(
    logits: torch.Tensor,
    slots: torch.Tensor,
    temperatures: torch.Tensor,
    seeds_low: torch.Tensor,
    seeds_high: torch.Tensor,
    num_tokens: torch.Tensor,
) -> torch.Tensor:
    """int32 [rows]: the token of each row of `logits` [rows, vocab] (last dimension contiguous).

    `temperatures` float64 and the seeds' halves int64 are columns of one table, by slot; a temperature
    of 0 asks for the best token. `num_tokens` int32 [slots] is the position of the draw.
    """
    rows, vocab = logits.shape
    rounds = min(max(rows * vocab // (_BLOCK * _PROGRAMS), 1), _MOST_ROUNDS)
    spans = triton.cdiv(vocab, _BLOCK * rounds)
    best = torch.empty(rows, spans, dtype=torch.float32, device=logits.device)
    best_ids = torch.empty(rows, spans, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int32, device=logits.device)
    _best_of_span[(rows, spans)](
        logits,
        logits.stride(0),
        vocab,
        slots,
        temperatures,
        seeds_low,
        seeds_high,
        num_tokens,
        best,
        best_ids,
        rounds,
        TABLE=temperatures.stride(0),
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )
    # the widest a row can be split, whatever the number of rows: one kernel for every batch size
    widest = triton.next_power_of_2(triton.cdiv(vocab, _BLOCK))
    _best_of_row[(rows,)](best, best_ids, tokens, spans, BLOCK=widest, num_warps=1)
    return tokens
