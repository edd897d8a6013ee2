"""Linear attention with decay and the delta rule for prompts, in chunks of 16 tokens with matrix units.

A program owns a slice of the values of one head of one row, and keeps its part of the state in registers. For each
chunk it computes the WY form of layers/state/recurrence.py. The triangular system (I + L) w = r is solved by
w = (I + L^8) (I + L^4) (I + L^2) (I - L) r, which is exact because L^16 = 0; in a chunk of 16 its terms stay small
enough for fp32. Operations per token and head: about 6 * key dim * value dim, plus 32 * (key dim + value dim).

Rows of few tokens are left to kernels/state/recurrence.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.jit import kernel
from quire.kernels.state.rows import StateRows

SHORT = 16
CHUNK: tl.constexpr = tl.constexpr(16)


@kernel
def _advance_chunks(
    q,  # as in kernels/state/recurrence.py
    k,
    v,
    gate,  # float32 [tokens, heads], strides g_token and g_head
    beta,
    state,
    index,
    starts,
    fresh,
    targets,
    out,
    scale,
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
    DELTA: tl.constexpr,
    UNIT: tl.constexpr,
    EACH: tl.constexpr,
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
    causal = place[:, None] >= place[None, :]
    at = first.to(tl.int64) + place
    for _ in range(tl.cdiv(last - first, CHUNK)):
        there = at < last
        a = tl.load(
            q + at[:, None] * q_token + (head // ratio) * q_head + key[None, :],
            mask=there[:, None] & has_key,
            other=0.0,
        ).to(tl.float32)
        b = tl.load(
            k + at[:, None] * k_token + (head // ratio) * k_head + key[None, :],
            mask=there[:, None] & has_key,
            other=0.0,
        ).to(tl.float32)
        new = tl.load(
            v + at[:, None] * v_token + head * v_head + value[None, :],
            mask=there[:, None] & has_value,
            other=0.0,
        ).to(tl.float32)
        if UNIT:
            a = a * tl.rsqrt(tl.sum(a * a, 1) + 1e-6)[:, None]
            b = b * tl.rsqrt(tl.sum(b * b, 1) + 1e-6)[:, None]
        decays = tl.load(gate + at * g_token + head * g_head, mask=there, other=0.0)
        sums = tl.cumsum(decays, 0)
        total = tl.sum(decays, 0)
        between = tl.where(causal, tl.exp(tl.minimum(sums[:, None] - sums[None, :], 0.0)), 0.0)
        grown = tl.exp(sums)[:, None]
        before = matrix.to(kind)
        keys = tl.trans(b).to(kind)
        if DELTA:
            rate = tl.load(beta + at * heads + head, mask=there, other=0.0)[:, None]
            known = tl.dot((b * grown).to(kind), before, input_precision="ieee")
            new = (new - known) * rate
            power = tl.dot(b.to(kind), keys, input_precision="ieee") * between * rate
            power = tl.where(place[:, None] > place[None, :], -power, 0.0)
            new += tl.dot(power, new, input_precision="ieee")
            for _ in tl.static_range(3):
                power = tl.dot(power, power, input_precision="ieee")
                new += tl.dot(power, new, input_precision="ieee")
        a = a * scale
        inner = tl.dot(a.to(kind), keys, input_precision="ieee") * between
        read = tl.dot((a * grown).to(kind), before, input_precision="ieee")
        read = tl.dot(inner.to(kind), new.to(kind), read, input_precision="ieee")
        to = out + (at[:, None] * heads + head) * V + value[None, :]
        tl.store(to, read.to(out.dtype.element_ty), mask=there[:, None] & has_value)
        kept = tl.trans(b * tl.exp(total - sums)[:, None]).to(kind)
        matrix = tl.dot(kept, new.to(kind), matrix * tl.exp(total), input_precision="ieee")
        at += CHUNK
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

    The other arguments are those of `recurrence`, with a decay per head. Of the targets, only that of a row's last token
    counts: rows of drafts, which have more, must be short.
    """
    (_, heads, width), depth = v.shape, q.shape[-1]
    k_pad = max(triton.next_power_of_2(depth), 16)
    block_v = min(max(triton.next_power_of_2(width), 16), max(4096 // k_pad, 16))
    _advance_chunks[(triton.cdiv(width, block_v), heads, len(rows.index))](
        q, k, v, gate, gate if beta is None else beta, state, rows.index, rows.starts, rows.fresh,
        rows.starts if rows.targets is None else rows.targets, out, scale, heads, heads // q.shape[1], short,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), gate.stride(0), gate.stride(1),
        K=depth, V=width, K_PAD=k_pad, BLOCK_V=block_v, DELTA=beta is not None, UNIT=unit,
        EACH=rows.targets is not None, num_warps=4, num_stages=2,
    )  # fmt: skip
