"""Scheduling policies: three independent choices, each a function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.types import EngineRequest, RequestOrder


def fcfs(request: EngineRequest, due_s: float, arrival: int) -> RequestOrder:
    """Sort by the time when the first token is due. With equal targets that is first come, first served."""
    return RequestOrder(0, due_s, arrival)


def priority(request: EngineRequest, due_s: float, arrival: int) -> RequestOrder:
    """Sort by priority, the lower number first, then as `fcfs`."""
    return RequestOrder(request.priority, due_s, arrival)


def continuous(batch_was_empty: bool, budget: int) -> bool:
    """Admit whenever the step has tokens left (continuous batching, Orca, OSDI 2022)."""
    return budget > 0


def static(batch_was_empty: bool, budget: int) -> bool:
    """Admit only into a batch that was empty before this step. It then runs until its last request ends."""
    return batch_was_empty


def chunked(want: int, budget: int) -> int:
    """Split a row over steps: run as many tokens as the budget allows (Sarathi-Serve, arXiv:2403.02310)."""
    return want if want < budget else budget


def whole(want: int, budget: int) -> int:
    """Run all tokens of a row in one step, or none."""
    return want if want <= budget else 0


@dataclass(frozen=True, slots=True)
class Policy:
    """The choices of a scheduler.

    Args:
        order: returns the sort key of a request from the request, the time when its first token is due, and its number.
        admits: returns whether a waiting request may join the batch, from whether the batch was empty before the step
            and the tokens left in the step.
        chunk: returns how many tokens a row runs, from the number that it wants and the tokens left in the step.
    """

    order: Callable[[EngineRequest, float, int], RequestOrder] = fcfs
    admits: Callable[[bool, int], bool] = continuous
    chunk: Callable[[int, int], int] = chunked
