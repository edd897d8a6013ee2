"""Requests that wait for a slot, one line per client.

Within a line requests go in the order that the policy gave them. Between lines the client that holds fewest slots
per weight goes next, and among those the one that was served least (core/shares.py). With one client this is that
client's line and nothing else. Priorities come before fairness.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator

from quire.core.shares import Shares
from quire.types import Request


def _order(request: Request) -> tuple[int, ...]:
    return request.order


class WaitingQueue:
    """Owns the lines. Holds no request twice."""

    def __init__(self, shares: Shares) -> None:
        self.tokens = 0  # prompt tokens of all requests here
        self._shares = shares
        self._lines: dict[str, list[Request]] = {}  # none is empty
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Request]:
        for line in self._lines.values():
            yield from line

    def add(self, request: Request) -> None:
        client = request.source.client
        line = self._lines.get(client)
        if line is None:
            self._shares.lift(client)
            line = self._lines[client] = []
        insort(line, request, key=_order)
        self._count += 1
        self.tokens += request.prompt_len

    def remove(self, request: Request) -> None:
        client = request.source.client
        line = self._lines[client]
        line.remove(request)
        self._count -= 1
        self.tokens -= request.prompt_len
        if not line:
            del self._lines[client]

    def by_turn(self, running: Iterable[Request]) -> Iterator[Request]:
        """Yield the requests in the order in which to admit them. The one just yielded may be removed, and then
        charged to its client, before the next is asked for. `running`: requests to settle first."""
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
        """Raise AssertionError unless lines and counts agree."""
        assert all(line and line == sorted(line, key=_order) for line in self._lines.values())
        assert self._count == sum(map(len, self._lines.values())), "a waiting request was lost"
        assert self.tokens == sum(request.prompt_len for request in self), "waiting tokens do not add up"
