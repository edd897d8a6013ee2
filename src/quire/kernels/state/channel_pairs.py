"""What the tokens of a chunk do to each other under the delta rule with a decay per channel of the key.

As in kernels/state/pairs.py, but each channel c of the keys has its own sums G of log decays within the chunk:

    L[i, j] = beta_i sum_c k_ic k_jc exp(G_ic - G_jc) for j < i,  T = (I + L)^-1 diag(beta)
    A[i, j] = sum_c q_ic k_jc exp(G_ic - G_jc) for j <= i

The exponential is inside the sum. It splits into one factor per token, exp(G_i - R) exp(R - G_j), but only an R between
G_j and G_i keeps both at most 1. So the chunk is halved again and again. On each level R is the sum at the end of the
first half, which is right for all pairs with j in the first half and i in the second half of the same block. A level is
one matrix product of whole chunks, of which the pairs of that level count. Nothing overflows, whatever the decays, and
a factor that underflows belongs to a product that does.

The factors in front of the state and into the state are at most 1 too. They are multiplied into queries and keys here,
so that the pass over the chunks (kernels/state/chunks.py) has no exponentials.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.jit import kernel
from quire.kernels.state.pairs import chunk_of, inverse
from quire.kernels.state.rows import StateRows, rows_pad


@kernel(do_not_specialize=["tokens", "rows"])
def _relate_channels(
    q,  # [tokens, key heads, K], strides q_token and q_head
    k,  # the same, with strides k_token and k_head
    gate,  # float32 [tokens, heads, K], strides g_token and g_head
    beta,  # float32 [tokens, heads], contiguous
    starts,  # int32 [rows + 1]
    solved,  # T: [tokens, heads, CHUNK]
    inner,  # A: [tokens, heads, CHUNK]
    decayed,  # [3, tokens, heads, K], see ChannelPairs
    lost,  # float32 [slots, heads, K]
    scale,
    tokens,
    rows,
    heads,
    ratio,
    short,
    q_token,
    q_head,
    k_token,
    k_head,
    g_token,
    g_head,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,  # CHUNK = 2 ** LEVELS
    UNIT: tl.constexpr,
    WIDE: tl.constexpr,
    SMALL_PRECISION: tl.constexpr,
) -> None:
    """Grid (slots for chunks, heads)."""
    slot, head = tl.program_id(0), tl.program_id(1)
    begin, first, last = chunk_of(starts, rows, slot, CHUNK, ROWS_PAD)
    if (begin >= last) | (last - first <= short):
        return
    place = tl.arange(0, CHUNK)
    at = begin.to(tl.int64) + place
    there = at < last
    from_q = q + at[:, None] * q_token + (head // ratio) * q_head
    from_k = k + at[:, None] * k_token + (head // ratio) * k_head
    of_q, of_k = tl.full([CHUNK], 1.0, tl.float32), tl.full([CHUNK], 1.0, tl.float32)
    if UNIT:
        every = tl.arange(0, K_PAD)[None, :]
        a = tl.load(from_q + every, mask=there[:, None] & (every < K), other=0.0).to(tl.float32)
        b = tl.load(from_k + every, mask=there[:, None] & (every < K), other=0.0).to(tl.float32)
        of_q = tl.rsqrt(tl.sum(a * a, 1) + 1e-6)
        of_k = tl.rsqrt(tl.sum(b * b, 1) + 1e-6)
    of_q = of_q * scale
    kind = solved.dtype.element_ty
    among_q, among_k = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
    part = tokens * heads.to(tl.int64) * K
    for block in range(0, K_PAD, BLOCK_K):
        key = block + tl.arange(0, BLOCK_K)
        inside = there[:, None] & (key < K)[None, :]
        query = tl.load(from_q + key[None, :], mask=inside, other=0.0).to(tl.float32) * of_q[:, None]
        known = tl.load(from_k + key[None, :], mask=inside, other=0.0).to(tl.float32) * of_k[:, None]
        from_gate = gate + at[:, None] * g_token + head * g_head + key[None, :]
        decays = tl.load(from_gate, mask=inside, other=0.0)
        sums, total = tl.cumsum(decays, 0), tl.sum(decays, 0)
        to, grown = decayed + (at[:, None] * heads + head) * K + key[None, :], tl.exp(sums)
        tl.store(to, (query * grown).to(kind), mask=inside)
        tl.store(to + part, (known * grown).to(kind), mask=inside)
        tl.store(to + 2 * part, (known * tl.exp(total[None, :] - sums)).to(kind), mask=inside)
        tl.store(lost + (slot.to(tl.int64) * heads + head) * K + key, tl.exp(total), mask=key < K)
        among_q += tl.where(place[:, None] == place[None, :], tl.sum(query * known, 1)[:, None], 0.0)
        for level in tl.static_range(LEVELS):
            number = place // (1 << level)  # of the half that holds a token
            middle = tl.broadcast_to((number // 2 * 2 + 1)[:, None] * (1 << level) - 1, [CHUNK, BLOCK_K])
            apart = sums - tl.gather(sums, middle, 0)
            fade = tl.exp(-tl.abs(apart))
            faded = (known * fade).to(kind)
            keys = tl.trans(faded)
            joins = (number[:, None] % 2 == 1) & (number[:, None] == number[None, :] + 1)
            among_q += tl.where(joins, tl.dot((query * fade).to(kind), keys, input_precision="ieee"), 0.0)
            among_k += tl.where(joins, tl.dot(faded, keys, input_precision="ieee"), 0.0)
    rate = tl.load(beta + at * heads + head, mask=there, other=0.0)
    to = (at[:, None] * heads + head) * CHUNK + place[None, :]
    tl.store(inner + to, among_q.to(kind), mask=there[:, None])
    own = inverse(among_k * -rate[None, :], CHUNK, WIDE, SMALL_PRECISION) * rate[:, None]
    tl.store(solved + to, own.to(kind), mask=there[:, None])


@dataclass(frozen=True, slots=True)
class ChannelPairs:
    """The result of `relate_channels`; rows of at most `short` tokens and padding are undefined.

    Attributes:
        solved: T, [tokens, heads, chunk].
        inner: A, [tokens, heads, chunk].
        decayed: [3, tokens, heads, key dim]: queries and keys times exp(G), and keys times exp(G_last - G).
        lost: float32 [slots, heads, key dim]: exp(G_last) of each chunk; `chunk_of` numbers the slots.
    """

    solved: torch.Tensor
    inner: torch.Tensor
    decayed: torch.Tensor
    lost: torch.Tensor


def relate_channels(
    q: torch.Tensor,
    k: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
    rows: StateRows,
    scale: float,
    unit: bool,
    short: int,
    chunk: int,
) -> ChannelPairs:
    """Return what tokens of the same chunk do to each other, in rows with more than `short` tokens."""
    (tokens, heads, depth), count, half = gate.shape, len(rows.index), q.element_size() == 2
    slots, k_pad = tokens // chunk + count, max(triton.next_power_of_2(depth), 16)
    make = q.new_empty
    pairs = ChannelPairs(
        make(tokens, heads, chunk),
        make(tokens, heads, chunk),
        make(3, tokens, heads, depth),
        make(slots, heads, depth, dtype=torch.float32),
    )
    _relate_channels[(slots, heads)](
        q, k, gate, beta, rows.starts, pairs.solved, pairs.inner, pairs.decayed, pairs.lost, scale, tokens, count, heads,
        heads // q.shape[1], short,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), gate.stride(0), gate.stride(1),
        K=depth, K_PAD=k_pad, BLOCK_K=min(k_pad, 64), ROWS_PAD=rows_pad(count), CHUNK=chunk,
        LEVELS=chunk.bit_length() - 1, UNIT=unit, WIDE=tl.float16 if half else tl.float32,
        SMALL_PRECISION="tf32" if half else "ieee", num_warps=4,
    )  # fmt: skip
    return pairs
