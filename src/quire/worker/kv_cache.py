"""The KV cache: one key and one value tensor per layer, in the attention back end's block layout.

Without a cache (`keeps_kv` off) all layers share one scratch layer: what a layer writes is read by that
layer only, in the same step.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from quire.attention.base import KV, AttentionBackend


class KVCache:
    """`num_blocks` blocks of `block_size` tokens for each of `num_layers` layers."""

    def __init__(
        self,
        backend: AttentionBackend,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        keeps_kv: bool,
    ) -> None:
        shape = backend.kv_shape(num_blocks, block_size, num_kv_heads, head_dim)

        def layer() -> KV:
            return _zeros(shape, dtype, device), _zeros(shape, dtype, device)

        self.layers: list[KV] = [layer() for _ in range(num_layers)] if keeps_kv else [layer()] * num_layers


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, not garbage: what no request has written is finite.

    numpy's zeros come from the operating system block by block, when first written: on a CPU a large cache
    costs nothing until it is used.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def block_bytes(
    num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> int:
    """Bytes of one block over `num_layers` layers, keys and values."""
    return 2 * num_layers * block_size * num_kv_heads * head_dim * dtype.itemsize
