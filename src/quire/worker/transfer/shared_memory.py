"""Memory that two engine processes map: the blocks of a prefill engine on a CPU, which its decode engine reads.

The memory is a file without a name, whose descriptor the prefill process inherits. When both processes have ended,
however they ended, nothing is left.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable

import numpy as np

from quire.types import SharedBlocks
from quire.worker.transfer.block_bytes import BlockBytes


class SharedMemory:
    """The file behind `descriptor`, which grows as memory is allocated."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._end = descriptor, 0
        self._offsets: dict[int, int] = {}  # by address

    def allocate(self, size: int) -> np.ndarray:
        """Return `size` zero bytes of the file, uint8."""
        begin = self._end
        self._end += -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        os.ftruncate(self._descriptor, self._end)
        memory = map_bytes(self._descriptor, begin, size)
        self._offsets[memory.ctypes.data] = begin
        return memory

    def place(self, address: int) -> tuple[bytes, int]:
        """Return no handle, and the place in the file of what `allocate` has returned, by its address."""
        return b"", self._offsets[address]


class MemoryExports:
    """The blocks of a prefill engine in a file that its decode engine maps, too."""

    def __init__(self, descriptor: int) -> None:
        self.memory = SharedMemory(descriptor)
        self.place = self.memory.place


class MemoryReader:
    """The blocks of a decode engine on a CPU, into which blocks of prefill engines are copied."""

    def __init__(self, blocks: BlockBytes) -> None:
        self._parts = [part.numpy() for part in blocks.parts]

    def open(self, memory: int, shared: SharedBlocks) -> MappedPeer:
        return MappedPeer(memory, shared, self._parts)


class MappedPeer:
    """The mapped blocks of one prefill engine. They stay readable after that engine has ended."""

    def __init__(self, memory: int, shared: SharedBlocks, targets: list[np.ndarray]) -> None:
        count = shared.num_blocks
        sources = [
            map_bytes(memory, one.offset, count * one.block_bytes).reshape(count, one.block_bytes)
            for one in shared.tensors
        ]
        self._pairs = list(zip(sources, targets))

    def begin_pull(self, sources: list[int], blocks: list[int]) -> Callable[[], None]:
        def run() -> None:
            for theirs, ours in self._pairs:
                for source, block in zip(sources, blocks):
                    ours[block] = theirs[source]

        return run

    def close(self) -> None:
        self._pairs.clear()


def map_bytes(descriptor: int, offset: int, size: int) -> np.ndarray:
    """Map `size` bytes of a file, uint8."""
    return np.frombuffer(mmap.mmap(descriptor, size, offset=offset), np.uint8)
