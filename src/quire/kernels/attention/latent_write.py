"""Norm and rotation of latent entries and queries, and the write of entries into their blocks, in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.attention.kv_write import is_finite
from quire.kernels.jit import kernel
from quire.kernels.target import target_of

_HEADS = 8  # heads that a program of the rotation handles


@triton.jit
def _turn(x, angle, pair, low, high, HALF: tl.constexpr, inside):
    """Return the rotated pairs (a, b) of the vectors at `x`; `angle` points to cos | sin."""
    a = tl.load(x + low, mask=inside, other=0.0)
    b = tl.load(x + high, mask=inside, other=0.0)
    dtype = a.dtype
    a, b = a.to(tl.float32), b.to(tl.float32)
    cos = tl.load(angle + pair, mask=pair < HALF, other=0.0).to(tl.float32)
    sin = tl.load(angle + HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)
    # Rounded where the torch reference rounds: after the product with cos.
    new_a = (a * cos).to(dtype).to(tl.float32) - b * sin
    new_b = (b * cos).to(dtype).to(tl.float32) + a * sin
    return new_a.to(dtype), new_b.to(dtype)


@kernel
def _norm_rotate_latent(
    q, rotary, entries, weight, positions, angles, blocks, slots, eps,
    rotary_token, rotary_head, entry_token, block_stride, token_stride,
    NUM_HEADS: tl.constexpr, Q_DIM: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, SPAN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, 1 + programs for the heads of q). The first program of a token writes its entry."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    angle = angles + tl.load(positions + token) * (2 * HALF)
    pair = tl.arange(0, HALF_PAD)
    low = 2 * pair if SPAN == 1 else pair
    high = low + SPAN
    if part > 0:
        head = (part - 1) * HEADS + tl.arange(0, HEADS)[:, None]
        inside = (head < NUM_HEADS) & (pair < HALF)[None, :]
        query = rotary + token * rotary_token + head * rotary_head
        q_a, q_b = _turn(query, angle, pair[None, :], low[None, :], high[None, :], HALF, inside)
        q_to = q + (token * NUM_HEADS + head) * Q_DIM + Q_DIM - 2 * HALF
        tl.store(q_to + low[None, :], q_a, mask=inside)
        tl.store(q_to + high[None, :], q_b, mask=inside)
    else:
        slot = tl.load(slots + token)
        source = entries + token * entry_token
        to = blocks + slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * token_stride
        dim = tl.arange(0, RANK_PAD)
        x = tl.load(source + dim, mask=dim < RANK, other=0.0)
        scale = tl.rsqrt(tl.sum(x.to(tl.float32) * x.to(tl.float32), 0) / RANK + eps)
        w = tl.load(weight + dim, mask=dim < RANK, other=0.0).to(tl.float32)
        latent = (x.to(tl.float32) * scale * w).to(x.dtype)
        a, b = _turn(source + RANK, angle, pair, low, high, HALF, pair < HALF)
        # Values in blocks are always finite (kv_write.py says why). The rotated key is no value, so NaN marks the entry.
        sick = tl.max((is_finite(latent) == 0).to(tl.int32), 0)
        sick += tl.max((is_finite(a) & is_finite(b) == 0).to(tl.int32), 0)
        tl.store(to + dim, tl.where(is_finite(latent), latent, 0.0), mask=(dim < RANK) & (slot >= 0))
        there = (pair < HALF) & (slot >= 0)
        tl.store(to + RANK + low, tl.where(sick > 0, float("nan"), a), mask=there)
        tl.store(to + RANK + high, tl.where(sick > 0, float("nan"), b), mask=there)


def store_latent(
    q: torch.Tensor,
    rotary: torch.Tensor,
    entries: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    table: torch.Tensor,
    span: int,
    blocks: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Write the normed and rotated entries into their blocks, and the rotated part of each query into `q`.

    Args:
        q: [tokens, heads, any dim], contiguous; the last `rotary dim` numbers of each head are written.
        rotary: [tokens, heads, rotary dim], the last dimension contiguous: the part of the queries to rotate.
        entries: [tokens, rank + rotary dim], the last dimension contiguous: latents to norm, keys to rotate.
        weight: [rank], of the RMS norm.
        eps: of the norm.
        positions: int64 [tokens].
        table: cos | sin, [positions, rotary dim].
        span: distance between the two dimensions of a rotated pair, 1 or half of the rotary dimensions.
        blocks: [blocks, block size, rank + rotary dim], the last dimension contiguous.
        slots: int64 [tokens]: block * block size + offset in block; negative to store nothing.
    """
    tokens, heads, dim = q.shape
    half = table.shape[1] // 2
    rank = entries.shape[1] - 2 * half
    pdl = target_of(q.device).has_dependent_launch
    _norm_rotate_latent[(tokens, 1 + triton.cdiv(heads, _HEADS))](
        q, rotary, entries, weight, positions, table, blocks, slots, eps,
        rotary.stride(0), rotary.stride(1), entries.stride(0), blocks.stride(0), blocks.stride(1),
        NUM_HEADS=heads, Q_DIM=dim, RANK=rank, RANK_PAD=triton.next_power_of_2(rank), HALF=half,
        HALF_PAD=triton.next_power_of_2(half), HEADS=_HEADS, BLOCK_SIZE=blocks.shape[1], SPAN=span,
        PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
