"""Fairness between clients: the tokens that each has been served, and the slots and blocks that it holds.

Tokens are shared by the virtual token counter of "Fairness in Serving Large Language Models" (OSDI 2024). The counter
of a client is the number of its computed tokens over its weight; a client that returns starts level with the others.
Slots and blocks are shared by preemption. A running request makes room for a waiting one of another client if

- its client then still holds at least as much per weight as the other one, so the exchange is never undone, or
- the other client holds nothing and has been served less. Then they take turns of at least QUANTUM tokens.

A preempted request generates QUANTUM tokens before it makes room again, so a request of n tokens makes room at most
1 + n / QUANTUM times. Priorities come first. With one client nothing here changes a decision.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quire.types import Request

QUANTUM = 32  # output tokens between two preemptions of a request in favour of other clients


def _client(request: Request) -> str:
    return request.source.client


def _since_admission(request: Request) -> int:
    """Return the number of tokens generated since the request was last admitted."""
    return request.known - request.admitted_known


@dataclass(frozen=True, slots=True)
class Shortage:
    """The slots and blocks that a waiting request needs and that are not free.

    `size` is the number of all blocks that the request would hold. Of these it needs `hits`, so it gains nothing if
    another request lets go of them.
    """

    slots: int
    blocks: int
    size: int
    hits: frozenset[int] = frozenset()


class Shares:
    """The counters of every client: tokens served, unfinished requests, slots held."""

    def __init__(self) -> None:
        self.served: dict[str, int] = {}  # tokens computed by client; `lift` does not change them
        self._turns: dict[str, float] = {}  # virtual token counters
        self._open: Counter[str] = Counter()  # unfinished requests; no zeros
        self._slots: Counter[str] = Counter()
        self._floor = 0.0  # highest counter of any client that left no other client behind

    @property
    def contended(self) -> bool:
        """Return whether several clients have unfinished requests."""
        return len(self._open) > 1

    # ---------------------------------------------------------------------------------- counters

    def enter(self, request: Request) -> None:
        """Count a new request."""
        self._open[_client(request)] += 1

    def leave(self, request: Request) -> None:
        """Count the end of a request."""
        client = _client(request)
        self._open[client] -= 1
        if not self._open[client]:
            del self._open[client]
            if not self._open:
                self._floor = max(self._floor, self._turns.get(client, 0.0))

    def lift(self, client: str) -> None:
        """Raise the counter of a client that begins to wait to the lowest of the others.

        A client therefore gains no credit by being absent.
        """
        others = [self._turns.get(name, 0.0) for name in self._open if name != client]
        self._turns[client] = max(self._turns.get(client, 0.0), min(others) if others else self._floor)

    def take_slot(self, request: Request) -> None:
        """Count a slot that the request takes."""
        self._slots[_client(request)] += 1

    def give_slot(self, request: Request) -> None:
        """Count a slot that the request gives up."""
        self._slots[_client(request)] -= 1

    def waive_cached(self, request: Request) -> None:
        """Count the tokens found in the prefix cache at the first admission as charged, free of charge."""
        request.charged = request.cached

    def settle(self, request: Request) -> None:
        """Charge the client for the tokens computed since the request was last settled, cached ones excluded."""
        done = request.computed if request.catching_up else request.known
        if (new := done - request.charged) > 0:
            client, request.charged = _client(request), done
            self.served[client] = self.served.get(client, 0) + new
            self._turns[client] = self._turns.get(client, 0.0) + new / request.source.weight

    def check(self, requests: Iterable[Request]) -> None:
        """Check the counters against `requests`, all unfinished ones. Raises AssertionError if they disagree."""
        all_requests = list(requests)
        slots = Counter(_client(r) for r in all_requests if r.status == "running")
        assert self._open == Counter(map(_client, all_requests)), "open requests of clients do not add up"
        assert +self._slots == slots, "slots of clients do not add up"

    # ------------------------------------------------------------------------------------- order

    def sort_by_turn(self, rows: list[tuple[Request, int]]) -> None:
        """Sort rows with many tokens by the turns of their clients, so that clients share the tokens of steps."""
        for request, _ in rows:
            self.settle(request)
        rows.sort(key=lambda row: self.turn(row[0]))

    def turn(self, request: Request) -> tuple[int, float, int]:
        """Return the sort key by which clients are served: priority, tokens served per weight, arrival."""
        return request.order.priority, self._turns.get(_client(request), 0.0), request.order.arrival

    def line(self, request: Request) -> tuple[int, float, float, int]:
        """Return the sort key by which waiting requests of different clients are admitted."""
        priority, turn, sequence = self.turn(request)
        return priority, self._slots[_client(request)] / request.source.weight, turn, sequence

    # ---------------------------------------------------------------------------------- exchange

    def last(self, running: Sequence[Request], step: int, request: Request) -> Request | None:
        """Return the request to preempt when `request` lacks blocks, or None if `request` has to wait.

        It is the last one in order without a row in `step`. If there are several clients, requests are ordered by the
        blocks of their client up to and including them, over the weight. The first in this order always gets its
        blocks.

        Args:
            running: all running requests, in admission order.
            step: number of the step that is being scheduled.
            request: the request that lacks blocks.
        """
        if not self.contended:
            victim = next((r for r in reversed(running) if r.last_step != step), request)
            return victim if victim.order > request.order else None
        blocks: Counter[str] = Counter()
        keys: dict[str, tuple[int, float, int]] = {}
        for r in running:
            blocks[_client(r)] += r.num_blocks
            keys[r.id] = r.order.priority, blocks[_client(r)] / r.source.weight, r.order.arrival
        free = [r for r in running if r.last_step != step and keys[r.id] > keys[request.id]]
        return max(free, key=lambda r: keys[r.id]) if free else None

    def claim(
        self, request: Request, running: Sequence[Request], shortage: Shortage, refs: Sequence[int]
    ) -> list[Request] | None:
        """Return the running requests to preempt for a waiting one, or None if it has to wait.

        Args:
            request: the waiting request.
            running: all running requests, in admission order.
            shortage: the slots and blocks that it lacks.
            refs: reference count of each block, which tells what a preemption frees.
        """
        slots, blocks = shortage.slots, shortage.blocks
        if slots <= 0 and blocks <= 0:
            return []
        exchange = _Exchange(request, shortage, running, self._slots, refs)
        while slots > 0 or blocks > 0:
            giver = self._giver(exchange, exchange.slots if slots > 0 else exchange.blocks)
            if giver is None:
                return None
            slots -= 1
            blocks -= exchange.give(giver)
        return exchange.given

    def _giver(self, exchange: _Exchange, held: Counter[str]) -> Request | None:
        """Return the newest request of the client that holds most per weight, among those that can make room."""
        found = [r for r in exchange.newest() if self._gives(r, exchange, held)]
        return max(found, key=lambda r: (r.order.priority, held[_client(r)] / r.source.weight), default=None)

    def _gives(self, giver: Request, exchange: _Exchange, held: Counter[str]) -> bool:
        """Return whether `giver` makes room, judged by the slots or the blocks that clients hold (`held`)."""
        request, client = exchange.request, _client(giver)
        if giver.order.priority > request.order.priority:
            return True
        mine = _client(request)
        size, gets = (1, 1) if held is exchange.slots else (giver.num_blocks, exchange.size)
        if (held[client] - size) / giver.source.weight >= (held[mine] + gets) / request.source.weight:
            return True
        later = self._turns.get(client, 0.0) > self._turns.get(mine, 0.0)
        return later and not self._slots[mine] and _since_admission(giver) >= QUANTUM


class _Exchange:
    """The slots and blocks held by clients, updated while requests that make room for another one are chosen."""

    def __init__(
        self,
        request: Request,
        shortage: Shortage,
        running: Sequence[Request],
        slots: Counter[str],
        refs: Sequence[int],
    ) -> None:
        self.request, self.size, self._hits = request, shortage.size, shortage.hits
        self.given: list[Request] = []
        self.slots = slots.copy()
        self.blocks: Counter[str] = Counter()
        self._refs, self._let_go = refs, Counter[int]()
        self._left = [r for r in reversed(running) if _may_give(r, request)]
        for r in running:
            self.blocks[_client(r)] += r.num_blocks

    def newest(self) -> Iterable[Request]:
        """Return the newest remaining request of each client."""
        found: dict[str, Request] = {}
        for r in self._left:
            found.setdefault(_client(r), r)
        return found.values()

    def give(self, giver: Request) -> int:
        """Move a request to `given`. Return the number of blocks that its preemption frees."""
        self.given.append(giver)
        self._left.remove(giver)
        self.slots[_client(giver)] -= 1
        self.blocks[_client(giver)] -= giver.num_blocks
        self._let_go.update(giver.held_blocks())
        return sum(
            self._let_go[block] == self._refs[block]
            for block in giver.held_blocks()
            if block not in self._hits
        )


def _may_give(running: Request, request: Request) -> bool:
    """Return whether a running request may ever make room for a waiting one, whatever their clients hold."""
    return (
        _client(running) != _client(request)
        and running.order.priority >= request.order.priority
        and (not running.preemptions or _since_admission(running) >= QUANTUM)
    )
