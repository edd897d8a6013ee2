"""Journals of the prefix cache: what it began and ceased to hold, for a router in front of several engines."""

from __future__ import annotations

from itertools import islice
from typing import Protocol

from quire.types.block_names import SHORT_BYTES, NameChanges

_NO_CHANGES = NameChanges()


class CacheJournal(Protocol):
    """A record of names that entered and left a prefix cache since it was last read."""

    def add(self, name: bytes) -> None:
        """Note that the cache holds a block with this name."""
        ...

    def remove(self, name: bytes) -> None:
        """Note that the cache no longer holds the block with this name."""
        ...

    def take(self) -> NameChanges:
        """Return changes that were not returned before, a bounded number at once."""
        ...


class NoJournal:
    """The journal of an engine whose cached names no other process reads."""

    def add(self, name: bytes) -> None:
        pass

    def remove(self, name: bytes) -> None:
        pass

    def take(self) -> NameChanges:
        return _NO_CHANGES


class NameJournal:
    """A journal with at most one entry per name: an addition and a removal between two readings cancel out.

    It therefore never has more entries than the pool has blocks, twice.
    """

    def __init__(self, limit: int = 1024) -> None:
        """Start empty; a reading returns at most `limit` changes."""
        self._limit = limit
        self._changes: dict[bytes, bool] = {}  # short name -> whether it was added, in order

    def add(self, name: bytes) -> None:
        self._note(name[:SHORT_BYTES], True)

    def remove(self, name: bytes) -> None:
        self._note(name[:SHORT_BYTES], False)

    def _note(self, name: bytes, added: bool) -> None:
        if self._changes.pop(name, added) == added:
            self._changes[name] = added

    def take(self) -> NameChanges:
        changes = list(islice(self._changes.items(), self._limit))
        if not changes:
            return _NO_CHANGES
        for name, _ in changes:
            del self._changes[name]
        return NameChanges(
            b"".join(name for name, added in changes if added),
            b"".join(name for name, added in changes if not added),
        )
