"""The connector: what the scheduler asks about KV blocks that are not on this engine's device.

A connector has two halves. This one, in the scheduler's process, decides which blocks move; the other one, a
`BlockMover` on every rank, copies them. No step ever waits for a copy. A request whose blocks are on their way is
`loading`, and other requests run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from quire.core.plan_builder import ComputedRow
from quire.core.prefix_cache import PrefixMatch
from quire.types import EngineOutput, Request


class LoadNews(NamedTuple):
    """What a loading request waits for from now on; nothing if its blocks have arrived, or will not arrive."""

    request_id: str
    waits_for: str = ""


class KVConnector(Protocol):
    """The scheduler half of a connector, asked at five points in the life of a request."""

    def match(self, request: Request, match: PrefixMatch) -> str:
        """Begin to fetch what follows `match` in a waiting request's prefix, if it is kept elsewhere.

        The connector allocates the blocks that it fetches, and keeps them until the request is admitted or ends.

        Returns:
            What the request waits for, a cause of waiting; "" if no blocks are on their way. `done` returns the
            request when they have arrived.
        """
        ...

    def plan(self) -> None:
        """Launch the copies that have been decided. Called before each step is launched, and in each idle round."""
        ...

    def done(self) -> list[LoadNews]:
        """Return what has changed for loading requests."""
        ...

    def start(self, request: Request) -> None:
        """Note that a request has been admitted: it holds its blocks itself from now on."""
        ...

    def retire(self, rows: Iterable[ComputedRow]) -> list[EngineOutput]:
        """Note the rows of a step that has been computed, before its results are applied. Return what to report."""
        ...

    def finish(self, request: Request) -> bool:
        """Give up the blocks that are kept or fetched for a request, because it ends.

        Returns:
            True if another engine still reads its blocks, until `release` names it.
        """
        ...

    def release(self, request_id: str) -> None:
        """Give up the blocks that another engine has read. Unknown ids are ignored."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """Return a text about each process of the connector that is not up."""
        ...

    def reclaim(self, last: Request | None = None) -> bool:
        """Give up the blocks that are kept for a waiting request, for `last` only if for no other.

        Returns:
            False if no blocks are kept.
        """
        ...

    def pinned(self) -> Iterable[list[int]]:
        """Iterate over the lists of blocks that the connector holds, for `BlockPool.check`."""
        ...

    @property
    def busy(self) -> bool:
        """Return whether copies are in flight, so that the step loop has to continue."""
        ...

    def wait(self) -> None:
        """Wait a moment for a copy to end. Called when nothing else is left to do."""
        ...

    def close(self) -> None:
        """Stop the worker half."""
        ...


class NoConnector:
    """The connector of an engine whose blocks stay on the device."""

    def match(self, request: Request, match: PrefixMatch) -> str:
        return ""

    def plan(self) -> None:
        pass

    def done(self) -> list[LoadNews]:
        return []

    def start(self, request: Request) -> None:
        pass

    def retire(self, rows: Iterable[ComputedRow]) -> list[EngineOutput]:
        return []

    def finish(self, request: Request) -> bool:
        return False

    def release(self, request_id: str) -> None:
        pass

    @property
    def notes(self) -> Sequence[str]:
        return ()

    @property
    def busy(self) -> bool:
        return False

    def reclaim(self, last: Request | None = None) -> bool:
        return False

    def pinned(self) -> Iterable[list[int]]:
        return ()

    def wait(self) -> None:
        pass

    def close(self) -> None:
        pass
