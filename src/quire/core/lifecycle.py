"""The life of requests: their states, the allowed transitions, and what each transition takes or gives back.

    waiting --> running --> finished
     ^   ^         |
     |   +---------+  preempted
     v
    loading           its blocks are on their way from elsewhere (core/connector.py)

    running --> holding --> finished     its blocks are still being read by another engine

`Lifecycle` owns every unfinished request, the queue, the batch and the slots. Each change of state is one method, and
no other code writes `Request.status`.
"""

from __future__ import annotations

from quire.core.blocks import BlockDemand, Blocks
from quire.core.clocks import Clocks
from quire.core.connector import KVConnector, LoadNews
from quire.core.running_requests import RunningRequests, order_of
from quire.core.shares import Shares
from quire.core.steplog import StepLog
from quire.core.stop_tokens import StopTokens
from quire.core.waiting_queue import WaitingQueue
from quire.types import EngineOutput, FinishReason, Request, RequestStatus
from quire.types.request_table import RequestTable

TRANSITIONS: dict[RequestStatus, frozenset[RequestStatus]] = {
    "waiting": frozenset({"loading", "running", "finished"}),
    "loading": frozenset({"waiting", "finished"}),
    "running": frozenset({"waiting", "holding", "finished"}),
    "holding": frozenset({"finished"}),
    "finished": frozenset(),
}


def move(request: Request, status: RequestStatus) -> None:
    """Change the state of a request. Raises AssertionError if the table does not allow it."""
    assert status in TRANSITIONS[request.status], f"{request.id}: {request.status} -> {status}"
    request.status = status


class Lifecycle:
    """The unfinished requests of an engine, and the slots.

    Args:
        blocks: the blocks of all requests.
        log: the log whose counters count requests.
        slots: number of requests that may run at once.
        connector: fetches blocks from elsewhere.
    """

    def __init__(self, blocks: Blocks, log: StepLog, slots: int, connector: KVConnector) -> None:
        self.blocks, self.log, self.slots, self.connector = blocks, log, slots, connector
        self.clocks = Clocks(log)
        self.requests: dict[str, Request] = {}  # every request that is not finished
        self.table = RequestTable(slots)  # their counts, and those of requests with a step in flight
        self.stops = StopTokens()
        self.shares = Shares()
        self.waiting = WaitingQueue(self.shares)
        self.running = RunningRequests(self.table)
        self.holding: dict[str, Request] = {}  # ended, but another engine still reads their blocks
        self.admissions = 0
        self._free_slots = list(range(slots))[::-1]

    @property
    def has_slot(self) -> bool:
        """Return whether another request may run."""
        return bool(self._free_slots)

    def add(self, request: Request) -> None:
        """Queue a new request."""
        self.clocks.arrive(request)
        self.requests[request.id] = request
        self.log.totals.requests += 1
        self.log.totals.prompt_tokens += request.prompt_len
        self.stops.add(request.stop_ids)
        self.shares.enter(request)
        self.waiting.add(request)

    def release(self, request: Request) -> None:
        """Let a held request be admitted."""
        self.clocks.release(request)
        request.held = None

    def load(self, request: Request, waits_for: str) -> None:
        """Keep a waiting request in the queue, but out of the batch, until `hear` lets it go."""
        move(request, "loading")
        self.clocks.hold(request, waits_for)

    def hear(self, news: LoadNews) -> None:
        """Apply what has changed for a loading request. Other requests are ignored."""
        request = self.requests.get(news.request_id)
        if request is None or request.status != "loading":
            return
        self.release(request)
        if news.waits_for:
            self.clocks.hold(request, news.waits_for)
        else:
            move(request, "waiting")

    def forget(self, request_id: str) -> None:
        """Release the blocks of a request that another engine has read."""
        self.connector.release(request_id)
        if request := self.holding.pop(request_id, None):
            move(request, "finished")

    def start(self, request: Request, demand: BlockDemand, step: int) -> None:
        """Give a waiting request a slot and its blocks.

        Args:
            request: the request.
            demand: its blocks, all of which are there.
            step: number of the step that is being scheduled.
        """
        self.waiting.remove(request)
        self.admissions += 1
        self.blocks.admit(request, demand)
        self.connector.start(request)
        request.slot = self._free_slots.pop()
        move(request, "running")
        request.last_step, request.admitted_known = step, request.known
        request.computed, request.catching_up = demand.match.tokens, True
        self.shares.take_slot(request)
        prefix_end = ""
        if request.cached < 0:
            request.cached = request.computed
            self.shares.waive_cached(request)
            prefix_end = self.blocks.cache.end_of_match(request, request.computed)
        self.clocks.admit(request, prefix_end)
        self.log.totals.queried_tokens += request.known
        self.log.totals.cached_tokens += request.computed
        self.running.add(request)

    def preempt(self, victim: Request) -> None:
        """Return a running request to the waiting queue. Its full blocks stay in the prefix cache."""
        self._leave_batch(victim)
        move(victim, "waiting")
        victim.computed = 0
        victim.preemptions += 1
        self.waiting.add(victim)
        self.clocks.preempt(victim)

    def finish(
        self, request: Request, new: list[int], reason: FinishReason, stop_reason: int | None = None
    ) -> EngineOutput:
        """End a request and release what it holds. Return its last output, with the tokens `new`."""
        self.shares.settle(request)
        self.shares.leave(request)
        self.stops.remove(request.stop_ids)
        if request.status == "running":
            self._leave_batch(request)
        else:
            self.waiting.remove(request)
        if self.connector.finish(request):
            move(request, "holding")
            self.holding[request.id] = request
        else:
            move(request, "finished")
        self.clocks.finish(request)
        del self.requests[request.id]
        totals = self.log.totals
        totals.finished += 1
        totals.generated_tokens += len(new)
        cached = max(request.cached, 0)
        request.end()
        return EngineOutput(request.id, new, reason, stop_reason, cached, timing=request.timing)

    def _leave_batch(self, request: Request) -> None:
        self.running.remove(request)
        self.blocks.release(request)
        self._free_slots.append(request.slot)
        self.shares.give_slot(request)
        request.slot = -1

    def check(self) -> None:
        """Check the invariants of slots, blocks and requests. Raises AssertionError if one is broken."""
        self.blocks.check(self.requests.values(), self.connector.pinned())
        assert len(self._free_slots) + len(self.running) == self.slots, "a slot was lost"
        assert len(self.waiting) + len(self.running) == len(self.requests), "a request was lost"
        assert len(self.table) >= len(self.requests), "a request lost its row of the table"
        assert all(self.table.owner(r.row) is r for r in self.requests.values()), "requests share a row"
        assert all(r.status == "running" and r.slot >= 0 for r in self.running)
        assert all(r.status in ("waiting", "loading") for r in self.waiting)
        assert all(r.held for r in self.waiting if r.status == "loading")
        assert all(r.status == "holding" for r in self.holding.values())
        self.waiting.check()
        self.shares.check(self.requests.values())
        assert list(self.running) == sorted(self.running, key=order_of)
        columns = self.running.decoding
        assert columns.ids == [r.id for r in self.running], "the batch has other ids"
        assert columns.table_rows.tolist() == [r.row for r in self.running], (
            "the batch has other rows of the table"
        )
        for r in self.running:
            assert r.computed <= r.known + r.pending, "more KV entries than tokens known or in flight"
