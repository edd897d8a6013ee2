"""Blocks of the KV cache: who holds them, which are free, which free one is overwritten first.

Owns the reference counts and the two kinds of free page: blank ones, and cached ones whose content may
still be found by the prefix cache. Invariant: blank + cached + held = all blocks. Every operation is O(1)
per block (FIFO: O(log n)).
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np


class Evictor(Protocol):
    """Free blocks with cached content, in the order in which they are given up."""

    def add(self, block: int) -> None: ...

    def discard(self, block: int) -> None: ...

    def pop(self) -> int: ...

    def forget(self, block: int) -> None:
        """The content of `block` is gone: its age no longer counts."""
        ...

    def __len__(self) -> int: ...


class LRU:
    """The block that was used least recently goes first."""

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
    """The block whose content was cached first goes first, however often it has been used since."""

    def __init__(self) -> None:
        self._birth: dict[int, int] = {}  # block -> when its content was first free
        self._heap: list[tuple[int, int]] = []  # may hold stale entries, skipped on pop
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
    """`num_blocks` blocks. Fresh blocks come from the blank ones first, then from the cached ones."""

    def __init__(self, num_blocks: int, evictor: Evictor) -> None:
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        self.cached = bytearray(num_blocks)  # 1: the prefix cache can find this block
        self.evictions = 0
        self._blank = list(range(num_blocks))[::-1]
        self._evictor = evictor
        self._forget: Callable[[int], None] = lambda block: None

    def on_evict(self, forget: Callable[[int], None]) -> None:
        """Call `forget(block)` when the cached content of a block is about to be overwritten."""
        self._forget = forget

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._evictor)

    @property
    def num_cached(self) -> int:
        """Free blocks whose content the prefix cache can still find."""
        return len(self._evictor)

    def take(self, count: int) -> list[int]:
        """`count` fresh blocks, held once. The caller has checked `num_free`."""
        taken = []
        for _ in range(count):
            if self._blank:
                block = self._blank.pop()
            else:
                block = self._evictor.pop()
                self._evictor.forget(block)
                self._forget(block)
                self.cached[block] = 0
                self.evictions += 1
            self.refs[block] = 1
            taken.append(block)
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Hold cached blocks once more."""
        for block in blocks:
            if self.refs[block] == 0:
                self._evictor.discard(block)
            self.refs[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Let go of blocks, last first, so that the end of a sequence is overwritten before its beginning."""
        refs = self.refs
        for block in reversed(blocks):
            refs[block] -= 1
            if refs[block] == 0:
                if self.cached[block]:
                    self._evictor.add(block)
                else:
                    self._blank.append(block)

    def uncache(self, block: int) -> None:
        """Note that the prefix cache can no longer find a cached block; a free one becomes blank."""
        self.cached[block] = 0
        if self.refs[block] == 0:
            self._evictor.discard(block)
            self._blank.append(block)
        self._evictor.forget(block)

    def check(self, held: Iterable[list[int]]) -> None:
        """Raise AssertionError unless the books agree with `held`, the block lists of all requests."""
        counts = np.zeros(self.num_blocks, np.int64)
        for blocks in held:
            np.add.at(counts, np.array(blocks, np.int64), 1)
        assert (counts == np.array(self.refs)).all(), "reference counts do not match the block lists"
        used = np.count_nonzero(counts)
        assert used + self.num_free == self.num_blocks, (
            f"{used} used + {self.num_free} free != {self.num_blocks}"
        )
        assert all(not self.cached[block] and not self.refs[block] for block in self._blank), (
            "a blank block is in use"
        )
