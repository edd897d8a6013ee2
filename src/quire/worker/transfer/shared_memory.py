"""Memory that two engine processes map: the blocks of a prefill engine on a CPU, which its decode engine reads.

The memory is a file without a name, whose descriptor the prefill process inherits. When both processes have ended,
however they ended, nothing is left.
"""

from __future__ import annotations

import mmap
import os

import numpy as np


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

    def offset(self, address: int) -> int:
        """Return the place in the file of what `allocate` has returned, by its address."""
        return self._offsets[address]


def map_bytes(descriptor: int, offset: int, size: int) -> np.ndarray:
    """Map `size` bytes of a file, uint8."""
    return np.frombuffer(mmap.mmap(descriptor, size, offset=offset), np.uint8)
