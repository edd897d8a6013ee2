"""The log of steps: the one record that receipts, metrics, live view and flight recorder read.

A bounded ring, written by the step loop only. Durations are seconds of host time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass


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
    wait_reason: (
        str | None
    )  # why the first waiting request waits: slots, pages, tokens, batch, results or grammar
    free_blocks: int
    schedule_s: float = 0.0
    launch_s: float = 0.0
    wait_s: float = 0.0
    retire_s: float = 0.0
    decodes: int = 0  # rows that run one token, drafts aside; all other rows compute prompts
    drafts: int = 0  # draft tokens


@dataclass(slots=True)
class Totals:
    """Counters since start, in requests, steps and tokens."""

    steps: int = 0
    requests: int = 0
    finished: int = 0
    aborted: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0


class StepLog:
    def __init__(self, capacity: int = 4096) -> None:
        self._records: deque[StepRecord] = deque(maxlen=capacity)
        self.totals = Totals()

    def append(self, record: StepRecord) -> None:
        self._records.append(record)
        self.totals.steps += 1

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

    def __reversed__(self) -> Iterator[StepRecord]:
        return reversed(self._records)
