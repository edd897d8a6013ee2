"""The choice of the places where the state of a request is worth a snapshot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from quire.types import Request


@dataclass(frozen=True, slots=True)
class SnapshotPolicy:
    """Snapshots at ends of blocks: of the prompt, of what it shares with an earlier one, and at a fixed distance.

    - The last whole block of a prompt serves the next turn of a conversation, the other answers to the same prompt, and
      the request itself after a preemption.
    - Where a prompt leaves an earlier one, as behind a system prompt, others will leave it too. The first prompt cannot
      know that place, so the second one takes the snapshot.
    - One snapshot every `interval` tokens serves documents that are asked about at several places, and answers.

    Attributes:
        block_size: tokens per block.
        interval: tokens between snapshots, a multiple of the block size; 0: no snapshots at a fixed distance.
        in_answers: whether the interval continues in the answer, which needs rows of one token.
    """

    block_size: int
    interval: int = 0
    in_answers: bool = True

    NEVER: ClassVar[int] = 1 << 60
    _LEAST_BLOCKS: ClassVar[int] = (
        2  # a snapshot must save that many blocks, because it costs a step and a row
    )

    def next_end(self, request: Request, computed: int) -> int:
        """Return the first place behind token `computed` where a request needs a snapshot, or NEVER."""
        end = (request.admitted_known - 1) // self.block_size * self.block_size
        places = [end, request.diverges]
        if self.interval:
            place = (computed // self.interval + 1) * self.interval
            if place <= end or self.in_answers:
                places.append(place)
        least = request.last_snapshot + self._LEAST_BLOCKS * self.block_size
        return min((place for place in places if place > computed and place >= least), default=self.NEVER)
