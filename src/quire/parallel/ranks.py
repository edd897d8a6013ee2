"""`Parallel`: this rank's place in a tensor-parallel group. A group of one is the degenerate case."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Parallel:
    """Rank `rank` of a group of `size`. With size 1, every shard is the whole and every reduction the identity."""

    rank: int = 0
    size: int = 1

    def cut(self, length: int) -> slice:
        """Return this rank's shard of a dimension of `length`.

        Raises:
            ValueError: if `length` is not a multiple of the group's size.
        """
        if length % self.size:
            raise ValueError(f"cannot split a dimension of {length} into {self.size} equal shards")
        part = length // self.size
        return slice(self.rank * part, (self.rank + 1) * part)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of `x` over all ranks.

        Raises:
            ValueError: with more than one rank, which is not implemented yet.
        """
        if self.size == 1:
            return x
        raise ValueError("tensor parallelism over several ranks is not implemented yet")
