"""The padding of steps on a GPU that replays captured steps, followed without a device.

The time of a step depends on the tokens that run, and these change: a new shape runs in the graph of a longer one until
it is captured itself (`worker/launch/graphs.py`). Times that are learnt meanwhile do not hold afterwards.
"""

from __future__ import annotations

import copy
from typing import Protocol

from quire.core.step_time import StepLoad
from quire.types import EngineInfo
from quire.worker.step.step_shapes import MAX_GRAPHS, GraphLimits, StandIns, StepShapes
from quire.worker.step.step_stages import TOKENS


class StepPadding(Protocol):
    """The padding of the steps of an engine, which must all be told in order."""

    def run(self, load: StepLoad) -> tuple[StepLoad, bool]:
        """Return what the device runs for a step, and whether it captures the step."""
        ...

    def copy(self) -> StepPadding:
        """Return the padding of an engine in the same state."""
        ...


class NoPadding:
    """A `StepPadding` that pads nothing."""

    def run(self, load: StepLoad) -> tuple[StepLoad, bool]:
        return load, False

    def copy(self) -> NoPadding:
        return self


class GraphPadding:
    """A `StepPadding` of CUDA graphs, for steps with prompts.

    Decoding steps are captured in all sizes, so their times are learnt by rows. One prompt per step is assumed, because a
    `StepLoad` does not count them; the graphs have only a few numbers of rows.

    Args:
        max_rows: most rows of a step.
        step_tokens: most tokens of a step.
    """

    def __init__(self, max_rows: int, step_tokens: int) -> None:
        limits = GraphLimits.of_sizes(max_rows, step_tokens, shared_bytes=0, max_graphs=MAX_GRAPHS)
        self._shapes, self._stand_ins = StepShapes(limits), StandIns()
        self._captured = dict.fromkeys(self._shapes.at_start())

    def run(self, load: StepLoad) -> tuple[StepLoad, bool]:
        if not load.prompt_tokens:
            return load, False
        rows, tokens = load.rows + 1, load.rows + load.prompt_tokens
        wanted = self._shapes.fit(rows, tokens, TOKENS, shares=False)
        if wanted is None:
            return load, False
        shape, captures = wanted, False
        if wanted not in self._captured:
            has_room = len(self._captured) < MAX_GRAPHS
            shape, captures = self._stand_ins.choose(wanted, self._captured, has_room)
        if captures:
            self._captured[wanted] = None
            self._stand_ins.forget()
        return load._replace(prompt_tokens=shape.tokens - load.rows), captures

    def copy(self) -> GraphPadding:
        return copy.deepcopy(self)


def padding_of(info: EngineInfo, captures: bool = True) -> StepPadding:
    """Return the padding of an engine that has just started.

    Args:
        info: the engine.
        captures: whether it replays captured steps if its device can.
    """
    if not (captures and info.device.startswith("cuda")):
        return NoPadding()
    return GraphPadding(info.max_num_seqs, info.max_num_batched_tokens)
