"""The admission of waiting requests into the batch: in their turns, while slots, blocks and tokens of the step last."""

from __future__ import annotations

from quire.core.blocks import BlockDemand
from quire.core.lifecycle import Lifecycle
from quire.core.plan_builder import PlanBuilder
from quire.core.policy import Policy
from quire.core.prompt_budget import PromptBudget
from quire.core.rows import RowPlacer
from quire.core.shares import Shortage
from quire.types import Request


class BatchAdmission:
    """The part of a scheduler that moves waiting requests into the batch.

    Args:
        life: the requests.
        policy: whether and with how many tokens a request may join a batch.
        rows: adds the first row of an admitted request.
    """

    def __init__(self, life: Lifecycle, policy: Policy, rows: RowPlacer) -> None:
        self._life, self._policy, self._rows = life, policy, rows
        self._blocks = life.blocks

    def balance(self, builder: PlanBuilder, was_empty: bool) -> None:
        """Admit the request whose turn it is before rows fill the step, so that other clients leave it tokens.

        Clients that hold more than their share make room for it. At most one request is admitted in this way per
        step, because the next one may then find its blocks in the prefix cache.
        """
        life = self._life
        ready = (r for r in life.waiting.by_turn(life.running) if not _reason_to_skip(r))
        request = next(ready, None)
        if request is None or not self._policy.admits(was_empty, builder.budget):
            return
        match = self._blocks.match(request)
        reserved = max(1, builder.budget - life.slots)  # left over if all rows run one token
        if not self._policy.chunk(request.known - match.tokens, reserved):
            return
        demand = self._blocks.demand(request, match)
        if demand.missing <= 0 and (waits_for := life.connector.match(request, match)):
            life.load(request, waits_for)
            return
        slots = 0 if life.has_slot else 1
        shortage = Shortage(slots, demand.missing, demand.size, frozenset(match.blocks))
        victims = life.shares.claim(request, life.running, shortage, self._blocks.pool.refs)
        if victims is None:
            return
        for victim in victims:
            life.preempt(victim)
            builder.preempted.append(victim.id)
        life.log.totals.yielded += len(victims)
        self._start(builder, request, demand, 0)

    def admit(self, builder: PlanBuilder, was_empty: bool, prompts: PromptBudget) -> str | None:
        """Move waiting requests into the batch. Return the reason why the first remaining one must wait."""
        life, skipped = self._life, None
        for request in life.waiting.by_turn(life.running):
            if reason := _reason_to_skip(request):
                skipped = skipped or reason
                continue
            if not life.has_slot:
                return "slots"
            if not prompts.admits(len(life.running)):
                return "latency"
            if not self._policy.admits(was_empty, builder.budget):
                return "batch" if builder.budget else "tokens"
            match = self._blocks.match(request)
            n = self._policy.chunk(request.known - match.tokens, builder.budget)
            if n == 0 and not (was_empty and builder.num_rows):
                return "tokens"
            demand = self._blocks.demand(request, match)
            while demand.missing > 0 and life.connector.reclaim(last=request):
                demand = self._blocks.demand(request, match)
            if demand.missing > 0:
                return "blocks"
            if waits_for := life.connector.match(request, match):
                life.load(request, waits_for)
                skipped = skipped or waits_for
                continue
            if not builder.published.isdisjoint(match.blocks):
                # A row must not read a block that another row of its step writes, so this one runs in the next step.
                # Its tokens still count against the budget: as many requests are admitted as if it ran now.
                builder.charge(n)
                n = 0
            self._start(builder, request, demand, n)
        return skipped

    def _start(self, builder: PlanBuilder, request: Request, demand: BlockDemand, n: int) -> None:
        """Give a request a slot and its blocks, and run its first `n` tokens unless `n` is 0."""
        self._life.start(request, demand, builder.step)
        builder.admit(request)
        snapshots = self._blocks.snapshots
        if not snapshots.restore(request, builder.copies):
            builder.charge(n)
            n = 0
        if n:
            self._rows.emit(builder, request, snapshots.clip(request, n), 0)
        self._life.shares.settle(request)


def _reason_to_skip(request: Request) -> str | None:
    """Return why a waiting request cannot be admitted whatever is free, or None."""
    if request.held:
        return request.held
    if request.paused:
        return "grammar"
    return "results" if request.pending else None  # while a step of it is in flight, its length is not known
