"""Scheduling policies: three independent choices, each a function handed to the scheduler.

`order` sorts requests (smaller first; the largest is the first victim when blocks run out), `admits` says
whether a waiting request may join the batch, `chunk` how many of the wanted tokens a row may run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.types import EngineRequest


def fcfs(request: EngineRequest, sequence: int) -> tuple[int, ...]:
    """First come, first served."""
    return (sequence,)


def priority(request: EngineRequest, sequence: int) -> tuple[int, ...]:
    """The lower number first; first come, first served among equals."""
    return (request.priority, sequence)


def continuous(batch_was_empty: bool, budget: int) -> bool:
    """Join whenever the step has tokens left (Orca, OSDI 2022)."""
    return budget > 0


def static(batch_was_empty: bool, budget: int) -> bool:
    """Join only a batch that has just been started; it then runs until its last request is done."""
    return batch_was_empty


def chunked(want: int, budget: int) -> int:
    """A prompt may be split over steps (Sarathi-Serve, arXiv:2403.02310)."""
    return want if want < budget else budget


def whole(want: int, budget: int) -> int:
    """A row runs all its tokens in one step, or none."""
    return want if want <= budget else 0


@dataclass(frozen=True, slots=True)
class Policy:
    order: Callable[[EngineRequest, int], tuple[int, ...]] = fcfs
    admits: Callable[[bool, int], bool] = continuous
    chunk: Callable[[int, int], int] = chunked
