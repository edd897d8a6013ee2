"""The norm of each q and k head (where the model has it) and their rotation, in place on packed q|k|v.

A program takes HEADS heads of one token and holds each as two halves, a and b, that turn against each
other: (a, b) -> (a cos - b sin, b cos + a sin). cos and sin are read from the table at the token's
position. Rounding is that of the plain code: the normed value and the product with cos are rounded.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_HEADS = 8  # heads per program


@triton.jit
def _norm_rotate(
    qkv,  # [tokens, STRIDE]: TURNED heads of DIM that turn, then those that do not
    positions,  # int64 [tokens]
    table,  # [positions, DIM]: cos | sin
    weight,  # [TURNED, DIM], read if NORM
    eps,
    NORM: tl.constexpr,
    STRIDE: tl.constexpr,
    TURNED: tl.constexpr,
    DIM: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,  # of half a head, a power of two
) -> None:
    HALF: tl.constexpr = DIM // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    inside = (head < TURNED) & (at < HALF)
    place = qkv + token * STRIDE + head * DIM + at
    dtype = qkv.dtype.element_ty
    a = tl.load(place, mask=inside, other=0.0).to(tl.float32)  # [HEADS, BLOCK]
    b = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
    angle = table + tl.load(positions + token) * DIM + at
    cos = tl.load(angle, mask=at < HALF, other=0.0).to(tl.float32)  # [1, BLOCK]
    sin = tl.load(angle + HALF, mask=at < HALF, other=0.0).to(tl.float32)
    if NORM:
        wa = tl.load(weight + head * DIM + at, mask=inside, other=0.0).to(tl.float32)
        wb = tl.load(weight + head * DIM + at + HALF, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(a * a + b * b, 1, keep_dims=True) / DIM + eps)  # [HEADS, 1]
        a = (a * scale * wa).to(dtype).to(tl.float32)
        b = (b * scale * wb).to(dtype).to(tl.float32)
    new_a = (a * cos).to(dtype).to(tl.float32) - b * sin
    new_b = (b * cos).to(dtype).to(tl.float32) + a * sin
    tl.store(place, new_a.to(dtype), mask=inside)
    tl.store(place + HALF, new_b.to(dtype), mask=inside)


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
    dim = table.shape[1]
    block = triton.next_power_of_2(dim // 2)
    _norm_rotate[(qkv.shape[0], triton.cdiv(turned, _HEADS))](
        qkv,
        positions,
        table,
        table if weight is None else weight,
        eps,
        NORM=weight is not None,
        STRIDE=qkv.shape[1],
        TURNED=turned,
        DIM=dim,
        HEADS=_HEADS,
        BLOCK=block,
        num_warps=min(max(_HEADS * block // 128, 1), 8),
    )
