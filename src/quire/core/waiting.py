"""Requests that wait for a slot, one line per client; the client that was served least goes next.

Within a line requests go in the order that the policy gave them. Between lines it is the virtual token
counter of "Fairness in Serving Large Language Models" (OSDI 2024): each client's computed tokens over its
weight, where a client that comes back from absence starts level with the others, so that nobody saves up
turns. With one client this is that client's line and nothing else. Priorities and requests that were
preempted come before fairness.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator

from quire.types import Request


def _order(request: Request) -> tuple[int, ...]:
    return request.order


class Waiting:
    """Owns the lines and the counters. Holds no request twice."""

    def __init__(self) -> None:
        self.served: dict[str, int] = {}  # tokens computed for each client, never lifted
        self.tokens = 0  # prompt tokens of all requests here
        self._lines: dict[str, list[Request]] = {}  # none is empty
        self._turns: dict[str, float] = {}  # virtual counters
        self._last_gone = ""  # the client whose line ended last
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
            others = [self._turns[name] for name in self._lines]
            floor = min(others) if others else self._turns.get(self._last_gone, 0.0)
            self._turns[client] = max(self._turns.get(client, 0.0), floor)
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
            self._last_gone = client

    def by_turn(self, running: Iterable[Request]) -> Iterator[Request]:
        """Requests in the order in which to admit them. The one just yielded may be removed, and then
        charged to its client, before the next is asked for. `running`: requests to settle first."""
        if len(self._lines) > 1:
            for request in running:
                self.settle(request)
        at = dict.fromkeys(self._lines, 0)
        while at:
            client = min(at, key=lambda name: self._key(name, at[name])) if len(at) > 1 else next(iter(at))
            request = self._lines[client][at[client]]
            yield request
            line = self._lines.get(client, [])
            if at[client] < len(line) and line[at[client]] is request:
                at[client] += 1
            if at[client] >= len(line):
                del at[client]

    def _key(self, client: str, index: int) -> tuple[tuple[int, ...], bool, float, int]:
        request = self._lines[client][index]
        return request.order[:-1], not request.preemptions, self._turns[client], request.order[-1]

    def charge(self, request: Request, tokens: int) -> None:
        """Book tokens computed for a request to its client."""
        client = request.source.client
        self.served[client] = self.served.get(client, 0) + tokens
        self._turns[client] = self._turns.get(client, 0.0) + tokens / request.source.weight

    def settle(self, request: Request) -> None:
        """Charge the output tokens that a request got since it was last settled."""
        new = request.known - request.prompt_len - request.charged
        if new:
            request.charged += new
            self.charge(request, new)

    def check(self) -> None:
        """Raise AssertionError unless lines and counts agree."""
        assert all(line and line == sorted(line, key=_order) for line in self._lines.values())
        assert self._count == sum(map(len, self._lines.values())), "a waiting request was lost"
        assert self.tokens == sum(request.prompt_len for request in self), "waiting tokens do not add up"
