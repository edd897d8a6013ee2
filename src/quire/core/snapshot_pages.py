"""The numbering of snapshots of states as pages, which tiers keep and fetch like blocks.

A snapshot is cut into pages no larger than a block. They have numbers behind those of blocks, and keys of groups behind
those of layers: page i of the snapshot of a name has the key (groups + i, name). So host memory, files, checksums and
limits are those of blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.types import BlockKey


@dataclass(frozen=True, slots=True)
class SnapshotPages:
    """The pages of all snapshots.

    Attributes:
        groups: number of groups of layers.
        first: number of the first page of the first snapshot row.
        count: pages of a snapshot; 0 if snapshots stay on the device, or if no layer keeps a state.
    """

    groups: int = 0
    first: int = 0
    count: int = 0

    def keys(self, name: bytes) -> list[BlockKey]:
        """Return the keys of the pages of a snapshot."""
        return [(self.groups + page, name) for page in range(self.count)]

    def numbers(self, row: int) -> list[int]:
        """Return the numbers of the pages of a snapshot row."""
        begin = self.first + row * self.count
        return list(range(begin, begin + self.count))

    def holds(self, key: BlockKey) -> bool:
        """Return whether a key is that of a page."""
        return self.count > 0 and key[0] >= self.groups


NO_PAGES = SnapshotPages()  # of snapshots that stay on the device
