"""`Parallel`: this rank's place in a tensor-parallel group. A group of one is the degenerate case."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.parallel.communicator import ALONE, Communicator
from quire.types import ModelError


@dataclass(frozen=True, slots=True)
class Parallel:
    """Rank `rank` of a group of `size`. With size 1, every shard is the whole and every reduction the identity."""

    rank: int = 0
    size: int = 1
    communicator: Communicator = ALONE

    def cut(self, length: int, units: int | None = None) -> slice:
        """Return this rank's shard of a dimension of `length`.

        Args:
            length: size of the dimension.
            units: number of parts that must stay whole, such as heads. If there are fewer than ranks, several ranks
                get the same one.

        Raises:
            ModelError: if the ranks cannot have equal shards.
        """
        units = length if units is None else units
        held, width = self.share(units), length // units
        first = self.rank * units // self.size
        return slice(first * width, (first + held) * width)

    def share(self, units: int) -> int:
        """Return how many of `units` parts each rank holds. Fewer parts than ranks are replicated.

        Raises:
            ModelError: if neither number is a multiple of the other.
        """
        if units % self.size and self.size % units:
            raise ModelError(
                f"{units} parts cannot be shared equally by {self.size} ranks; choose another tensor_parallel_size"
            )
        return max(units // self.size, 1)

    def padded_cut(self, length: int) -> tuple[int, slice]:
        """Return the length of every rank's shard, rounded up, and the part of `length` that this rank's shard holds."""
        part = -(-length // self.size)
        first = min(self.rank * part, length)
        return part, slice(first, min(first + part, length))

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of `x` over all ranks. `x` may be overwritten."""
        return self.communicator.all_reduce(x)

    def all_to_all(self, x: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """Send the first `sent[0]` rows of `x` to rank 0, the next ones to rank 1, and so on.

        Returns:
            The rows from all ranks, in their order; `received` are the numbers of rows.
        """
        return self.communicator.all_to_all(x, sent, received)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return the shards x [rows, width] of all ranks side by side, [rows, size * width]."""
        if self.size == 1:
            return x
        parts = self.communicator.all_gather(x)  # [size, rows, width]
        return parts.transpose(0, 1).reshape(x.shape[0], -1)
