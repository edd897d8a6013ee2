"""Counts by size for Prometheus, and the newest values themselves for percentiles.

A histogram of prometheus_client costs over a microsecond a value; this one, a third of that, and it is asked
at every token. What is exported is made from it when somebody looks (metrics.py).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

_RECENT = 4096


class Histogram:
    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: upper ends of the buckets, ascending; a last one takes what is above."""
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0
        self._recent: deque[float] = deque(maxlen=_RECENT)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value
        self._recent.append(value)

    @property
    def count(self) -> int:
        return sum(self.counts)

    def percentiles(self, *wanted: float) -> list[float] | None:
        """Of the newest values, each the nearest one that is there; None when there is none."""
        ordered = sorted(self._recent)
        if not ordered:
            return None
        return [ordered[min(len(ordered) - 1, int(len(ordered) * p / 100))] for p in wanted]

    def buckets(self) -> list[tuple[str, float]]:
        """(upper end, values up to it), as Prometheus wants them."""
        found, total = [], 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts):
            total += count
            found.append(("+Inf" if bound == float("inf") else str(float(bound)), float(total)))
        return found


def one_two_five(largest: int) -> list[int]:
    """1, 2, 5, 10, 20, ... up to `largest`."""
    found, power = [], 1
    while power <= largest:
        found += [value for value in (power, 2 * power, 5 * power) if value <= largest]
        power *= 10
    return found
