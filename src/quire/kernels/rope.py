"""Rotary position embedding of packed q|k|v, fused with the norm of each q and k head where the model has one.

A program handles HEADS heads of one token. It holds each head as the first and the second dimensions of its pairs, a
and b, and rotates them: (a, b) -> (a cos - b sin, b cos + a sin). The two dimensions of a pair are SPAN apart
(layers/rope.py). cos and sin come from the table at the token's position. Values are
rounded where the torch reference rounds: after the norm and after the product with cos.

`norm_rotate_` rotates heads in place. `norm_rotate_store` rotates only the queries in place, and writes the rotated
keys and the unchanged values directly into their blocks. Values in blocks are always finite
(kernels/attention/kv_write.py says why).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.attention.kv_write import head_scale, inverse_scale, is_finite, to_codes
from quire.kernels.attention.tile import KVScales, scale_pointers, scale_strides
from quire.kernels.jit import kernel
from quire.kernels.target import target_of

_HEADS = 8  # heads per program


@kernel
def _norm_rotate(
    qkv,  # [tokens, STRIDE]: TURNED heads of DIM to rotate in place, then KV_HEADS of k and of v
    positions,  # int64 [tokens]
    table,  # [positions, DIM]: cos | sin
    weight,  # [TURNED + KV_HEADS, DIM], read if NORM
    keys,  # blocks [block, kv head, token, DIM]
    values,
    key_scales,  # [block, kv head, token], of codes
    value_scales,
    slots,  # int64 [tokens]: block * BLOCK_SIZE + offset in block; negative: do not store
    eps,
    block_stride,
    head_stride,
    token_stride,
    scale_block,
    scale_head,
    scale_token,
    NORM: tl.constexpr,
    STRIDE: tl.constexpr,
    TURNED: tl.constexpr,
    KV_HEADS: tl.constexpr,  # 0: store nothing
    DIM: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,  # half a head, rounded up to a power of two
    CODED: tl.constexpr,  # blocks hold codes
    STATIC: tl.constexpr,  # scales are read, not written
    PDL: tl.constexpr,
) -> None:
    """Grid (tokens, programs for q, then for k, then for v)."""
    HALF: tl.constexpr = DIM // 2
    Q_PARTS: tl.constexpr = (TURNED + HEADS - 1) // HEADS
    KV_PARTS: tl.constexpr = (KV_HEADS + HEADS - 1) // HEADS
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)[None, :]
    if SPAN == HALF:
        low, gap = at, HALF
    elif SPAN == 1:
        low, gap = 2 * at, 1
    else:  # the dimensions behind the rotated ones form pairs of halves, too
        low, gap = tl.where(at < SPAN, at, at + SPAN), tl.where(at < SPAN, SPAN, HALF - SPAN)
    if part < Q_PARTS + KV_PARTS:
        to_block = part >= Q_PARTS
        head = tl.where(to_block, part - Q_PARTS, part) * HEADS + tl.arange(0, HEADS)[:, None]
        inside = (head < tl.where(to_block, KV_HEADS, TURNED)) & (at < HALF)
        source = head + tl.where(to_block, TURNED, 0)
        dtype = qkv.dtype.element_ty
        if NORM:  # weights do not change, so they can be read before the wait
            wa = tl.load(weight + source * DIM + low, mask=inside, other=0.0).to(tl.float32)
            wb = tl.load(weight + source * DIM + low + gap, mask=inside, other=0.0).to(tl.float32)
        if PDL:
            tl.extra.cuda.gdc_wait()
        place = qkv + token * STRIDE + source * DIM + low
        a = tl.load(place, mask=inside, other=0.0).to(tl.float32)  # [HEADS, BLOCK]
        b = tl.load(place + gap, mask=inside, other=0.0).to(tl.float32)
        angle = table + tl.load(positions + token) * DIM + at
        cos = tl.load(angle, mask=at < HALF, other=0.0).to(tl.float32)  # [1, BLOCK]
        sin = tl.load(angle + HALF, mask=at < HALF, other=0.0).to(tl.float32)
        if NORM:
            scale = tl.rsqrt(tl.sum(a * a + b * b, 1, keep_dims=True) / DIM + eps)  # [HEADS, 1]
            a = (a * scale * wa).to(dtype).to(tl.float32)
            b = (b * scale * wb).to(dtype).to(tl.float32)
        new_a = ((a * cos).to(dtype).to(tl.float32) - b * sin).to(dtype)
        new_b = ((b * cos).to(dtype).to(tl.float32) + a * sin).to(dtype)
        if not to_block:
            tl.store(place, new_a, mask=inside)
            tl.store(place + gap, new_b, mask=inside)
        else:
            slot = tl.load(slots + token)
            block = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * token_stride
            to = keys + block + head * head_stride + low
            value = place + KV_HEADS * DIM  # the value of the same head
            finite = is_finite(new_a) & is_finite(new_b)
            finite &= is_finite(tl.load(value, mask=inside, other=0.0))
            finite &= is_finite(tl.load(value + gap, mask=inside, other=0.0))
            sick = tl.max((finite == 0).to(tl.int32), 1, keep_dims=True) > 0
            if CODED:
                scale_at = (
                    slot // BLOCK_SIZE * scale_block + slot % BLOCK_SIZE * scale_token + head * scale_head
                )
                there = (head < KV_HEADS) & (slot >= 0)
                code: tl.constexpr = keys.dtype.element_ty
                key_a, key_b = new_a.to(tl.float32), new_b.to(tl.float32)
                if STATIC:
                    key_scale = tl.load(key_scales + scale_at, mask=there, other=1.0)
                    key_a = tl.where(sick, float("nan"), key_a)
                    key_b = tl.where(sick, float("nan"), key_b)
                else:
                    key_a, key_b = tl.where(sick, 0.0, key_a), tl.where(sick, 0.0, key_b)
                    largest = tl.max(tl.maximum(tl.abs(key_a), tl.abs(key_b)), 1, keep_dims=True)
                    key_scale = head_scale(largest, code)
                    tl.store(key_scales + scale_at, tl.where(sick, float("nan"), key_scale), mask=there)
                factor = inverse_scale(key_scale)
                tl.store(to, to_codes(key_a, factor, code), mask=inside & (slot >= 0))
                tl.store(to + gap, to_codes(key_b, factor, code), mask=inside & (slot >= 0))
            else:
                new_a = tl.where(sick, float("nan"), new_a)
                new_b = tl.where(sick, float("nan"), new_b)
                tl.store(to, new_a, mask=inside & (slot >= 0))
                tl.store(to + gap, new_b, mask=inside & (slot >= 0))
    else:
        if PDL:
            tl.extra.cuda.gdc_wait()
        v_head = (part - Q_PARTS - KV_PARTS) * HEADS + tl.arange(0, HEADS)[:, None]
        v_inside = (v_head < KV_HEADS) & (at < HALF)
        v_place = qkv + token * STRIDE + (TURNED + KV_HEADS + v_head) * DIM + at
        v_slot = tl.load(slots + token)
        v_block = v_slot // BLOCK_SIZE * block_stride + v_slot % BLOCK_SIZE * token_stride
        v_to = values + v_block + v_head * head_stride + at
        v_a = tl.load(v_place, mask=v_inside, other=0.0)
        v_b = tl.load(v_place + HALF, mask=v_inside, other=0.0)
        v_a, v_b = tl.where(is_finite(v_a), v_a, 0.0), tl.where(is_finite(v_b), v_b, 0.0)
        if CODED:
            v_scale_at = (
                v_slot // BLOCK_SIZE * scale_block + v_slot % BLOCK_SIZE * scale_token + v_head * scale_head
            )
            v_there = (v_head < KV_HEADS) & (v_slot >= 0)
            v_code: tl.constexpr = values.dtype.element_ty
            v_a, v_b = v_a.to(tl.float32), v_b.to(tl.float32)
            if STATIC:
                value_scale = tl.load(value_scales + v_scale_at, mask=v_there, other=1.0)
            else:
                value_scale = head_scale(
                    tl.max(tl.maximum(tl.abs(v_a), tl.abs(v_b)), 1, keep_dims=True), v_code
                )
                tl.store(value_scales + v_scale_at, value_scale, mask=v_there)
            v_factor = inverse_scale(value_scale)
            tl.store(v_to, to_codes(v_a, v_factor, v_code), mask=v_inside & (v_slot >= 0))
            tl.store(v_to + HALF, to_codes(v_b, v_factor, v_code), mask=v_inside & (v_slot >= 0))
        else:
            tl.store(v_to, v_a, mask=v_inside & (v_slot >= 0))
            tl.store(v_to + HALF, v_b, mask=v_inside & (v_slot >= 0))


def norm_rotate_(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    turned: int,
    span: int = 0,
) -> None:
    """Normalize and rotate the first `turned` heads of each row of `qkv`, in place.

    Args:
        qkv: [tokens, heads * dim], with contiguous rows.
        positions: int64 [tokens].
        table: [positions, dim], cos in the first half of the columns, sin in the second.
        weight: of an RMS norm of each head, [turned, dim], or None for no norm.
        eps: of the norm.
        turned: number of heads to rotate; the heads after them stay unchanged.
        span: distance between the two dimensions of a rotated pair; 0: half a head.
    """
    _launch(qkv, positions, table, weight, eps, turned, span, None, None, positions)


def norm_rotate_store(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    span: int = 0,
    scales: KVScales | None = None,
) -> torch.Tensor:
    """Normalize and rotate q and k of packed q|k|v, and write k and v into their blocks.

    Args:
        qkv: [tokens, (heads + 2 * kv heads) * dim], with contiguous rows; q is overwritten, k stays unchanged.
        positions: int64 [tokens].
        table: [positions, dim], cos in the first half of the columns, sin in the second.
        weight: of an RMS norm of each head, [heads + kv heads, dim], or None for no norm.
        eps: of the norm.
        keys: [blocks, kv heads, block size, dim].
        values: the same shape and strides as `keys`.
        slots: int64 [tokens]: block * block size + offset in block; negative to store nothing.
        span: distance between the two dimensions of a rotated pair; 0: half a head.
        scales: of blocks of codes, written unless they are static; None: blocks hold plain numbers.

    Returns:
        The rotated queries, a view [tokens, heads, dim] of `qkv`.
    """
    dim, kv_heads = keys.shape[3], keys.shape[1]
    heads = qkv.shape[1] // dim - 2 * kv_heads
    _launch(qkv, positions, table, weight, eps, heads, span, keys, values, slots, scales)
    return qkv.view(qkv.shape[0], -1, dim)[:, :heads]


def _launch(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    turned: int,
    span: int,
    keys: torch.Tensor | None,
    values: torch.Tensor | None,
    slots: torch.Tensor,
    scales: KVScales | None = None,
) -> None:
    dim = table.shape[1]
    block = triton.next_power_of_2(dim // 2)
    kv_heads, block_size, strides = 0, 1, [0, 0, 0]
    if keys is not None:
        kv_heads, block_size, strides = keys.shape[1], keys.shape[2], list(keys.stride()[:3])
    parts = triton.cdiv(turned, _HEADS) + 2 * triton.cdiv(kv_heads, _HEADS)
    pdl = target_of(qkv.device).has_dependent_launch
    _norm_rotate[(qkv.shape[0], parts)](
        qkv,
        positions,
        table,
        table if weight is None else weight,
        qkv if keys is None else keys,
        qkv if values is None else values,
        *scale_pointers(scales, qkv),
        slots,
        eps,
        *strides,
        *scale_strides(scales),
        NORM=weight is not None,
        STRIDE=qkv.stride(0),
        TURNED=turned,
        KV_HEADS=kv_heads,
        DIM=dim,
        SPAN=span or dim // 2,
        BLOCK_SIZE=block_size,
        HEADS=_HEADS,
        BLOCK=block,
        CODED=scales is not None,
        STATIC=scales is not None and scales.static,
        PDL=pdl,
        num_warps=min(max(_HEADS * block // 128, 1), 8),
        launch_pdl=pdl,
    )
