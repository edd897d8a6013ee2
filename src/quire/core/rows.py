"""The rows of a step: blocks for their tokens, and what is counted as computed once a row is in the plan."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.core.clocks import CatchUpRow
from quire.core.lifecycle import Lifecycle
from quire.core.plan_builder import PlanBuilder, PlanRows
from quire.core.request_limits import SchedulerLimits
from quire.types import Request
from quire.types.request_table import (
    CATCHING_UP,
    COMPUTED,
    DECODING_COLUMNS,
    DRAFTS,
    EXTRA,
    FULL_AT,
    KNOWN,
    LAST_STEP,
    LIMIT,
    NO_DRAFTS,
    PAUSED,
    ROOM,
)

_ONE = np.array(1)  # numpy takes longer to convert a Python number


class RowPlacer:
    """The part of a scheduler that adds the rows of running requests to plans.

    Args:
        life: the requests.
        limits: the sizes of batch and step.
    """

    def __init__(self, life: Lifecycle, limits: SchedulerLimits) -> None:
        self._life, self._blocks, self._table = life, life.blocks, life.table
        self._limits, self._keeps_kv = limits, limits.keeps_kv

    def place_decoding(self, builder: PlanBuilder) -> list[tuple[Request, int]]:
        """Add a row for every running request that wants one token, as far as the step has room.

        Returns:
            The requests that want more tokens, in order, and how many.
        """
        running = self._life.running
        if not len(running):
            return []
        cells = self._table.data[:DECODING_COLUMNS].take(running.rows, axis=1)
        is_plain = not np.count_nonzero(cells[EXTRA:])
        total = cells[COMPUTED] + _ONE if is_plain else cells[COMPUTED] + cells[EXTRA] + _ONE
        ready = self._ready(cells, total, builder.step, is_plain)
        chosen = ready if is_plain else ready & (cells[EXTRA] == 0)
        count = np.count_nonzero(chosen)
        if count == len(running):
            self._place_single(builder, running.decoding, cells, total, is_plain)
            return []
        long = (ready & (cells[EXTRA] > 0)).nonzero()[0].tolist()
        long_rows = [(running[i], int(cells[EXTRA, i]) + 1) for i in long]
        if count:
            rows = running.decoding_of(chosen)
            self._place_single(builder, rows, cells.compress(chosen, axis=1), total[chosen], is_plain)
        return long_rows

    def _ready(self, cells: np.ndarray, total: np.ndarray, step: int, is_plain: bool) -> np.ndarray:
        """Return which of the running requests may have a row, bool [requests].

        Args:
            cells: the columns of the requests.
            total: the tokens of each, known and pending.
            step: number of the step.
            is_plain: none of them is paused.
        """
        # The others reach their full length with the steps in flight.
        ready = total < cells[LIMIT]
        if not is_plain:
            ready &= cells[PAUSED] == 0
        if not self._limits.lookahead:
            ready &= total == cells[KNOWN]  # otherwise the next input token is not known yet
        elif (stages := self._limits.stages) > 1:
            last_steps = self._table.data[LAST_STEP][self._life.running.rows]
            ready &= (total == cells[KNOWN]) | (step - last_steps >= stages)
        return ready

    def _place_single(
        self, builder: PlanBuilder, rows: PlanRows, cells: np.ndarray, ends: np.ndarray, is_plain: bool
    ) -> None:
        """Add rows of one token, and their drafts.

        Args:
            builder: the plan, without rows.
            rows: the rows without drafts.
            cells: the columns of their requests.
            ends: where the rows end without drafts, int64 [rows].
            is_plain: none of them catches up or drafts.
        """
        running = len(self._life.running)
        # Every stage of a pipeline works on other requests, so each step takes its share of them.
        most_rows = min(builder.budget, -(-running // self._limits.stages))
        rows = rows.starting_at(cells[COMPUTED].astype(np.int32))
        if not is_plain and np.count_nonzero(cells[DRAFTS]):
            # Draft tokens get what is left after one token for every request.
            barred = self._table.data[NO_DRAFTS][rows.table_rows]
            drafts = _drafts(cells, barred, min(builder.budget, self._limits.max_logit_rows) - running)
            most = 1 + drafts
            rows = rows._replace(drafts=drafts, num_tokens=most, most=most, total_drafts=int(drafts.sum()))
            ends = ends + drafts
        if most_rows >= len(rows.requests) and self._grow(builder, rows, ends, cells[ROOM]):
            self._emit_decoding(builder, rows, ends, cells, is_plain)
            return
        # Requests may be left out or preempted, so their order matters.
        for request, drafts in zip(rows.requests, rows.drafts.tolist()):
            if builder.num_rows < most_rows and builder.budget:
                self.place(builder, request, 1, drafts)

    def _grow(self, builder: PlanBuilder, rows: PlanRows, ends: np.ndarray, room: np.ndarray) -> bool:
        """Give all rows the blocks that they lack. Return False if too few may be free; they then get none."""
        lacking = (ends > room).nonzero()[0]
        if not len(lacking):
            return True
        added = self._blocks.grow([rows.requests[i] for i in lacking.tolist()], ends[lacking].tolist())
        builder.new_blocks += added or ()
        return added is not None

    def _emit_decoding(
        self, builder: PlanBuilder, rows: PlanRows, ends: np.ndarray, cells: np.ndarray, is_plain: bool
    ) -> None:
        """Add rows whose blocks their requests hold, and count their tokens as computed."""
        data, at = self._table.data, rows.table_rows
        builder.add_decoding(rows)
        data[LAST_STEP][at], data[COMPUTED][at] = builder.step, ends
        if not is_plain and np.count_nonzero(cells[CATCHING_UP]):
            for i in cells[CATCHING_UP].nonzero()[0].tolist():
                rows.requests[i].catching_up = False
                builder.catching_up.append(CatchUpRow(rows.requests[i], 1, True))
        # Otherwise a full block matters once its tokens are known, so that it can be published.
        reach = ends if self._blocks.follows_rows else cells[KNOWN]
        if len(full := (reach >= cells[FULL_AT]).nonzero()[0]):
            self._publish(builder, [rows.requests[i] for i in full.tolist()], cells[KNOWN][full].tolist())
        # As many tokens are pending as have been computed, so EXTRA stays.
        if not self._keeps_kv:
            data[COMPUTED][at], data[EXTRA][at] = 0, ends

    def place(self, builder: PlanBuilder, request: Request, n: int, drafts: int) -> int:
        """Add a row of `n` tokens and `drafts` draft tokens.

        If there are too few blocks, drop the drafts, then take those kept for waiting requests, then preempt other
        requests.

        Returns:
            The number of draft tokens in the row.
        """
        if request.status != "running":
            return 0  # preempted earlier in this step
        if request.computed + n + drafts > request.room:
            while (added := self._blocks.grow([request], [request.computed + n + drafts])) is None:
                if drafts:
                    drafts = 0
                elif self._life.connector.reclaim():
                    pass
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
            self._publish(builder, [request], [min(request.computed, request.known)])
        if samples:
            request.pending += 1 + drafts
            if not self._keeps_kv:
                request.computed = 0

    def _publish(self, builder: PlanBuilder, requests: Sequence[Request], tokens: Sequence[int]) -> None:
        """Publish the blocks that the rows of requests fill, and keep snapshots of the states behind them.

        A block whose last token is still in flight is published with a later row.

        Args:
            builder: the plan with these rows.
            requests: their requests.
            tokens: the known tokens of each that have KV entries.
        """
        builder.published.update(self._blocks.publish(requests, tokens))
        if not self._blocks.follows_rows:
            return
        for request in requests:
            self._blocks.snapshots.save(request, builder.copies)
            if not request.catching_up:
                builder.filled.append(request)

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


def _drafts(cells: np.ndarray, barred: np.ndarray, most: int) -> np.ndarray:
    """Return the draft tokens of rows that want one token, int32 [rows].

    Args:
        cells: the columns of their requests.
        barred: not 0 for those that must have none.
        most: draft tokens of all rows; the first rows take theirs first.
    """
    room = cells[LIMIT] - cells[COMPUTED] - 2
    drafts = np.minimum(cells[DRAFTS], room).clip(0)
    drafts[(cells[CATCHING_UP] | barred) != 0] = 0
    left = most - (drafts.cumsum() - drafts)
    return np.minimum(drafts, left.clip(0)).astype(np.int32)
