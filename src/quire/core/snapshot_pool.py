"""The pool of rows for snapshots of states (snapshots.py).

A row is blank, reserved by a request whose token at that place is not known yet, or named. Named rows are evicted when
a row is needed and none is blank, and with the last block of their prefix. A connector may pin rows: those of snapshots
that it brings back from elsewhere (snapshot_pages.py), and those that a request will find beside what it brings back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from quire.core.block_pool import Evictor
from quire.core.snapshot_policy import SnapshotPolicy
from quire.core.snapshots import StateCopies
from quire.types import Request, ReservedRow


class SnapshotPool:
    """`Snapshots` in `num_rows` rows.

    Args:
        num_rows: number of rows.
        block_size: tokens per block.
        evictor: picks the snapshot that makes room for another one.
        policy: says where a request needs snapshots.
    """

    def __init__(self, num_rows: int, block_size: int, evictor: Evictor, policy: SnapshotPolicy) -> None:
        self.num_rows = num_rows
        self.evictions = 0
        self._block_size, self._evictor, self.policy = block_size, evictor, policy
        self._blank = list(range(num_rows))[::-1]
        self._row_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}
        # Rows that the step under construction saves: no other row of that step may take them.
        self._saving: dict[int, None] = {}
        self._deferred: dict[int, int] = {}  # restores by slot that wait for the next step
        self._used: set[int] = set()  # rows that the step under construction reads or writes
        self._pins: Counter[int] = Counter()  # by row; a pinned row is not in the evictor
        self._evicting: Callable[[bytes, int], None] = lambda name, row: None

    @property
    def num_named(self) -> int:
        return len(self._row_of)

    def longest(self, names: list[bytes], length: int, elsewhere: Callable[[bytes], bool]) -> int:
        while length and names[length - 1] not in self._row_of and not elsewhere(names[length - 1]):
            length -= 1
        return length

    def clip(self, request: Request, n: int) -> int:
        end = self.policy.next_end(request, request.computed)
        return min(n, end - request.computed)

    def restore(self, request: Request, copies: StateCopies) -> bool:
        request.last_snapshot, request.passing = request.computed, 0
        if not request.computed:
            return True
        row = self._row_of[request.names[request.computed // self._block_size - 1]]
        if row in self._saving:
            copies.deferred[request.slot] = row
            return False
        if row not in self._pins:
            self._evictor.discard(row)
            self._evictor.add(row)  # as the newest one
        copies.restores[request.slot] = row
        self._used.add(row)
        return True

    def save(self, request: Request, copies: StateCopies) -> None:
        if request.computed != self.policy.next_end(request, request.computed - 1):
            return
        request.last_snapshot = request.computed
        blocks = request.computed // self._block_size
        if len(request.names) >= blocks and request.names[blocks - 1] in self._row_of:
            return
        self._free_passing(request)
        if (row := self._take()) is not None:
            request.passing = 0 if self.policy.keeps(request, request.computed) else request.computed
            copies.saves[request.slot] = row
            request.reserved_rows.append(ReservedRow(request.computed, row))
            self.settle(request)

    def settle(self, request: Request) -> None:
        names, size = request.names, self._block_size
        while request.reserved_rows and request.reserved_rows[0].tokens <= len(names) * size:
            tokens, row = request.reserved_rows.pop(0)
            self._name(names[tokens // size - 1], row)

    def release(self, request: Request) -> None:
        self.settle(request)
        self._blank += [row for _, row in request.reserved_rows]
        request.reserved_rows = []

    def end_step(self, copies: StateCopies) -> None:
        for row in self._saving:
            if row in self._name_of and row not in self._pins:
                self._evictor.add(row)
        self._saving = {}
        copies.restores = {**self._deferred, **copies.restores}
        self._deferred = copies.deferred
        self._used = set(self._deferred.values())

    def drop(self, name: bytes) -> None:
        row = self._row_of.pop(name, None)
        if row is None:
            return
        del self._name_of[row]
        if row in self._pins:
            self._saving.pop(row, None)
            return
        if row not in self._saving:
            self._evictor.discard(row)
        self._evictor.forget(row)
        self._saving.pop(row, None)
        self._blank.append(row)

    def evict(self, name: bytes) -> None:
        row = self._row_of.get(name)
        if row is not None and row not in self._saving:  # otherwise it does not hold the state yet
            self._evicting(name, row)
        self.drop(name)

    def watch(self, evicting: Callable[[bytes, int], None]) -> None:
        self._evicting = evicting

    def has(self, name: bytes) -> bool:
        return name in self._row_of

    def pin(self, name: bytes) -> int | None:
        if (row := self._row_of.get(name)) is None:
            return None
        if row not in self._pins and row not in self._saving:
            self._evictor.discard(row)
        self._pins[row] += 1
        return row

    def pin_new(self) -> int | None:
        row = next((row for row in reversed(self._blank) if row not in self._used), None)
        if row is not None:
            self._blank.remove(row)
        elif (row := self._evict_unused()) is None:
            return None
        self._pins[row] = 1
        return row

    def insert(self, name: bytes, row: int) -> None:
        if name not in self._row_of:
            self._row_of[name], self._name_of[row] = row, name

    def unpin(self, row: int) -> None:
        self._pins[row] -= 1
        if self._pins[row]:
            return
        del self._pins[row]
        if row not in self._name_of:
            self._evictor.forget(row)
            self._blank.append(row)
        elif row not in self._saving:
            self._evictor.add(row)

    def withdraw(self, copies: StateCopies) -> None:
        for row in copies.saves.values():
            if row in self._name_of:
                self.drop(self._name_of[row])
        self._deferred = {}

    def check(self, requests: Iterable[Request]) -> None:
        reserved = [row for request in requests for _, row in request.reserved_rows]
        pinned = [row for row in self._pins if row not in self._name_of]
        rows = [*self._blank, *reserved, *self._name_of, *pinned]
        assert sorted(rows) == list(range(self.num_rows)), "a snapshot row was lost or is used twice"
        assert {row: name for name, row in self._row_of.items()} == self._name_of, (
            "names of snapshots disagree"
        )
        assert not self._saving, "a saved snapshot cannot be evicted"
        evictable = sum(1 for row in self._name_of if row not in self._pins)
        assert len(self._evictor) == evictable, "a snapshot cannot be evicted, or is evicted twice"

    def _free_passing(self, request: Request) -> None:
        """Drop the last snapshot of a request if it is not to stay when the next one is taken."""
        place, request.passing = request.passing, 0
        if not place:
            return
        waiting = [reserved for reserved in request.reserved_rows if reserved.tokens == place]
        for reserved in waiting:
            request.reserved_rows.remove(reserved)
            self._blank.append(reserved.row)
        if not waiting:
            self.drop(request.names[place // self._block_size - 1])

    def _take(self) -> int | None:
        """Return a row, which is evicted if no row is blank; None if all are reserved."""
        if self._blank:
            row = self._blank.pop()
        elif len(self._evictor):
            row = self._evictor.pop()
            self._give_away(row)
        else:
            return None
        self._saving[row] = None
        self._used.add(row)
        return row

    def _evict_unused(self) -> int | None:
        """Evict the next snapshot and return its row, or None if there is none, or this step uses it."""
        if not len(self._evictor):
            return None
        row = self._evictor.pop()
        if row in self._used:
            self._evictor.add(row)
            return None
        self._give_away(row)
        return row

    def _give_away(self, row: int) -> None:
        """Forget the snapshot in a row that the evictor has picked."""
        self._evictor.forget(row)
        name = self._name_of.pop(row)
        del self._row_of[name]
        self.evictions += 1
        self._evicting(name, row)

    def _name(self, name: bytes, row: int) -> None:
        if name in self._row_of:  # another request was faster
            self._saving.pop(row, None)
            self._blank.append(row)
            return
        self._row_of[name], self._name_of[row] = row, name
        if row not in self._saving:
            self._evictor.add(row)
