"""Snapshots of states for the prefix cache, of models whose layers keep a state per request.

The state after a prefix cannot be read from the blocks of its tokens, and the next step of the request overwrites it.
So the engine keeps a copy in a separate row: a snapshot. A snapshot has the name of the block that ends where it was
taken, and a prefix can be reused up to a snapshot only. Snapshots have a pool of rows beside that of blocks. Kernels
read a state at one address, and a row is often as large as thousands of tokens of keys and values.

The device copies states in plan order: restores before the model of a step runs, saves after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from quire.types import Request


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

    def longest(self, names: list[bytes], length: int, elsewhere: Callable[[bytes], bool]) -> int:
        """Return the most blocks, at most `length`, at whose end there is a snapshot.

        Args:
            names: the names of a request's blocks.
            length: most blocks, all of which are named.
            elsewhere: returns whether another place has the snapshot of a name.
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

    def evict(self, name: bytes) -> None:
        """Remove the snapshot of that name, if there is one, because the block at its end is evicted."""
        ...

    def watch(self, evicting: Callable[[bytes, int], None]) -> None:
        """Set the function to call with name and row of each snapshot that is evicted.

        The step under construction may overwrite the row.
        """
        ...

    def has(self, name: bytes) -> bool:
        """Return whether a request can go on behind the block of that name."""
        ...

    def pin(self, name: bytes) -> int | None:
        """Keep the snapshot of that name until `unpin`. Return its row, or None if there is none."""
        ...

    def pin_new(self) -> int | None:
        """Return a pinned row that no step uses, to be filled from elsewhere. None if there is none."""
        ...

    def insert(self, name: bytes, row: int) -> None:
        """Let requests find the contents of a pinned row under a name, unless there is a snapshot of that name."""
        ...

    def unpin(self, row: int) -> None:
        """End one `pin` or `pin_new` of a row."""
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

    def longest(self, names: list[bytes], length: int, elsewhere: Callable[[bytes], bool]) -> int:
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

    def evict(self, name: bytes) -> None:
        pass

    def watch(self, evicting: Callable[[bytes, int], None]) -> None:
        pass

    def has(self, name: bytes) -> bool:
        return True

    def pin(self, name: bytes) -> int | None:
        return None

    def pin_new(self) -> int | None:
        return None

    def insert(self, name: bytes, row: int) -> None:
        pass

    def unpin(self, row: int) -> None:
        pass

    def withdraw(self, copies: StateCopies) -> None:
        pass

    def check(self, requests: Iterable[Request]) -> None:
        pass
