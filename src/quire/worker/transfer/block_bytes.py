"""The blocks of a KV cache as bytes: block b is the concatenation of what every tensor keeps of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from quire.attention.base import KV


class BlockBytes:
    """A view of a KV cache by blocks.

    Args:
        layers: the tensors of each layer, whose first dimension counts blocks. Layers may share tensors.

    Attributes:
        parts: the distinct tensors as uint8 [blocks, bytes].
        size: bytes of a block.
    """

    def __init__(self, layers: Iterable[KV]) -> None:
        distinct = {tensor.data_ptr(): tensor for layer in layers for tensor in layer}
        self.parts = [tensor.view(len(tensor), -1).view(torch.uint8) for tensor in distinct.values()]
        self.size = sum(part.shape[1] for part in self.parts)

    def __len__(self) -> int:
        return len(self.parts[0])

    def slices(self) -> Iterator[tuple[torch.Tensor, slice]]:
        """Iterate over the parts and the bytes of a block that each of them is."""
        begin = 0
        for part in self.parts:
            yield part, slice(begin, begin + part.shape[1])
            begin += part.shape[1]
