"""Which way of summing over GPUs serves which size: one table, with the limits that were measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SumMethod = Literal["one trip", "two trips", "two shots", "wider"]


@dataclass(frozen=True, slots=True)
class SumLimits:
    """Bytes up to which each method is the fastest (docs/SCALING.md has the figures). 0 switches a method off.

    Attributes:
        one_trip: of Quire's kernel in one trip, divided by the ranks: every rank sends everything to every other one.
        two_trips: of Quire's kernel in two trips, which has not been measured yet and is therefore off.
        two_shots: of PyTorch's sum over symmetric memory. NCCL sums larger tensors.
    """

    one_trip: int = 2 << 20
    two_trips: int = 0
    two_shots: int = 32 << 20

    def pick(self, nbytes: int, size: int) -> SumMethod:
        """Return the method for a tensor of `nbytes` bytes on `size` ranks."""
        if nbytes <= self.one_trip // size:
            return "one trip"
        if nbytes <= self.two_trips:
            return "two trips"
        # PyTorch's sum gives every rank an equal number of 16-byte vectors.
        return "two shots" if nbytes <= self.two_shots and nbytes % (16 * size) == 0 else "wider"


MEASURED = SumLimits()
