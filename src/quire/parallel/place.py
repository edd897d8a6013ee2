"""`Place`: which part of the model a rank holds, among stages of ranks that share their layers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """Rank `rank` of a grid of `stages` pipeline stages with `size` tensor-parallel ranks each.

    Ranks are numbered from the last stage to the first, because results arrive in the last stage: rank 0, in the
    engine's process, is always there.
    """

    rank: int = 0
    size: int = 1
    stages: int = 1

    @property
    def count(self) -> int:
        """Number of ranks."""
        return self.size * self.stages

    @property
    def shard(self) -> int:
        """Number of this rank among those of its stage."""
        return self.rank % self.size

    @property
    def stage(self) -> int:
        """Index of this rank's stage."""
        return self.stages - 1 - self.rank // self.size

    def rank_of(self, stage: int, shard: int) -> int:
        """Return the rank with this place."""
        return (self.stages - 1 - stage) * self.size + shard

    def tensor_group(self, stage: int) -> list[int]:
        """Return the ranks that share the layers of a stage, by shard."""
        return [self.rank_of(stage, shard) for shard in range(self.size)]

    def column(self, shard: int) -> list[int]:
        """Return the ranks between which the states of a shard travel, by stage."""
        return [self.rank_of(stage, shard) for stage in range(self.stages)]
