"""The KV cache: one key and one value tensor per layer, in the attention back end's block layout."""

from __future__ import annotations

import math

import numpy as np
import torch

from quire.attention.base import KV, AttentionBackend


class KVCache:
    """Key and value blocks of all layers.

    Without `keeps_kv` all layers share one scratch layer: entries that a layer writes are read only by that layer, in
    the same step.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        *,
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
    """Return zeros, so that entries which no request has written are finite."""
    # numpy's zeros get their memory from the operating system piece by piece, when it is first written: on a CPU a
    # large cache costs nothing until it is used.
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def block_bytes(
    num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> int:
    """Return the bytes of one block over `num_layers` layers, keys and values."""
    return 2 * num_layers * block_size * num_kv_heads * head_dim * dtype.itemsize
