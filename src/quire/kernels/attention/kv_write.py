"""Writing of new keys and values into blocks, for models whose heads need no rotation at this point.

Values in blocks are always finite, because attention multiplies the values of masked keys by 0, and 0 * NaN is NaN.
If a head's key or value is not finite, its key is stored as NaN and the non-finite elements of its value as 0. So
exactly the queries that see this key become NaN. Among codes, the scale of the key is NaN instead, unless scales are
static. attention/entries.py describes codes and has the same functions in plain PyTorch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.attention.tile import KVScales, scale_pointers, scale_strides
from quire.kernels.jit import kernel
from quire.kernels.target import target_of


@triton.jit
def is_finite(x):
    return tl.abs(x.to(tl.float32)) < float("inf")


@triton.jit
def to_codes(x, factor, dtype: tl.constexpr):
    """Round x * factor to codes. Integers are rounded half to even by the addition of 3 * 2^22."""
    scaled = x * factor
    if dtype == tl.int8:
        scaled = tl.minimum(tl.maximum(scaled, -127.0), 127.0)
        return (scaled + 12582912.0 - 12582912.0).to(tl.int8)
    else:  # the comparisons pass NaN on
        scaled = tl.where(scaled > 448.0, 448.0, scaled)
        return tl.where(scaled < -448.0, -448.0, scaled).to(dtype)


@triton.jit
def head_scale(largest, dtype: tl.constexpr):
    """Return the scale of a head from its largest magnitude."""
    if dtype == tl.int8:
        return largest * (1 / 127.0)
    else:
        return largest * (1 / 448.0)


@triton.jit
def inverse_scale(scale):
    """Return the factor that divides by a scale, or 0 for a scale that has no inverse."""
    return tl.where(scale > 1e-30, 1.0 / tl.maximum(scale, 1e-30), 0.0)


@kernel
def _write_kernel(
    k, v, keys, values, key_scales, value_scales, slots,
    k_token, k_head, v_token, v_head, block_stride, head_stride, token_stride,
    scale_block, scale_head, scale_token,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, CODED: tl.constexpr, STATIC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    head = tl.arange(0, HEADS_PAD)[:, None]
    dim = tl.arange(0, DIM_PAD)[None, :]
    mask = (head < HEADS) & (dim < DIM)
    to = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * token_stride + head * head_stride + dim
    key = tl.load(k + token * k_token + head * k_head + dim, mask=mask, other=0.0)
    value = tl.load(v + token * v_token + head * v_head + dim, mask=mask, other=0.0)
    sick = tl.max((is_finite(key) & is_finite(value) == 0).to(tl.int32), 1)
    value = tl.where(is_finite(value), value, 0.0)
    if CODED:
        code: tl.constexpr = keys.dtype.element_ty
        key, value = key.to(tl.float32), value.to(tl.float32)
        at = slot // BLOCK_SIZE * scale_block + slot % BLOCK_SIZE * scale_token + head * scale_head
        if STATIC:
            key = tl.where(sick[:, None] > 0, float("nan"), key)
            key_scale = tl.load(key_scales + at, mask=head < HEADS, other=1.0)
            value_scale = tl.load(value_scales + at, mask=head < HEADS, other=1.0)
        else:
            key = tl.where(sick[:, None] > 0, 0.0, key)
            key_scale = head_scale(tl.max(tl.abs(key), 1, keep_dims=True), code)
            value_scale = head_scale(tl.max(tl.abs(value), 1, keep_dims=True), code)
            shown = tl.where(sick[:, None] > 0, float("nan"), key_scale)
            tl.store(key_scales + at, shown, mask=head < HEADS)
            tl.store(value_scales + at, value_scale, mask=head < HEADS)
        tl.store(keys + to, to_codes(key, inverse_scale(key_scale), code), mask=mask)
        tl.store(values + to, to_codes(value, inverse_scale(value_scale), code), mask=mask)
    else:
        tl.store(keys + to, tl.where(sick[:, None] > 0, float("nan"), key), mask=mask)
        tl.store(values + to, value, mask=mask)


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    scales: KVScales | None = None,
) -> None:
    """Write k and v into their blocks.

    Args:
        k: [tokens, kv heads, dim], dim contiguous.
        v: the same shape as `k`.
        keys: [blocks, kv heads, block size, dim], dim contiguous.
        values: the same shape and strides as `keys`.
        slots: int64 [tokens]: block * block size + offset in block; negative to store nothing.
        scales: of blocks of codes, written unless they are static; None: blocks hold plain numbers.
    """
    tokens, heads, dim = k.shape
    pdl = target_of(k.device).has_dependent_launch
    _write_kernel[(tokens,)](
        k, v, keys, values, *scale_pointers(scales, keys), slots,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), keys.stride(0), keys.stride(1), keys.stride(2),
        *scale_strides(scales), HEADS=heads, HEADS_PAD=triton.next_power_of_2(heads), DIM=dim, DIM_PAD=triton.next_power_of_2(dim),
        BLOCK_SIZE=keys.shape[2], CODED=scales is not None, STATIC=scales is not None and scales.static, PDL=pdl, launch_pdl=pdl,
    )  # fmt: skip
