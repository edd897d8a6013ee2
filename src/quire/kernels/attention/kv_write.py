"""Writing of new keys and values into blocks, for models whose heads need no rotation at this point.

Values in blocks are always finite, because attention multiplies the values of masked keys by 0, and 0 * NaN is NaN.
If a head's key or value is not finite, its key is stored as NaN and the non-finite elements of its value as 0. So
exactly the queries that see this key become NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.jit import kernel
from quire.kernels.target import target_of


@triton.jit
def is_finite(x):
    return tl.abs(x.to(tl.float32)) < float("inf")


@kernel
def _write_kernel(
    k, v, keys, values, slots,
    k_token, k_head, v_token, v_head, block_stride, head_stride, token_stride,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, PDL: tl.constexpr,
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
    key = tl.where(sick[:, None] > 0, float("nan"), key)
    tl.store(keys + to, key, mask=mask)
    tl.store(values + to, tl.where(is_finite(value), value, 0.0), mask=mask)


def write_kv(
    k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
) -> None:
    """Write k and v into their blocks.

    Args:
        k: [tokens, kv heads, dim], dim contiguous.
        v: the same shape as `k`.
        keys: [blocks, kv heads, block size, dim], dim contiguous.
        values: the same shape and strides as `keys`.
        slots: int64 [tokens]: block * block size + offset in block; negative to store nothing.
    """
    tokens, heads, dim = k.shape
    pdl = target_of(k.device).has_dependent_launch
    _write_kernel[(tokens,)](
        k, v, keys, values, slots,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), keys.stride(0), keys.stride(1), keys.stride(2),
        HEADS=heads, HEADS_PAD=triton.next_power_of_2(heads), DIM=dim, DIM_PAD=triton.next_power_of_2(dim),
        BLOCK_SIZE=keys.shape[2], PDL=pdl, launch_pdl=pdl,
    )  # fmt: skip
