"""A token for each row of logits in one reading of them: the best one, or a Gumbel-max draw.

Two stages: each program finds the best of BLOCK tokens of a row; then one program per row finds the
best of these. Ties go to the lowest id. The noise is that of sampling/noise.py, hashed in uint32. What
a row wants is read from the slot columns, so a batch may mix greedy rows and draws.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 4096


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
    """log(1 - u) for 0 < u < 1 to a few ulp: the rounding of 1 - u is divided out again."""
    rest = 1.0 - u
    lost = tl.where(rest == 1.0, 1.0, 1.0 - rest)
    return tl.where(rest == 1.0, -u, tl.log(rest) * (u / lost))


@triton.jit
def _best_of_block(
    logits,  # [rows, vocab], rows `stride` apart
    stride,
    vocab,
    slots,  # [rows]
    temperatures,  # float64, a column with a number per slot, TABLE apart; 0: greedy
    seeds_low,  # int64, likewise
    seeds_high,  # int64, likewise
    num_tokens,  # int32 [slots]
    best,  # float32 [rows, blocks]
    best_ids,  # int32 [rows, blocks]
    TABLE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row, block = tl.program_id(0), tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row.to(tl.int64) * stride + ids, mask=ids < vocab, other=float("-inf"))
    x = x.to(tl.float32)
    slot = tl.load(slots + row).to(tl.int64)
    temperature = tl.load(temperatures + slot * TABLE).to(tl.float32)
    if temperature == 0.0:
        x = tl.where(x == x, x, float("inf"))  # torch's order: nothing is above a nan
    else:
        x = tl.div_rn(x, temperature)
        x = tl.where(x == x, x, float("-inf"))
        x = tl.minimum(x, 3.4028234663852886e38)  # so that no draw depends on inf - inf
        low = tl.load(seeds_low + slot * TABLE).to(tl.uint32)
        high = tl.load(seeds_high + slot * TABLE).to(tl.uint32)
        position = tl.load(num_tokens + slot).to(tl.uint32)
        k0 = _mix(_mix(_mix(low ^ 0x9E3779B9) ^ high) ^ position)
        k1 = _mix(_mix(_mix(low ^ 0x3C6EF372) ^ high) ^ position)
        bits = _mix(_mix(ids.to(tl.uint32) ^ k0) ^ k1) & 0x7FFFFFFF
        u = tl.minimum(bits.to(tl.float32) + 0.5, 2147483520.0) * 4.656612873077393e-10  # 2^31 - 128, 2^-31
        x -= tl.log(-_log1p_of_minus(u))
    value, at = tl.max(x, 0, return_indices=True)
    place = row * tl.num_programs(1) + block
    tl.store(best + place, value)
    tl.store(best_ids + place, block * BLOCK + at)


@triton.jit
def _best_of_row(
    best,  # float32 [rows, blocks]
    best_ids,  # int32 [rows, blocks]
    tokens,  # int32 [rows]
    blocks,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    value = tl.load(best + row * blocks + at, mask=at < blocks, other=float("-inf"))
    winner = tl.argmax(value, 0)
    tl.store(tokens + row, tl.load(best_ids + row * blocks + winner))


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
    blocks = triton.cdiv(vocab, _BLOCK)
    best = torch.empty(rows, blocks, dtype=torch.float32, device=logits.device)
    best_ids = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int32, device=logits.device)
    _best_of_block[(rows, blocks)](
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
        TABLE=temperatures.stride(0),
        BLOCK=_BLOCK,
        num_warps=8,
    )
    _best_of_row[(rows,)](best, best_ids, tokens, blocks, BLOCK=triton.next_power_of_2(blocks), num_warps=1)
    return tokens
