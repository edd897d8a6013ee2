"""The queue of requests that wait for a slot, with one line per client.

Within a line requests are in the order of the policy. Between lines the client that holds the fewest slots per weight
is next, and among equals the one that has been served the fewest tokens per weight (core/shares.py). Priorities come
before fairness.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator

from quire.core.shares import Shares
from quire.types import Request, RequestOrder


def _order(request: Request) -> RequestOrder:
    return request.order


def _uncached(request: Request) -> int:
    return request.prompt_len - request.source.likely_cached


class WaitingQueue:
    """The waiting requests of all clients."""

    def __init__(self, shares: Shares) -> None:
        self.tokens = 0  # prompt tokens of all waiting requests
        self.uncached_tokens = 0  # those that are not expected in the prefix cache
        self._shares = shares
        self._lines: dict[str, list[Request]] = {}  # by client; no line is empty
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Request]:
        for line in self._lines.values():
            yield from line

    def add(self, request: Request) -> None:
        """Insert a request into the line of its client."""
        client = request.source.client
        line = self._lines.get(client)
        if line is None:
            self._shares.lift(client)
            line = self._lines[client] = []
        insort(line, request, key=_order)
        self._count += 1
        self.tokens += request.prompt_len
        self.uncached_tokens += _uncached(request)

    def remove(self, request: Request) -> None:
        """Remove a request. Raises KeyError or ValueError if it does not wait."""
        client = request.source.client
        line = self._lines[client]
        line.remove(request)
        self._count -= 1
        self.tokens -= request.prompt_len
        self.uncached_tokens -= _uncached(request)
        if not line:
            del self._lines[client]

    @property
    def first(self) -> Request | None:
        """Return the request to admit next, or None if none waits."""
        return next(self.by_turn(()), None) if self._count else None

    def by_turn(self, running: Iterable[Request]) -> Iterator[Request]:
        """Yield the requests in the order in which to admit them.

        The caller may remove the request that was yielded last, and charge it to its client, before it continues.

        Args:
            running: requests to settle first, so that the counters of their clients are up to date.
        """
        shares = self._shares
        if shares.contended:
            for request in running:
                shares.settle(request)
        at = dict.fromkeys(self._lines, 0)
        while at:
            several = len(at) > 1
            client = (
                min(at, key=lambda name: shares.line(self._lines[name][at[name]]))
                if several
                else next(iter(at))
            )
            request = self._lines[client][at[client]]
            yield request
            line = self._lines.get(client, [])
            if at[client] < len(line) and line[at[client]] is request:
                at[client] += 1
            if at[client] >= len(line):
                del at[client]

    def check(self) -> None:
        """Check lines against counts. Raises AssertionError if they disagree."""
        assert all(line and line == sorted(line, key=_order) for line in self._lines.values())
        assert self._count == sum(map(len, self._lines.values())), "a waiting request was lost"
        assert self.tokens == sum(request.prompt_len for request in self), "waiting tokens do not add up"
        assert self.uncached_tokens == sum(map(_uncached, self)), "uncached tokens do not add up"
