"""The executor over all ranks: every plan goes to the other ranks first, then to the one in this process.

Every rank runs the same steps and samples the same tokens, because logits are equal on all of them. So nothing comes
back from the other ranks, and the results are those of the rank here. A step that fails on one rank leaves the others
waiting for it, so any failure ends the engine, with the rank in its message.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from quire.ranks.group import RankGroup
from quire.ranks.messages import STOP, WARM_UP, encode_forward, encode_sample
from quire.types import EngineDead, Executor, StepHandle, StepPlan, StepResult, TokenMasks

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")

_SPIN_S = 2e-3  # of a wait, before it sleeps between two looks
_NAP_S = 50e-6


class _WatchingHandle:
    """A step in flight, whose wait ends if a rank fails."""

    def __init__(self, handle: StepHandle, group: RankGroup) -> None:
        self._handle, self._group = handle, group

    @property
    def is_timed(self) -> bool:
        return self._handle.is_timed

    def ready(self) -> bool:
        return self._handle.ready()

    def wait(self) -> StepResult:
        begin = time.monotonic()
        while not self._handle.ready():
            waited = time.monotonic() - begin
            if waited > self._group.timeout_s:
                raise self._group.give_up(f"a step has not ended in {self._group.timeout_s:g} s")
            self._group.check()
            if waited > _SPIN_S:
                time.sleep(_NAP_S)
        return self._handle.wait()


class GroupExecutor:
    """Executor that runs each plan on the ranks of `group` and on `local`, the first rank."""

    def __init__(self, local: Executor, group: RankGroup) -> None:
        self._local, self._group = local, group

    def forward(self, plan: StepPlan) -> None:
        self._send(encode_forward(plan))
        self._run(lambda: self._local.forward(plan))

    def drafts(self) -> np.ndarray:
        return self._run(self._local.drafts)

    def sample(self, step: int, masks: TokenMasks | None) -> StepHandle:
        self._send(encode_sample(step, masks))
        return _WatchingHandle(self._run(lambda: self._local.sample(step, masks)), self._group)

    def warm_up(self) -> bool:
        """Prepare a later step on all ranks. An idle engine also learns here that a rank has failed."""
        self._send(bytes((WARM_UP,)))
        return self._run(self._local.warm_up)

    def close(self) -> None:
        with contextlib.suppress(EngineDead):  # the processes have been killed
            self._send(bytes((STOP,)))
        self._local.close()
        self._group.close()

    def _send(self, body: bytes) -> None:
        self._group.check()
        self._group.send(body)

    def _run(self, work: Callable[[], T]) -> T:
        """Return the result of `work` on the rank here; its errors are often the consequence of another rank's."""
        try:
            with self._group.watched():
                return work()
        except Exception as error:
            raise self._group.give_up(error) from error
