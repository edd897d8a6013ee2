"""Snapshots of states for the prefix cache, of models whose layers keep a state per request.

The state after a prefix cannot be read from the blocks of its tokens, and the next step of the request overwrites it.
So the engine keeps a copy in a separate row: a snapshot. A snapshot has the name of the block that ends where it was
taken, and a prefix can be reused up to a snapshot only. Snapshots have a pool of rows beside that of blocks. Kernels
read a state at one address, and a row is often as large as thousands of tokens of keys and values.

A row is blank, reserved by a request whose token at that place is not known yet, or named. Named rows are evicted when
a row is needed and none is blank, and dropped with the last block of their prefix.

The device copies states in plan order: restores before the model of a step runs, saves after it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from quire.core.block_pool import Evictor
from quire.core.snapshot_policy import SnapshotPolicy
from quire.types import Request, ReservedRow


class StateCopies:
    """The copies of states in one step.

    Attributes:
        restores: row of the snapshot by slot, before the model runs.
        deferred: the same for the next step, because this one saves the snapshot.
        saves: row of the snapshot by slot, after the model has run.
    """

    def __init__(self) -> None:
        self.restores: dict[int, int] = {}
        self.deferred: dict[int, int] = {}
        self.saves: dict[int, int] = {}


class Snapshots(Protocol):
    """The snapshots of one engine. They own the fields of `Request` that say which it has."""

    num_rows: int
    evictions: int

    @property
    def num_named(self) -> int:
        """Number of snapshots that a request can find."""
        ...

    def longest(self, names: list[bytes], length: int) -> int:
        """Return the most blocks, at most `length`, at whose end there is a snapshot.

        Args:
            names: the names of a request's blocks.
            length: most blocks, all of which are named.
        """
        ...

    def clip(self, request: Request, n: int) -> int:
        """Return how many of the next `n` tokens of a request to run, so that the row ends where it needs a snapshot."""
        ...

    def restore(self, request: Request, copies: StateCopies) -> bool:
        """Give an admitted request the snapshot at the end of its computed tokens, if it has any.

        Returns:
            False if this step saves the snapshot, so that the request can run in the next one only.
        """
        ...

    def save(self, request: Request, copies: StateCopies) -> None:
        """Keep the state of a request after the row that has just been placed, if its end is worth a snapshot."""
        ...

    def settle(self, request: Request) -> None:
        """Name the snapshots of a request whose tokens are known by now."""
        ...

    def release(self, request: Request) -> None:
        """Let go of a request that ends or is preempted. Its named snapshots stay."""
        ...

    def end_step(self, copies: StateCopies) -> None:
        """Note that a step has been planned, and complete its copies."""
        ...

    def drop(self, name: bytes) -> None:
        """Remove the snapshot of that name, if there is one."""
        ...

    def withdraw(self, copies: StateCopies) -> None:
        """Remove the snapshots that a failed step was to save."""
        ...

    def check(self, requests: Iterable[Request]) -> None:
        """Check the books against all unfinished requests. Raises AssertionError if they disagree."""
        ...


class NoSnapshots:
    """`Snapshots` of a model without states, which a prefix does not need."""

    num_rows = num_named = evictions = 0

    def longest(self, names: list[bytes], length: int) -> int:
        return length

    def clip(self, request: Request, n: int) -> int:
        return n

    def restore(self, request: Request, copies: StateCopies) -> bool:
        return True

    def save(self, request: Request, copies: StateCopies) -> None:
        pass

    def settle(self, request: Request) -> None:
        pass

    def release(self, request: Request) -> None:
        pass

    def end_step(self, copies: StateCopies) -> None:
        pass

    def drop(self, name: bytes) -> None:
        pass

    def withdraw(self, copies: StateCopies) -> None:
        pass

    def check(self, requests: Iterable[Request]) -> None:
        pass


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

    @property
    def num_named(self) -> int:
        return len(self._row_of)

    def longest(self, names: list[bytes], length: int) -> int:
        while length and names[length - 1] not in self._row_of:
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
        self._evictor.discard(row)
        self._evictor.add(row)  # as the newest one
        copies.restores[request.slot] = row
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
            if row in self._name_of:
                self._evictor.add(row)
        self._saving = {}
        copies.restores = {**self._deferred, **copies.restores}
        self._deferred = copies.deferred

    def drop(self, name: bytes) -> None:
        row = self._row_of.pop(name, None)
        if row is None:
            return
        del self._name_of[row]
        if row not in self._saving:
            self._evictor.discard(row)
        self._evictor.forget(row)
        self._saving.pop(row, None)
        self._blank.append(row)

    def withdraw(self, copies: StateCopies) -> None:
        for row in copies.saves.values():
            if row in self._name_of:
                self.drop(self._name_of[row])
        self._deferred = {}

    def check(self, requests: Iterable[Request]) -> None:
        reserved = [row for request in requests for _, row in request.reserved_rows]
        rows = [*self._blank, *reserved, *self._name_of]
        assert sorted(rows) == list(range(self.num_rows)), "a snapshot row was lost or is used twice"
        assert {row: name for name, row in self._row_of.items()} == self._name_of, (
            "names of snapshots disagree"
        )
        assert not self._saving, "a saved snapshot cannot be evicted"
        assert len(self._evictor) == len(self._name_of), "a snapshot cannot be evicted, or is evicted twice"

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
            self._evictor.forget(row)
            del self._row_of[self._name_of.pop(row)]
            self.evictions += 1
        else:
            return None
        self._saving[row] = None
        return row

    def _name(self, name: bytes, row: int) -> None:
        if name in self._row_of:  # another request was faster
            self._saving.pop(row, None)
            self._blank.append(row)
            return
        self._row_of[name], self._name_of[row] = row, name
        if row not in self._saving:
            self._evictor.add(row)
