"""The rows of a step: blocks for their tokens, and what is counted as computed once a row is in the plan."""

from __future__ import annotations

from quire.core.lifecycle import Lifecycle
from quire.core.plan_builder import PlanBuilder
from quire.types import Request


class RowPlacer:
    """The part of a scheduler that adds the rows of running requests to plans.

    Args:
        life: the requests.
        keeps_kv: False if every step computes the whole sequence again.
    """

    def __init__(self, life: Lifecycle, keeps_kv: bool) -> None:
        self._life, self._blocks, self._keeps_kv = life, life.blocks, keeps_kv

    def place(self, builder: PlanBuilder, request: Request, n: int, drafts: int) -> int:
        """Add a row of `n` tokens and `drafts` draft tokens.

        If there are too few blocks, drop the drafts, then preempt other requests.

        Returns:
            The number of draft tokens in the row.
        """
        if request.status != "running":
            return 0  # preempted earlier in this step
        if request.computed + n + drafts > request.room:
            while (added := self._blocks.grow(request, request.computed + n + drafts)) is None:
                if drafts:
                    drafts = 0
                elif not self._preempt_other(builder, request):
                    return 0  # requests in front of it hold the blocks: try again in the next step
            builder.new_blocks += added
        self.emit(builder, request, n + drafts, drafts)
        return drafts

    def emit(self, builder: PlanBuilder, request: Request, n: int, drafts: int) -> None:
        """Add a row of `n` tokens whose blocks the request holds, and count them as computed."""
        samples = builder.add(request, n, drafts)
        request.last_step = builder.step
        if request.catching_up:
            request.catching_up = not samples
        request.computed += n
        if request.computed >= request.full_at:
            builder.published.update(self._blocks.publish(request))
            self._blocks.snapshots.save(request, builder.copies)
            if not request.catching_up:
                builder.filled.append(request)
        if samples:
            request.pending += 1 + drafts
            if not self._keeps_kv:
                request.computed = 0

    def _preempt_other(self, builder: PlanBuilder, request: Request) -> bool:
        """Preempt a request that comes after `request` in order and has no row in this step.

        The first request in order therefore always gets its blocks, so every batch makes progress.

        Returns:
            False if there is no such request.
        """
        life = self._life
        victim = life.shares.last(life.running, builder.step, request)
        if victim is None:
            return False
        life.preempt(victim)
        builder.preempted.append(victim.id)
        life.log.totals.pressure += 1
        return True
