"""The live view of several replicas as that of one engine: requests and blocks side by side, steps in one order.

The number of a combined step is the number of steps before it on all replicas. For one replica it is its own number.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

from quire.serve.replicas.sums import sum_stats
from quire.types import EngineLive, LiveRequest, LiveStep

_FIRST_OWNER = 4  # of `EngineLive.blocks`: values from here on are positions in `running`


class LiveCursor:
    """The position of one view in the steps of all replicas."""

    def __init__(self, replicas: int) -> None:
        self._next = [0] * replicas  # step numbers, counted over restarts
        self._last: list[LiveStep | None] = [None] * replicas

    def resume(self, since: int) -> None:
        """Continue after combined step `since`; one that this cursor has not given counts for the first replica."""
        if sum(self._next) - 1 != since:
            self._next = [since + 1, *[0] * (len(self._next) - 1)]

    def since(self, replica: int, steps_before: int) -> int:
        """Return the newest step of a replica that the view has, or -1.

        Args:
            replica: number of the replica.
            steps_before: steps of the processes before its present one.
        """
        return max(-1, self._next[replica] - steps_before - 1)

    def combine(self, found: Sequence[tuple[int, int, list[LiveStep]]]) -> list[LiveStep]:
        """Return the new steps of all replicas by time, with numbers and states of all together.

        Args:
            found: number, steps before the present process, and new steps of each replica that answered.
        """
        steps = [(step, replica, before) for replica, before, new in found for step in new]
        steps.sort(key=lambda one: one[0].time_s)
        return [self._add(*one) for one in steps]

    def _add(self, step: LiveStep, replica: int, before: int) -> LiveStep:
        self._next[replica] = before + step.step + 1
        self._last[replica] = step
        last = [one for one in self._last if one is not None]
        return replace(
            step,
            step=sum(self._next) - 1,
            running=sum(one.running for one in last),
            waiting=sum(one.waiting for one in last),
            free_blocks=sum(one.free_blocks for one in last),
        )


def sum_live(all_live: Sequence[EngineLive], steps: list[LiveStep]) -> EngineLive:
    """Return the state of all replicas together, with `steps`. Slots are numbered one replica after the other."""
    if len(all_live) == 1:
        return replace(all_live[0], steps=steps)
    per_cell = max(live.blocks_per_cell for live in all_live)
    running: list[LiveRequest] = []
    cells = array("H")
    for live in all_live:
        cells.extend(_shift(_coarser(_cells(live), live.blocks_per_cell, per_cell), len(running)))
        running += live.running
    return EngineLive(
        stats=sum_stats([live.stats for live in all_live], []),
        steps=steps,
        running=running,
        waiting=[request for live in all_live for request in live.waiting],
        blocks=cells.tobytes(),
        blocks_per_cell=per_cell,
        shared_blocks=sum(live.shared_blocks for live in all_live),
    )


def _cells(live: EngineLive) -> array[int]:
    cells = array("H")
    cells.frombytes(live.blocks)
    return cells


def _coarser(cells: array[int], own: int, wanted: int) -> array[int]:
    """Return cells of `wanted` blocks, or a few less, made of cells of `own` blocks."""
    step = max(1, wanted // own)
    return (
        cells if step == 1 else array("H", (max(cells[at : at + step]) for at in range(0, len(cells), step)))
    )


def _shift(cells: array[int], owners: int) -> array[int]:
    """Return cells whose owners are behind `owners` other ones."""
    if not owners:
        return cells
    return array("H", (cell + owners if cell >= _FIRST_OWNER else cell for cell in cells))
