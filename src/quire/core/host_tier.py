"""The tiers behind the device: rows of host memory, and files on a disk. Both keep the most recently used blocks.

Only the books are kept here. The copies themselves are orders to a `BlockMover`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from quire.types import BlockKey


@dataclass(slots=True, eq=False)
class HostBlock:
    """A block in host memory. `users` counts the copies in flight from or to its row, which therefore stays."""

    row: int
    users: int = 0
    forgotten: bool = False  # the row is free once it has no users


class HostTier:
    """The blocks in `rows` rows of host memory."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._free = list(range(rows))[::-1]
        self._blocks: OrderedDict[BlockKey, HostBlock] = OrderedDict()  # least recently used first
        self._forgotten: list[HostBlock] = []

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._blocks

    def use(self, key: BlockKey) -> HostBlock | None:
        """Return the block with this key as the most recently used one, or None."""
        if (block := self._blocks.get(key)) is not None:
            self._blocks.move_to_end(key)
        return block

    def at(self, key: BlockKey) -> HostBlock:
        """Return the block with this key. Raises KeyError if there is none."""
        return self._blocks[key]

    def add(self, key: BlockKey) -> HostBlock | None:
        """Give a new block a row, evicting the least recently used one without users. None if all have users."""
        if not self._free:
            victim = next((k for k, block in self._blocks.items() if not block.users), None)
            if victim is None:
                return None
            self._free.append(self._blocks.pop(victim).row)
        block = self._blocks[key] = HostBlock(self._free.pop())
        return block

    def release(self, block: HostBlock) -> None:
        """Note that a copy from or to a block's row has ended."""
        block.users -= 1
        if block.forgotten and not block.users:
            self._forgotten.remove(block)
            self._free.append(block.row)

    def remove(self, key: BlockKey) -> None:
        """Forget a block. Its row is free once it has no users. Unknown keys are ignored."""
        if (block := self._blocks.pop(key, None)) is None:
            return
        if block.users:
            block.forgotten = True
            self._forgotten.append(block)
        else:
            self._free.append(block.row)

    def check(self) -> None:
        """Check the rows. Raises AssertionError if one was lost."""
        used = [block.row for block in (*self._blocks.values(), *self._forgotten)]
        rows = sorted([*self._free, *used])
        assert rows == list(range(self.rows)), "a row of host memory was lost or given out twice"


class DiskTier:
    """The blocks in files, at most `capacity` of them. `found` are the keys of existing files, oldest first."""

    def __init__(self, capacity: int, found: Iterable[BlockKey] = ()) -> None:
        self.capacity = capacity
        self._keys: OrderedDict[BlockKey, None] = OrderedDict.fromkeys(found)

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._keys

    def use(self, key: BlockKey) -> None:
        """Note that a file is the most recently used one."""
        self._keys.move_to_end(key)

    def add(self, key: BlockKey) -> None:
        """Note that a file has been written."""
        self._keys[key] = None
        self._keys.move_to_end(key)

    def forget(self, key: BlockKey) -> bool:
        """Forget a file. Return False if there was none."""
        return self._keys.pop(key, self) is None

    def surplus(self) -> list[BlockKey]:
        """Forget the least recently used files beyond the capacity, and return their keys."""
        return [self._keys.popitem(last=False)[0] for _ in range(len(self._keys) - self.capacity)]
