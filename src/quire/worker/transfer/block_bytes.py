"""What transfers move, as bytes: blocks of a KV cache, and pages of the snapshots of states."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch

from quire.attention.base import KV


class BlockBytes:
    """A view of a KV cache by blocks: block b is the concatenation of what every tensor keeps of it.

    Args:
        layers: the tensors of each layer, whose first dimension counts blocks. Layers may share tensors.

    Attributes:
        parts: the distinct tensors as uint8 [blocks, bytes].
        dtypes: their number formats.
        size: bytes of a block.
    """

    def __init__(self, layers: Iterable[KV]) -> None:
        distinct = {tensor.data_ptr(): tensor for layer in layers for tensor in layer}
        self.parts = [tensor.view(len(tensor), -1).view(torch.uint8) for tensor in distinct.values()]
        self.dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in distinct.values()]
        self.size = sum(part.shape[1] for part in self.parts)

    def __len__(self) -> int:
        return len(self.parts[0])

    def slices(self) -> Iterator[tuple[torch.Tensor, slice]]:
        """Iterate over the parts and the bytes of a block that each of them is."""
        begin = 0
        for part in self.parts:
            yield part, slice(begin, begin + part.shape[1])
            begin += part.shape[1]


class SnapshotBytes:
    """A view of the snapshots of states by pages: page i of a snapshot is the i-th piece of its bytes.

    Args:
        parts: tensors whose first dimension counts snapshots.
        pages: pages of a snapshot.
        first: number of the first page. Those of snapshot r begin at first + r * pages.

    Attributes:
        page_bytes: bytes of a page; the last one of a snapshot may have fewer.
    """

    def __init__(self, parts: Iterable[torch.Tensor] = (), pages: int = 0, first: int = 1 << 62) -> None:
        self._parts = [part.view(len(part), -1).view(torch.uint8) for part in parts]
        self._pages, self.first = pages, first
        self.page_bytes = -(-sum(part.shape[1] for part in self._parts) // max(1, pages))

    def pieces(self, number: int) -> Iterator[tuple[torch.Tensor, slice]]:
        """Iterate over the pieces of a page, uint8 [bytes], and the bytes of the page that each of them is."""
        row, page = divmod(number - self.first, self._pages)
        begin = -page * self.page_bytes
        for part in self._parts:
            end = begin + part.shape[1]
            low, high = max(begin, 0), min(end, self.page_bytes)
            if low < high:
                yield part[row, low - begin : high - begin], slice(low, high)
            begin = end


NO_SNAPSHOTS = SnapshotBytes()  # of a rank without states, or whose snapshots are not moved


class HostView:
    """Blocks and pages of snapshots on a CPU, copied by number from and to rows of bytes."""

    def __init__(self, blocks: BlockBytes, snapshots: SnapshotBytes) -> None:
        self._blocks = [(part.numpy(), where) for part, where in blocks.slices()]
        self._snapshots = snapshots

    def _pieces(self, number: int) -> Iterator[tuple[np.ndarray, slice]]:
        if number < self._snapshots.first:
            return ((part[number], where) for part, where in self._blocks)
        return ((piece.numpy(), where) for piece, where in self._snapshots.pieces(number))

    def read(self, number: int, row: np.ndarray) -> None:
        """Copy a block or a page into `row`, uint8 [bytes]."""
        for piece, where in self._pieces(number):
            row[where] = piece

    def write(self, number: int, row: np.ndarray) -> None:
        """Copy `row` into a block or a page."""
        for piece, where in self._pieces(number):
            piece[:] = row[where]
