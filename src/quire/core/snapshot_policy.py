"""The choice of the places where the state of a request is worth a snapshot."""

from __future__ import annotations

from dataclasses import dataclass

from quire.types import Request

NEVER = 1 << 60  # a place that no request reaches
_LEAST_BLOCKS = 2  # a snapshot must save so many blocks, because it costs a row, and in a prompt a step


@dataclass(frozen=True, slots=True)
class SnapshotPolicy:
    """Snapshots at ends of blocks: of the prompt, of what it shares with an earlier one, and at fixed distances.

    - The last whole block of a prompt serves other answers to the same prompt, and the request itself after a preemption.
    - Where a prompt leaves an earlier one, as behind a system prompt, others will leave it too. The first prompt cannot
      know that place, so the second one takes the snapshot.
    - One snapshot every `interval` tokens serves documents that are asked about at several places.
    - The latest of those every `answers` tokens of an answer serves the next turn of a conversation.

    Attributes:
        block_size: tokens per block.
        interval: tokens between snapshots, a multiple of the block size; 0: none.
        answers: tokens between snapshots in answers, likewise. It needs rows of one token, so with drafts it is 0.
    """

    block_size: int
    interval: int = 0
    answers: int = 0

    def next_end(self, request: Request, computed: int) -> int:
        """Return the first place behind token `computed` where a request needs a snapshot, or NEVER."""
        end = self._prompt_end(request)
        places = [end, request.diverges]
        if self.interval and (place := _next(computed, self.interval)) <= end:
            places.append(place)
        if self.answers and (place := _next(computed, self.answers)) > end:
            places.append(place)
        least = request.last_snapshot + _LEAST_BLOCKS * self.block_size
        return min((place for place in places if place > computed and place >= least), default=NEVER)

    def keeps(self, request: Request, place: int) -> bool:
        """Return whether the snapshot at `place` stays when the request takes another one."""
        return place <= self._prompt_end(request) or (self.interval > 0 and place % self.interval == 0)

    def _prompt_end(self, request: Request) -> int:
        """Return the end of the last whole block in front of the last token that was known at admission."""
        return (request.admitted_known - 1) // self.block_size * self.block_size


def _next(place: int, distance: int) -> int:
    """Return the first multiple of `distance` behind `place`."""
    return (place // distance + 1) * distance
