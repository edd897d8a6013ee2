"""The log of steps: the one record that receipts, metrics, live view and flight recorder read.

A bounded ring, written by the step loop only. Durations are seconds of host time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from quire.types import Totals


@dataclass(slots=True)
class StepRecord:
    """One step. `rows` holds (request id, first KV entry, tokens run) in batch order."""

    step: int
    time_s: float  # monotonic clock, when the step was scheduled
    rows: list[tuple[str, int, int]]
    admitted: list[tuple[str, int, int]]  # (request id, known tokens, of them found in the prefix cache)
    preempted: list[str]
    running: int
    waiting: int
    # why the first waiting request waits: slots, blocks, tokens, batch, results or grammar
    wait_reason: str | None
    free_blocks: int
    schedule_s: float = 0.0
    launch_s: float = 0.0
    wait_s: float = 0.0
    retire_s: float = 0.0
    prompt_tokens: int = 0  # of requests that have not caught up: prompts, and what a preemption threw away
    took_s: float = 0.0  # from the end of the step before it, or its own beginning, to its end
    drafts: int = 0  # draft tokens


class StepLog:
    def __init__(self, capacity: int = 4096) -> None:
        self._records: deque[StepRecord] = deque(maxlen=capacity)
        self.totals = Totals()
        self.ended = 0  # steps whose results are there

    def append(self, record: StepRecord) -> None:
        self._records.append(record)
        self.totals.steps += 1

    def end(self, step: int, now_s: float, previous_s: float) -> StepRecord:
        """Book the end of a step, which began when the one before it ended at the earliest; its record."""
        record = self._records[step - self.totals.steps]
        record.took_s = now_s - max(previous_s, record.time_s)
        self.ended = step + 1
        return record

    def ended_since(self, step: int) -> list[StepRecord]:
        """The records of `step` and of all after it that have ended, as far as they are still there."""
        first = max(step, self.totals.steps - len(self._records))
        return [self._records[i - self.totals.steps] for i in range(first, self.ended)]

    @property
    def last(self) -> StepRecord:
        return self._records[-1]

    def newest(self, count: int) -> list[StepRecord]:
        """The last `count` records, oldest first."""
        return [self._records[-i] for i in range(count, 0, -1)]

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[StepRecord]:
        return iter(self._records)
