"""The blocks of the KV cache: reference counts, free blocks and the order of eviction.

A free block is blank, or cached if the prefix cache can still find its contents. Invariant: blank + cached + held = all
blocks. Every operation takes O(1) per block (O(log n) with FIFO).
"""

from __future__ import annotations

import heapq
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np


class Evictor(Protocol):
    """The free blocks with cached contents, in the order of their eviction."""

    def add(self, block: int) -> None:
        """Add a cached block that has become free."""
        ...

    def discard(self, block: int) -> None:
        """Remove a block that is held again or no longer cached."""
        ...

    def pop(self) -> int:
        """Remove the block to evict next, and return it."""
        ...

    def forget(self, block: int) -> None:
        """Drop the age of a block whose cached contents are gone."""
        ...

    def __len__(self) -> int: ...


class LRU:
    """An evictor that picks the least recently used block."""

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def add(self, block: int) -> None:
        self._order[block] = None

    def discard(self, block: int) -> None:
        del self._order[block]

    def pop(self) -> int:
        return self._order.popitem(last=False)[0]

    def forget(self, block: int) -> None:
        pass

    def __len__(self) -> int:
        return len(self._order)


class FIFO:
    """An evictor that picks the block whose contents were cached first, however often it has been used since."""

    def __init__(self) -> None:
        self._birth: dict[int, int] = {}  # block -> time at which its contents were first free
        self._heap: list[tuple[int, int]] = []  # (birth, block); stale entries are skipped in `pop`
        self._free: set[int] = set()
        self._clock = 0

    def add(self, block: int) -> None:
        if block not in self._birth:
            self._birth[block] = self._clock
            self._clock += 1
        self._free.add(block)
        heapq.heappush(self._heap, (self._birth[block], block))
        if len(self._heap) > 64 and len(self._heap) > 4 * len(self._free):
            self._heap = [(self._birth[b], b) for b in self._free]
            heapq.heapify(self._heap)

    def discard(self, block: int) -> None:
        self._free.remove(block)

    def pop(self) -> int:
        while True:
            birth, block = heapq.heappop(self._heap)
            if block in self._free and self._birth[block] == birth:
                self._free.remove(block)
                return block

    def forget(self, block: int) -> None:
        self._birth.pop(block, None)

    def __len__(self) -> int:
        return len(self._free)


class BlockPool:
    """A pool of `num_blocks` blocks. Blank blocks are taken first, then cached ones."""

    def __init__(self, num_blocks: int, evictor: Evictor) -> None:
        self.num_blocks = num_blocks
        # Arrays, because `check` reads them at once.
        self.refs = array("i", bytes(4 * num_blocks))
        self.cached = bytearray(num_blocks)  # 1: the prefix cache can find this block
        self.evictions = 0
        self._blank = array("i", range(num_blocks - 1, -1, -1))
        self.evictor = evictor
        self._forget: Callable[[int], None] = lambda block: None

    def on_evict(self, forget: Callable[[int], None]) -> None:
        """Set the function to call before a cached block is handed out and overwritten."""
        self._forget = forget

    @property
    def num_free(self) -> int:
        """Number of free blocks, blank and cached."""
        return len(self._blank) + len(self.evictor)

    @property
    def num_cached(self) -> int:
        """Number of free blocks whose contents the prefix cache can still find."""
        return len(self.evictor)

    def take(self, count: int) -> list[int]:
        """Return `count` blocks with a reference count of 1, evicting cached ones if necessary.

        The caller has checked `num_free`. The contents of the blocks are undefined.
        """
        blank, refs, taken = self._blank, self.refs, []
        for _ in range(count):
            block = blank.pop() if blank else self._evict()
            refs[block] = 1
            taken.append(block)
        return taken

    def _evict(self) -> int:
        """Remove the cached block to evict next, and return it."""
        block = self.evictor.pop()
        self.evictor.forget(block)
        self._forget(block)
        self.cached[block] = 0
        self.evictions += 1
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each of these cached blocks."""
        for block in blocks:
            if self.refs[block] == 0:
                self.evictor.discard(block)
            self.refs[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Drop a reference to each block, last first, so that the end of a sequence is evicted before its beginning."""
        refs = self.refs
        for block in reversed(blocks):
            refs[block] -= 1
            if refs[block] == 0:
                if self.cached[block]:
                    self.evictor.add(block)
                else:
                    self._blank.append(block)

    def uncache(self, block: int) -> None:
        """Note that the prefix cache can no longer find a block. If it is free it becomes blank."""
        self.cached[block] = 0
        if self.refs[block] == 0:
            self.evictor.discard(block)
            self._blank.append(block)
        self.evictor.forget(block)

    def check(self, held: Iterable[list[int]]) -> None:
        """Check the counts against `held`, the block lists of all requests. Raises AssertionError if they disagree."""
        counts = np.zeros(self.num_blocks, np.int64)
        for blocks in held:
            np.add.at(counts, np.array(blocks, np.int64), 1)
        refs, cached = np.asarray(self.refs), np.frombuffer(self.cached, np.uint8)
        assert (counts == refs).all(), "reference counts do not match the block lists"
        used = np.count_nonzero(counts)
        assert used + self.num_free == self.num_blocks, (
            f"{used} used + {self.num_free} free != {self.num_blocks}"
        )
        blank = np.asarray(self._blank)
        assert not cached[blank].any() and not refs[blank].any(), "a blank block is in use"
