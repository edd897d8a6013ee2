"""Linear attention with decay and the delta rule for prompts, in chunks of tokens with matrix products.

A program owns a slice of the values of one head of one row, and keeps its part of the state in registers. It goes
through the chunks of the row in turn, in the form of layers/state/recurrence.py. With the delta rule, what tokens of a
chunk do to each other has been computed for all chunks before (kernels/state/pairs.py), so a chunk takes five products
and no triangular system. Decays and lengths multiply rows of the results in float32, so queries and keys enter the
products without conversion. With a decay per channel of the key (kernels/state/channel_pairs.py) they enter decayed.

Rows of few tokens are left to kernels/state/recurrence.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.jit import kernel
from quire.kernels.state.channel_pairs import relate_channels
from quire.kernels.state.pairs import relate
from quire.kernels.state.rows import StateRows
from quire.kernels.target import Target, target_of

SHORT = 16


@dataclass(frozen=True, slots=True)
class ChunkTile:
    """The tile of a program: tokens of a chunk, values of a head, and how Triton compiles it."""

    chunk: int
    values: int
    warps: int
    stages: int


def tile_for(target: Target, itemsize: int, values: int, delta: bool) -> ChunkTile:
    """Return the tile for inputs of `itemsize` bytes and `values` values of all heads and long rows together.

    Wide tiles read queries and keys less often, but with few of them most multiprocessors idle. Without matrix units,
    chunks only cost operations. The delta rule waits longer for its loads, so it takes another stage.
    """
    if not target.has_matrix_units or itemsize > 2:
        return ChunkTile(16, 32, 4, 2)
    large = target.shared_bytes >= 200_000
    return ChunkTile(64, 64 if large and values >= 48 * target.sms else 32, 4, 3 if large and delta else 2)


def long_rows(rows: StateRows, tokens: int, short: int) -> int:
    """Return the number of rows with more than `short` tokens, or a guess if only the device knows it."""
    if rows.counts is None:
        return min(len(rows.index), max(tokens // 2048, 1))
    return int((rows.counts > short).sum())


@kernel(do_not_specialize=["tokens"])
def _advance_chunks(
    q,  # as in kernels/state/recurrence.py
    k,
    v,
    gate,  # float32 [tokens, heads], strides g_token and g_head; read without DELTA
    solved,  # as in kernels/state/pairs.py; this and the next two are read with DELTA
    inner,
    factors,  # with CHANNELS, `lost` of kernels/state/channel_pairs.py
    ends,  # keys into the state, as q; read with CHANNELS, when q and k are decayed queries and keys too
    state,
    index,
    starts,
    fresh,
    targets,
    out,
    scale,
    tokens,
    heads,
    ratio,
    short,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    g_token,
    g_head,
    K: tl.constexpr,
    V: tl.constexpr,
    K_PAD: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    DELTA: tl.constexpr,
    CHANNELS: tl.constexpr,
    UNIT: tl.constexpr,
    EACH: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Grid (tiles of values, heads, rows)."""
    head, row = tl.program_id(1), tl.program_id(2)
    first, last = tl.load(starts + row), tl.load(starts + row + 1)
    if last - first <= short:
        return
    key = tl.arange(0, K_PAD)
    value = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    place = tl.arange(0, CHUNK)
    has_key, has_value = (key < K)[None, :], (value < V)[None, :]
    inside = (key < K)[:, None] & has_value
    size = heads.to(tl.int64) * K * V
    part = head.to(tl.int64) * K * V + key[:, None] * V + value[None, :]
    own = tl.load(index + row).to(tl.int64)
    begins = tl.load(fresh + row).to(tl.int1)
    matrix = tl.load(state + own * size + part, mask=inside & (begins == 0), other=0.0)
    kind = v.dtype.element_ty  # of the operands of products
    stride = heads.to(tl.int64) * tokens
    from_q, from_k = q + (head // ratio) * q_head + key[None, :], k + (head // ratio) * k_head + key[None, :]
    from_v, to = v + head * v_head + value[None, :], out + head * V + value[None, :]
    for number in tl.range(tl.cdiv(last - first, CHUNK), num_stages=STAGES):
        begin = first.to(tl.int64) + number * CHUNK
        at = begin + place
        there = at < last
        a = tl.load(from_q + at[:, None] * q_token, mask=there[:, None] & has_key, other=0.0)
        b = tl.load(from_k + at[:, None] * k_token, mask=there[:, None] & has_key, other=0.0)
        new = tl.load(from_v + at[:, None] * v_token, mask=there[:, None] & has_value, other=0.0)
        before, keys = matrix.to(kind), tl.trans(b)
        if DELTA:
            pair = (at[:, None] * heads + head) * CHUNK + place[None, :]
            system = tl.load(solved + pair, mask=there[:, None], other=0.0)
            among = tl.load(inner + pair, mask=there[:, None], other=0.0)
            if CHANNELS:
                slot = first // CHUNK + row + number
                lost = tl.load(
                    factors + (slot.to(tl.int64) * heads + head) * K + key, mask=key < K, other=0.0
                )[:, None]
                into = (at[:, None] * heads + head) * K + key[None, :]
                keys = tl.trans(tl.load(ends + into, mask=there[:, None] & has_key, other=0.0))
                known = tl.dot(b, before, input_precision="ieee")
            else:
                from_factors = factors + head.to(tl.int64) * tokens + at
                of_q = tl.load(from_factors, mask=there, other=0.0)
                of_k = tl.load(from_factors + stride, mask=there, other=0.0)
                kept = tl.load(from_factors + 2 * stride, mask=there, other=0.0)
                lost = tl.load(factors + 3 * stride + head.to(tl.int64) * tokens + begin)
                known = tl.dot(b, before, input_precision="ieee") * of_k[:, None]
            new = tl.dot(system, (new.to(tl.float32) - known).to(kind), input_precision="ieee").to(kind)
        else:
            decays = tl.load(gate + at * g_token + head * g_head, mask=there, other=0.0)
            sums, total = tl.cumsum(decays, 0), tl.sum(decays, 0)
            between = tl.exp(tl.minimum(sums[:, None] - sums[None, :], 0.0)) * scale
            among = tl.dot(a, keys, input_precision="ieee")
            of_q, kept, lost = tl.exp(sums) * scale, tl.exp(total - sums), tl.exp(total)
            if UNIT:
                wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
                one_q = tl.rsqrt(tl.sum(wide_a * wide_a, 1) + 1e-6)
                one_k = tl.rsqrt(tl.sum(wide_b * wide_b, 1) + 1e-6)
                among = among * one_q[:, None] * one_k[None, :]
                of_q, kept = of_q * one_q, kept * one_k
            among = tl.where(place[:, None] >= place[None, :], among * between, 0.0).to(kind)
        read = tl.dot(a, before, input_precision="ieee")
        if not CHANNELS:
            read = read * of_q[:, None]
        read = tl.dot(among, new, read, input_precision="ieee")
        tl.store(
            to + at[:, None] * (heads * V), read.to(out.dtype.element_ty), mask=there[:, None] & has_value
        )
        if not CHANNELS:
            new = (new.to(tl.float32) * kept[:, None]).to(kind)
        matrix = tl.dot(keys, new, matrix * lost, input_precision="ieee")
    target = own
    if EACH:
        target = tl.load(targets + last - 1).to(tl.int64)
    tl.store(state + target * size + part, matrix, mask=inside & (target >= 0))


def advance_chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor | None,
    state: torch.Tensor,
    rows: StateRows,
    scale: float,
    unit: bool,
    short: int,
    out: torch.Tensor,
) -> None:
    """Advance the states of rows with more than `short` tokens, and write what their tokens read to `out`.

    The other arguments are those of `recurrence`, with one dtype for queries, keys and values, and the delta rule if
    decays are per channel. Of the targets, only that of a row's last token counts: rows of drafts, which have more, must be short.
    """
    assert q.dtype == k.dtype == v.dtype
    channels, ratio = gate.dim() == 3, v.shape[1] // q.shape[1]
    (tokens, heads, width), depth = v.shape, q.shape[-1]
    k_pad = max(triton.next_power_of_2(depth), 16)
    values = heads * width * long_rows(rows, tokens, short)
    tile = tile_for(target_of(v.device), v.element_size(), values, beta is not None)
    block_v = min(tile.values, max(triton.next_power_of_2(width), 16))
    solved = inner = factors = ends = gate
    if channels:
        assert beta is not None
        decayed = relate_channels(q, k, gate, beta, rows, scale, unit, short, tile.chunk)
        solved, inner, factors = decayed.solved, decayed.inner, decayed.lost
        (q, k, ends), ratio = decayed.decayed, 1
    elif beta is not None:
        pairs = relate(q, k, gate, beta, rows, scale, unit, short, tile.chunk)
        solved, inner, factors = pairs.solved, pairs.inner, pairs.factors
    _advance_chunks[(triton.cdiv(width, block_v), heads, len(rows.index))](
        q, k, v, gate, solved, inner, factors, ends, state, rows.index, rows.starts, rows.fresh,
        rows.starts if rows.targets is None else rows.targets, out, scale, tokens, heads, ratio, short,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), gate.stride(0), gate.stride(1),
        K=depth, V=width, K_PAD=k_pad, BLOCK_V=block_v, CHUNK=tile.chunk, DELTA=beta is not None,
        CHANNELS=channels, UNIT=unit, EACH=rows.targets is not None, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
