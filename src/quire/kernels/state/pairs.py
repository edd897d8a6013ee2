"""What the tokens of a chunk do to each other under the delta rule, for all chunks of all prompts at once.

With L[i, j] = beta_i (k_i . k_j) exp(G_i - G_j) for j < i (layers/state/recurrence.py), this computes per head and chunk

    T = (I + L)^-1 diag(beta)  and  A[i, j] = (q_i . k_j) exp(G_i - G_j) for j <= i

and the factors of each token. T is computed as diag(beta) (I + K)^-1, where K has the rates of columns instead of rows:
a thread has 2 rows but 16 columns, so fewer numbers wait for the end. What depends on the state is left to
kernels/state/chunks.py. A program computes one chunk of one value head. The products of queries and keys are the same for
all value heads of a key head, but take less than keeping them in registers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.jit import kernel
from quire.kernels.state.rows import StateRows, rows_pad

FACTORS = 4  # numbers per token and head: of q, of k in front of the state, of k into the state, and the chunk's decay
_REGISTERS = 168  # of a thread, with which three programs run on a multiprocessor


@triton.jit
def chunk_of(starts, rows, slot, CHUNK: tl.constexpr, ROWS_PAD: tl.constexpr):
    """Return the first token of the chunk with number `slot`, the first token of its row, and the row's end.

    Row r owns the numbers from starts[r] // CHUNK + r on, which are enough for its chunks wherever it starts. A number
    without a chunk gets a first token at or behind the end.
    """
    index = tl.arange(0, ROWS_PAD)
    before = tl.load(starts + index, mask=index < rows, other=2147483647)
    row = tl.sum(((before // CHUNK + index <= slot) & (index < rows)).to(tl.int32), 0) - 1
    first, last = tl.load(starts + row), tl.load(starts + row + 1)
    return first + (slot - first // CHUNK - row) * CHUNK, first, last


@triton.jit
def _joined(x, i, j, SIZE: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr):
    """Double the blocks of `x` that are solved, from SIZE; i and j number rows and columns. See `inverse`."""
    inside = i // (2 * SIZE) == j // (2 * SIZE)
    joins = inside & (i // SIZE != j // SIZE)
    # With the joining part among the factors, products are the same: it has no rows where it has columns.
    narrow = tl.where(inside, x, 0.0).to(WIDE)
    middle = tl.dot(tl.where(joins, x, 0.0).to(WIDE), narrow, input_precision=PRECISION)
    return tl.dot(narrow, middle.to(WIDE), tl.where(joins, 0.0, x), input_precision=PRECISION)


@triton.jit
def inverse(minus, CHUNK: tl.constexpr, WIDE: tl.constexpr, SMALL_PRECISION: tl.constexpr):
    """Return (I - minus)^-1 of a strictly lower triangular float32 [CHUNK, CHUNK], in float32.

    The inverse X of the block-diagonal part grows by X M X, where M is the part of `minus` that joins two blocks, from
    blocks of 4 to 16 in small products, then to the chunk in products of type WIDE. One matrix holds X in its blocks and
    `minus` elsewhere. With keys of length 1 and rates of at most 1 all numbers stay small: each X is what tokens of a
    block do to each other.
    """
    count: tl.constexpr = CHUNK // 16
    number = tl.arange(0, count)
    diagonal = (number[:, None] == number[None, :])[:, None, :, None]
    blocks = tl.sum(tl.where(diagonal, tl.reshape(minus, [count, 16, count, 16]), 0.0), 2)
    i, j = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    solved = i // 4 == j // 4
    power = tl.where(solved, blocks, 0.0)
    x = power + tl.where(i == j, 1.0, 0.0)
    square = tl.dot(power, power, input_precision=SMALL_PRECISION)
    x = tl.where(solved, tl.dot(square, x, x, input_precision=SMALL_PRECISION), blocks)
    for step in tl.static_range(2):
        x = _joined(x, i, j, 4 << step, tl.float32, SMALL_PRECISION)
    whole = tl.reshape(tl.broadcast_to(x[:, :, None, :], [count, 16, count, 16]), [CHUNK, CHUNK])
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    whole = tl.where(i // 16 == j // 16, whole, minus)
    for step in tl.static_range(3):
        if (16 << step) < CHUNK:
            whole = _joined(whole, i, j, 16 << step, WIDE, "ieee")
    return whole


@kernel(do_not_specialize=["tokens", "rows"])
def _relate(
    q,  # [tokens, key heads, K], strides q_token and q_head
    k,  # the same, with strides k_token and k_head
    gate,  # float32 [tokens, heads], strides g_token and g_head
    beta,  # float32 [tokens, heads], contiguous
    starts,  # int32 [rows + 1]
    solved,  # T: [tokens, heads, CHUNK]
    inner,  # A: [tokens, heads, CHUNK]
    factors,  # float32 [FACTORS, heads, tokens]
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
    ROWS_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
    UNIT: tl.constexpr,
    WIDE: tl.constexpr,
    SMALL_PRECISION: tl.constexpr,
) -> None:
    """Grid (numbers of chunks, heads)."""
    begin, first, last = chunk_of(starts, rows, tl.program_id(0), CHUNK, ROWS_PAD)
    if (begin >= last) | (last - first <= short):
        return
    head = tl.program_id(1)
    group = head // ratio
    begin = begin.to(tl.int64)
    key, place = tl.arange(0, K_PAD), tl.arange(0, CHUNK)
    there = place < last - begin
    inside = there[:, None] & (key < K)[None, :]
    from_q, from_k = q + begin * q_token + group * q_head, k + begin * k_token + group * k_head
    a = tl.load(from_q + place[:, None] * q_token + key[None, :], mask=inside, other=0.0)
    b = tl.load(from_k + place[:, None] * k_token + key[None, :], mask=inside, other=0.0)
    from_gate, from_beta = gate + begin * g_token + head * g_head, beta + begin * heads + head
    decays = tl.load(from_gate + place * g_token, mask=there, other=0.0)
    rate = tl.load(from_beta + place * heads, mask=there, other=0.0)
    of_q, of_k = tl.full([CHUNK], 1.0, tl.float32), tl.full([CHUNK], 1.0, tl.float32)
    if UNIT:
        wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
        of_q = tl.rsqrt(tl.sum(wide_a * wide_a, 1) + 1e-6)
        of_k = tl.rsqrt(tl.sum(wide_b * wide_b, 1) + 1e-6)
    of_q = of_q * scale
    sums, total = tl.cumsum(decays, 0), tl.sum(decays, 0)
    stride = heads.to(tl.int64) * tokens
    to = factors + head.to(tl.int64) * tokens + begin + place
    grown = tl.exp(sums)
    tl.store(to, of_q * grown, mask=there)
    tl.store(to + stride, of_k * grown, mask=there)
    tl.store(to + 2 * stride, of_k * tl.exp(total - sums), mask=there)
    tl.store(to + 3 * stride, tl.exp(total) + tl.zeros([CHUNK], tl.float32), mask=there)
    kind = solved.dtype.element_ty
    keys = tl.trans(b)
    causal = place[:, None] >= place[None, :]
    between = tl.where(causal, tl.exp(tl.minimum(sums[:, None] - sums[None, :], 0.0)), 0.0) * of_k[None, :]
    own_pairs = (begin * heads + head) * CHUNK
    pair = place[:, None] * (heads * CHUNK) + place[None, :]
    among_q = tl.dot(a, keys, input_precision="ieee")
    tl.store(inner + own_pairs + pair, (among_q * between * of_q[:, None]).to(kind), mask=there[:, None])
    among_k = tl.dot(b, keys, input_precision="ieee")
    minus = among_k * between * -of_k[:, None] * rate[None, :]
    minus = tl.where(place[:, None] > place[None, :], minus, 0.0)
    own = inverse(minus, CHUNK, WIDE, SMALL_PRECISION) * rate[:, None]
    tl.store(solved + own_pairs + pair, own.to(kind), mask=there[:, None])


@dataclass(frozen=True, slots=True)
class Pairs:
    """The result of `relate`; rows of at most `short` tokens and padding are undefined."""

    solved: torch.Tensor  # [tokens, heads, chunk]
    inner: torch.Tensor  # [tokens, heads, chunk]
    factors: torch.Tensor  # float32 [FACTORS, heads, tokens]


def relate(
    q: torch.Tensor,
    k: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
    rows: StateRows,
    scale: float,
    unit: bool,
    short: int,
    chunk: int,
) -> Pairs:
    """Return what tokens of the same chunk do to each other, in rows with more than `short` tokens."""
    (tokens, heads), depth = gate.shape, q.shape[-1]
    make = q.new_empty
    pairs = Pairs(
        make(tokens, heads, chunk),
        make(tokens, heads, chunk),
        make(FACTORS, heads, tokens, dtype=torch.float32),
    )
    count, half = len(rows.index), q.element_size() == 2
    _relate[(tokens // chunk + count, heads)](
        q, k, gate, beta, rows.starts, pairs.solved, pairs.inner, pairs.factors, scale, tokens, count, heads,
        heads // q.shape[1], short,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), gate.stride(0), gate.stride(1),
        K=depth, K_PAD=max(triton.next_power_of_2(depth), 16), ROWS_PAD=rows_pad(count), CHUNK=chunk,
        UNIT=unit, WIDE=tl.float16 if half else tl.float32, SMALL_PRECISION="tf32" if half else "ieee",
        num_warps=4, maxnreg=_REGISTERS,
    )  # fmt: skip
    return pairs
