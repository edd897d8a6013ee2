"""The KV cache: the parts of all blocks, in the attention back end's block layout."""

from __future__ import annotations

import math

import numpy as np
import torch

from quire.attention.base import KV, AttentionBackend
from quire.types import KVTensor
from quire.worker.memory.kv_groups import LayerGroups


class KVCache:
    """The memory of `num_blocks` blocks of `block_size` tokens.

    Attributes:
        layers: the tensors of each layer over all blocks, by index. Layers with a common part share them; a layer
            without entries has none.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        groups: LayerGroups,
        *,
        num_blocks: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        def allocate(tensor: KVTensor) -> torch.Tensor:
            shape = backend.kv_shape(num_blocks, block_size, tensor.heads, tensor.dim)
            return zeros(shape, getattr(torch, tensor.dtype), device)

        parts: list[KV] = [tuple(allocate(tensor) for tensor in part) for part in groups.parts]
        self.layers: list[KV] = [() if part is None else parts[part] for part in groups.part_of]


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros, so that entries which no request has written are finite."""
    # numpy's zeros get their memory from the operating system piece by piece, when it is first written: on a CPU a
    # large cache costs nothing until it is used.
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
