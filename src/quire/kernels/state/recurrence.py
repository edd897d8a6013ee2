"""Linear attention with decay and the delta rule, token by token; layers/state/recurrence.py defines them.

A program owns a slice of the values of one head of one row. It reads its part of the state once, advances it by all
tokens of the row in registers, and writes it once: 8 bytes per number of the state and row, however many tokens. With
few tokens per row that is the limit. Prompts go to kernels/state/chunks.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.jit import compiles_only, kernel
from quire.kernels.state import chunks
from quire.kernels.state.rows import StateRows


@kernel
def _recur(
    q,  # [tokens, key heads, K], strides q_token and q_head
    k,  # the same, with strides k_token and k_head
    v,  # [tokens, heads, V], strides v_token and v_head
    gate,  # float32 [tokens, heads], or [tokens, heads, K] if CHANNELS; strides g_token, g_head
    beta,  # float32 [tokens, heads], contiguous, read if DELTA
    state,  # float32 [states, heads, K, V]
    index,  # int64 [rows]
    starts,  # int32 [rows + 1]
    fresh,  # bool [rows]
    targets,  # int64 [tokens], read if EACH
    out,  # [tokens, heads, V]
    scale,
    heads,
    ratio,  # value heads per key head
    most,  # rows with more tokens are left to another kernel
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
    CHANNELS: tl.constexpr,
    UNIT: tl.constexpr,
    EACH: tl.constexpr,
    ONES: tl.constexpr,  # no row has more than one token
) -> None:
    """Grid (tiles of values, heads, rows)."""
    head, row = tl.program_id(1), tl.program_id(2)
    first, last = tl.load(starts + row), tl.load(starts + row + 1)
    if (last <= first) | (last - first > most):
        return
    key = tl.arange(0, K_PAD)
    value = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    has_key, has_value = key < K, value < V
    inside = has_key[:, None] & has_value[None, :]
    own = tl.load(index + row).to(tl.int64)
    part = head.to(tl.int64) * K * V + key[:, None] * V + value[None, :]
    size = heads.to(tl.int64) * K * V
    begins = tl.load(fresh + row).to(tl.int1)
    matrix = tl.load(state + own * size + part, mask=inside & (begins == 0), other=0.0)
    from_q = q + (head // ratio) * q_head + key
    from_k = k + (head // ratio) * k_head + key
    from_v = v + head * v_head + value
    token = first.to(tl.int64)
    count = 1 if ONES else last - first
    for _ in range(count):
        a = tl.load(from_q + token * q_token, mask=has_key, other=0.0).to(tl.float32)
        b = tl.load(from_k + token * k_token, mask=has_key, other=0.0).to(tl.float32)
        new = tl.load(from_v + token * v_token, mask=has_value, other=0.0).to(tl.float32)
        if UNIT:
            a = a * tl.rsqrt(tl.sum(a * a, 0) + 1e-6)
            b = b * tl.rsqrt(tl.sum(b * b, 0) + 1e-6)
        a = a * scale
        if CHANNELS:
            decay = tl.load(gate + token * g_token + head * g_head + key, mask=has_key, other=0.0)
            matrix = matrix * tl.exp(decay)[:, None]
        else:
            matrix = matrix * tl.exp(tl.load(gate + token * g_token + head * g_head))
        if DELTA:
            rate = tl.load(beta + token * heads + head)
            new = (new - tl.sum(matrix * b[:, None], 0)) * rate
        matrix += b[:, None] * new[None, :]
        read = tl.sum(matrix * a[:, None], 0)
        tl.store(out + (token * heads + head) * V + value, read.to(out.dtype.element_ty), mask=has_value)
        if EACH:
            target = tl.load(targets + token).to(tl.int64)
            tl.store(state + target * size + part, matrix, mask=inside & (target >= 0))
        token += 1
    if not EACH:
        tl.store(state + own * size + part, matrix, mask=inside)


def recurrence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor | None,
    state: torch.Tensor,
    rows: StateRows,
    scale: float = 1.0,
    unit: bool = False,
) -> torch.Tensor:
    """Advance the state of each row, as layers/state/recurrence.py does. Last dimensions are contiguous."""
    (tokens, heads, width), depth = v.shape, q.shape[-1]
    channels = gate.dim() == 3
    out = torch.empty(tokens, heads, width, device=v.device, dtype=v.dtype)
    if beta is not None:
        beta = beta.contiguous()
    k_pad = triton.next_power_of_2(depth)
    most = tokens
    if not rows.short_only and (beta is not None or not channels):
        most = max(chunks.SHORT, rows.most)
        chunks.advance_chunks(q, k, v, gate, beta, state, rows, scale, unit, most, out)
        if rows.all_longer(most) and not compiles_only():  # other steps have short rows too
            return out
    block_v = min(triton.next_power_of_2(width), max(4096 // k_pad, 8))  # 16 KiB of state per program
    _recur[(triton.cdiv(width, block_v), heads, len(rows.index))](
        q, k, v, gate, gate if beta is None else beta, state, rows.index, rows.starts, rows.fresh,
        rows.starts if rows.targets is None else rows.targets, out, scale, heads, heads // q.shape[1], most,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), gate.stride(0), gate.stride(1),
        K=depth, V=width, K_PAD=k_pad, BLOCK_V=block_v, DELTA=beta is not None, CHANNELS=channels, UNIT=unit,
        EACH=rows.targets is not None, ONES=rows.short_only and rows.most == 1, num_warps=4,
    )  # fmt: skip
    return out
