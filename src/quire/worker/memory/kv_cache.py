"""The KV cache: the tensors of every layer's `KVLayout`, in the attention back end's block layout."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from quire.attention.base import KV, AttentionBackend
from quire.types import KVLayout


class KVCache:
    """The blocks of all layers.

    Without `keeps_kv` all layers of one layout share a scratch layer: entries that a layer writes are read only by that
    layer, in the same step.

    Attributes:
        layers: the tensors of each layer, by index.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        layouts: Sequence[KVLayout],
        *,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        keeps_kv: bool,
    ) -> None:
        def allocate(layout: KVLayout) -> KV:
            return tuple(
                _zeros(
                    backend.kv_shape(num_blocks, block_size, tensor.heads, tensor.dim),
                    getattr(torch, tensor.dtype),
                    device,
                )
                for tensor in layout.tensors
            )

        if keeps_kv:
            self.layers = [allocate(layout) for layout in layouts]
        else:
            scratch = {layout.tensors: allocate(layout) for layout in scratch_layers(layouts)}
            self.layers = [scratch[layout.tensors] for layout in layouts]


def scratch_layers(layouts: Sequence[KVLayout]) -> list[KVLayout]:
    """Return one layout of each kind of entry in `layouts`: the layers to allocate if nothing is kept."""
    return list({layout.tensors: layout for layout in layouts}.values())


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros, so that entries which no request has written are finite."""
    # numpy's zeros get their memory from the operating system piece by piece, when it is first written: on a CPU a
    # large cache costs nothing until it is used.
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
