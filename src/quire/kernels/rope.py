"""The norm of each q and k head (where the model has it) and their rotation, on packed q|k|v in one pass.

A program takes HEADS heads of one token and holds each as two halves, a and b, that turn against each
other: (a, b) -> (a cos - b sin, b cos + a sin). cos and sin are read from the table at the token's
position. Rounding is that of the plain code: the normed value and the product with cos are rounded.

Heads turn in place, or (`norm_rotate_store`) only the queries do: turned keys, and the values as they are,
go straight into their blocks. Values in blocks are always finite (kernels/attention/kv_write.py says why).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.attention.kv_write import is_finite
from quire.kernels.jit import kernel
from quire.kernels.target import target_of

_HEADS = 8  # heads per program


@kernel
def _norm_rotate(
    qkv,  # [tokens, STRIDE]: TURNED heads of DIM that turn in place, then KV_HEADS of k and of v
    positions,  # int64 [tokens]
    table,  # [positions, DIM]: cos | sin
    weight,  # [TURNED + KV_HEADS, DIM], read if NORM
    keys,  # blocks [block, kv head, token, DIM]
    values,
    slots,  # int64 [tokens]: block * BLOCK_SIZE + token in block, negative: not stored
    eps,
    block_stride,
    head_stride,
    token_stride,
    NORM: tl.constexpr,
    STRIDE: tl.constexpr,
    TURNED: tl.constexpr,
    KV_HEADS: tl.constexpr,  # 0: nothing goes into blocks
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,  # of half a head, a power of two
    PDL: tl.constexpr,
) -> None:
    """Grid (tokens, programs for q, then those for k, then those for v)."""
    HALF: tl.constexpr = DIM // 2
    Q_PARTS: tl.constexpr = (TURNED + HEADS - 1) // HEADS
    KV_PARTS: tl.constexpr = (KV_HEADS + HEADS - 1) // HEADS
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)[None, :]
    if part < Q_PARTS + KV_PARTS:
        to_block = part >= Q_PARTS
        head = tl.where(to_block, part - Q_PARTS, part) * HEADS + tl.arange(0, HEADS)[:, None]
        inside = (head < tl.where(to_block, KV_HEADS, TURNED)) & (at < HALF)
        source = head + tl.where(to_block, TURNED, 0)
        dtype = qkv.dtype.element_ty
        if NORM:  # weights do not change: they can be read before the wait
            wa = tl.load(weight + source * DIM + at, mask=inside, other=0.0).to(tl.float32)
            wb = tl.load(weight + source * DIM + at + HALF, mask=inside, other=0.0).to(tl.float32)
        if PDL:
            tl.extra.cuda.gdc_wait()
        place = qkv + token * STRIDE + source * DIM + at
        a = tl.load(place, mask=inside, other=0.0).to(tl.float32)  # [HEADS, BLOCK]
        b = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
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
            tl.store(place + HALF, new_b, mask=inside)
        else:
            slot = tl.load(slots + token)
            block = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * token_stride
            to = keys + block + head * head_stride + at
            value = place + KV_HEADS * DIM  # of the same head
            finite = is_finite(new_a) & is_finite(new_b)
            finite &= is_finite(tl.load(value, mask=inside, other=0.0))
            finite &= is_finite(tl.load(value + HALF, mask=inside, other=0.0))
            sick = tl.max((finite == 0).to(tl.int32), 1, keep_dims=True) > 0
            new_a = tl.where(sick, float("nan"), new_a)
            new_b = tl.where(sick, float("nan"), new_b)
            tl.store(to, new_a, mask=inside & (slot >= 0))
            tl.store(to + HALF, new_b, mask=inside & (slot >= 0))
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
        tl.store(v_to, tl.where(is_finite(v_a), v_a, 0.0), mask=v_inside & (v_slot >= 0))
        tl.store(v_to + HALF, tl.where(is_finite(v_b), v_b, 0.0), mask=v_inside & (v_slot >= 0))


def norm_rotate_(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    turned: int,
) -> None:
    """Norm (if there is a `weight` [turned, dim]) and turn the first `turned` heads of each row of `qkv`.

    qkv [tokens, heads * dim], contiguous; positions int64 [tokens]; table [positions, dim].
    """
    _launch(qkv, positions, table, weight, eps, turned, None, None, positions)


def norm_rotate_store(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Norm and turn q and k of packed q|k|v; k and v go into the blocks at `slots` (negative: skipped).

    qkv [tokens, (heads + 2 kv heads) * dim], contiguous, of which q is overwritten and k is left as it was;
    weight [heads + kv heads, dim] or None; keys, values [block, kv head, token, dim] of equal strides; slots
    int64 [tokens]. Returns q, a view [tokens, heads, dim].
    """
    dim, kv_heads = keys.shape[3], keys.shape[1]
    heads = qkv.shape[1] // dim - 2 * kv_heads
    _launch(qkv, positions, table, weight, eps, heads, keys, values, slots)
    return qkv.view(qkv.shape[0], -1, dim)[:, :heads]


def _launch(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    turned: int,
    keys: torch.Tensor | None,
    values: torch.Tensor | None,
    slots: torch.Tensor,
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
        slots,
        eps,
        *strides,
        NORM=weight is not None,
        STRIDE=qkv.shape[1],
        TURNED=turned,
        KV_HEADS=kv_heads,
        DIM=dim,
        BLOCK_SIZE=block_size,
        HEADS=_HEADS,
        BLOCK=block,
        PDL=pdl,
        num_warps=min(max(_HEADS * block // 128, 1), 8),
        launch_pdl=pdl,
    )
