"""The log of steps, which metrics, receipts, live view and benchmarks read.

The log only observes: the scheduler appends records, and no decision of the engine depends on the log. The step loop
adds its durations to the record of a step that it holds.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, overload

import numpy as np

from quire.types import Totals


class RecordedRow(NamedTuple):
    """A row of a step."""

    request_id: str
    start: int  # first KV entry
    num_tokens: int


class RecordedRows(Sequence[RecordedRow]):
    """The rows of a step in batch order, kept as columns.

    Attributes:
        ids: request ids.
        starts: int32 [rows], first KV entry of each row.
        counts: int32 [rows], tokens of each row.
        num_tokens: sum of `counts`.
    """

    __slots__ = ("counts", "ids", "num_tokens", "starts")

    def __init__(self, ids: Sequence[str], starts: np.ndarray, counts: np.ndarray, num_tokens: int) -> None:
        self.ids, self.starts, self.counts, self.num_tokens = ids, starts, counts, num_tokens

    @classmethod
    def of(cls, rows: Iterable[tuple[str, int, int]]) -> RecordedRows:
        """Return rows that are given as tuples."""
        ids, starts, counts = zip(*rows)
        return cls(ids, np.array(starts, np.int32), np.array(counts, np.int32), sum(counts))

    @overload
    def __getitem__(self, index: int) -> RecordedRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[RecordedRow]: ...
    def __getitem__(self, index: int | slice) -> RecordedRow | list[RecordedRow]:
        if isinstance(index, slice):
            return list(self)[index]
        return RecordedRow(self.ids[index], int(self.starts[index]), int(self.counts[index]))

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[RecordedRow]:
        return map(RecordedRow, self.ids, self.starts.tolist(), self.counts.tolist())


class AdmissionRecord(NamedTuple):
    """A request that took a slot, its known tokens, and how many of them the prefix cache held."""

    request_id: str
    known: int
    cached: int


@dataclass(slots=True)
class StepRecord:
    """One step. Durations are seconds of host time, but for `took_s`, which the device measures if it has a clock."""

    step: int
    time_s: float  # monotonic clock, when the step was scheduled
    rows: RecordedRows
    admitted: list[AdmissionRecord]
    preempted: list[str]
    running: int
    waiting: int
    # why the first waiting request waits: slots, latency, blocks, tokens, batch, results or grammar
    wait_reason: str | None
    free_blocks: int
    schedule_s: float = 0.0
    launch_s: float = 0.0
    wait_s: float = 0.0
    retire_s: float = 0.0
    ready_s: float = (
        math.inf
    )  # monotonic clock, when its results were there, if that was before they were asked for
    prompt_tokens: int = 0  # prompt tokens, and tokens computed again after a preemption
    took_s: float = 0.0  # from the end of the previous step, or its own start if that is later, to its end
    drafts: int = 0  # draft tokens
    predicted_s: float = 0.0  # of `took_s`, when it was scheduled; 0 if nothing predicts it
    generated: int = 0  # tokens sampled by its rows; 0 until its results have arrived

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the step."""
        return self.rows.num_tokens


class StepLog:
    """A ring of the newest `capacity` records, and counters since the start.

    Attributes:
        now: the clock of the engine, in seconds; a simulation has one of its own.
    """

    def __init__(self, capacity: int = 4096, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self._records: deque[StepRecord] = deque(maxlen=capacity)
        self.totals = Totals()
        self.ended = 0  # number of steps whose results have arrived

    def append(self, record: StepRecord) -> None:
        """Add the record of a step that has just been scheduled."""
        self._records.append(record)
        self.totals.steps += 1

    def end(self, record: StepRecord) -> None:
        """Note that the results of a step have arrived. Steps end in order."""
        self.ended = record.step + 1

    def ended_since(self, step: int) -> list[StepRecord]:
        """Return the records of ended steps from number `step` on, as far as the log still holds them."""
        first = max(step, self.totals.steps - len(self._records))
        return [self._records[i - self.totals.steps] for i in range(first, self.ended)]

    @property
    def last(self) -> StepRecord:
        """Return the newest record. Raises IndexError if there is none."""
        return self._records[-1]

    def newest(self, count: int) -> list[StepRecord]:
        """Return the last `count` records, oldest first."""
        return [self._records[-i] for i in range(count, 0, -1)]

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[StepRecord]:
        return iter(self._records)
