"""`Parallel`: this rank's place in a tensor-parallel group. One rank is the degenerate group."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Parallel:
    """Rank `rank` of `size`; with size 1 every cut is the whole and every reduction the identity."""

    rank: int = 0
    size: int = 1

    def cut(self, length: int) -> slice:
        """This rank's part of a dimension of `length`; raises ValueError when it does not divide."""
        if length % self.size:
            raise ValueError(f"cannot cut {length} into {self.size} equal parts")
        part = length // self.size
        return slice(self.rank * part, (self.rank + 1) * part)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks."""
        if self.size == 1:
            return x
        raise ValueError("tensor parallelism over several ranks is not built yet")
