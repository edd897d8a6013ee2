"""The builder of a plan. The scheduler adds rows to it, and reads from it which rows the results belong to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import numpy as np

from quire.core.clocks import CatchUpRow
from quire.core.snapshots import StateCopies
from quire.core.steplog import AdmissionRecord, RecordedRows, StepRecord
from quire.types import LogprobArrays, NewBlock, Request, SlotAdmission, StepPlan, TokenLogprobs

_NO_BLOCKS = np.empty((0, 4), np.int32)


class ComputedRow(NamedTuple):
    """A request of which a step has computed the KV entries before `end`."""

    request: Request
    end: int


def _reads_prompt(row: CatchUpRow) -> bool:
    """Return whether the tokens of a prompt are scored or pooled."""
    return row.request.params.prompt_logprobs is not None or row.request.source.pooling is not None


@dataclass(slots=True)
class PromptScores:
    """Log-probabilities of the prompt positions from `start` on."""

    start: int
    entries: list[TokenLogprobs]


class PlanRows(NamedTuple):
    """Rows of a plan as columns. Nothing in it may be modified: the steps of an unchanged batch share columns."""

    requests: list[Request]
    ids: list[str]
    table_rows: np.ndarray  # int64 [rows], of the requests in the table
    slots: np.ndarray  # int32 [rows]
    starts: np.ndarray  # int32 [rows]
    num_tokens: np.ndarray  # int32 [rows], draft tokens included
    drafts: np.ndarray  # int32 [rows]
    most: np.ndarray  # integers [rows], most tokens that the row yields if it samples: 1 + its draft tokens
    samples: np.ndarray  # bool [rows]
    total_drafts: int
    num_sampling: int  # rows that sample

    @classmethod
    def of(cls, requests: list[Request], numbers: list[tuple[int, ...]]) -> PlanRows:
        """Return rows whose numbers are given row by row, in the order of the columns."""
        rows, slots, starts, counts, drafts, samples = np.array(numbers, np.int32).reshape(-1, 6).T.copy()
        ids = [request.id for request in requests]
        sampling = int(samples.sum())
        return cls(
            requests,
            ids,
            rows,
            slots,
            starts,
            counts,
            drafts,
            drafts + 1,
            samples == 1,
            int(drafts.sum()),
            sampling,
        )

    def starting_at(self, starts: np.ndarray) -> PlanRows:
        """Return these rows with other `starts`. Quicker than `_replace`, and called in each step."""
        return PlanRows._make((*self[:4], starts, *self[5:]))

    def followed_by(self, others: PlanRows) -> PlanRows:
        """Return these rows and `others` behind them."""
        columns = [np.concatenate(pair) for pair in zip(self[2:9], others[2:9])]
        totals = self.total_drafts + others.total_drafts, self.num_sampling + others.num_sampling
        return PlanRows._make([self.requests + others.requests, self.ids + others.ids, *columns, *totals])


@dataclass(slots=True)
class PlanBuilder:
    """A plan under construction.

    `budget` is the number of tokens that may still be added; a row takes at least `min_charge` of it.
    """

    budget: int
    step: int
    min_charge: int = 0
    total_tokens: int = 0
    admissions: list[SlotAdmission] = field(default_factory=list)
    new_blocks: list[NewBlock] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    published: set[int] = field(default_factory=set)  # blocks that this step fills and publishes
    filled: list[Request] = field(default_factory=list)  # decoding requests of which this step fills a block
    catching_up: list[CatchUpRow] = field(default_factory=list)
    dropped: set[Request] = field(default_factory=set)  # requests whose sampled tokens are dropped
    copies: StateCopies = field(default_factory=StateCopies)
    _columns: PlanRows | None = None  # the first rows
    _others: list[Request] = field(default_factory=list)  # the requests of further rows
    _numbers: list[tuple[int, ...]] = field(default_factory=list)  # and these rows

    def admit(self, request: Request) -> None:
        """Let a request take its slot, with its present tokens and blocks."""
        tokens, blocks = request.tokens[:], [table.blocks[:] for table in request.tables]
        self.admissions.append(
            SlotAdmission(request.slot, tokens, request.prompt_len, request.computed, blocks, request.source)
        )

    def add(self, request: Request, n: int, drafts: int) -> bool:
        """Add a row with the next `n` tokens of a request, of which the last `drafts` are draft tokens.

        Returns:
            True if the row reaches the last token of the request, so that new ones are sampled.
        """
        start = request.computed
        samples = start + n == request.known + request.pending + drafts
        self.charge(n)
        self.total_tokens += n
        self._others.append(request)
        self._numbers.append((request.row, request.slot, start, n, drafts, samples))
        if request.catching_up:
            self.catching_up.append(CatchUpRow(request, n - drafts, samples))
        return samples

    def add_decoding(self, rows: PlanRows) -> None:
        """Add rows of one token and their drafts, which are the first rows of the plan."""
        assert not self.num_rows, "decoding rows come first"
        self._columns, self.total_tokens = rows, len(rows.requests) + rows.total_drafts
        self.budget = max(0, self.budget - self.total_tokens)

    @property
    def num_rows(self) -> int:
        """Number of rows so far."""
        return len(self._others) + (len(self._columns.requests) if self._columns else 0)

    @property
    def columns(self) -> PlanRows:
        """The rows so far."""
        if self._others or not self._columns:
            others = PlanRows.of(self._others, self._numbers)
            self._columns = self._columns.followed_by(others) if self._columns else others
            self._others, self._numbers = [], []
        return self._columns

    @property
    def rows(self) -> list[Request]:
        """The requests of the rows so far. Read-only."""
        return self.columns.requests

    def charge(self, n: int) -> None:
        """Take a row of `n` tokens out of the budget."""
        left = self.budget - (n if n > self.min_charge else self.min_charge)
        self.budget = left if left > 0 else 0

    def forget_sample(self, request: Request) -> None:
        """Note that the sampled token of a request is dropped, so that the request has not caught up."""
        self.dropped.add(request)
        self.catching_up = [
            row._replace(is_last=False) if row.request is request else row for row in self.catching_up
        ]

    def plan(self) -> StepPlan:
        """Build the plan."""
        columns = self.columns
        # Only rows that catch up hold prompt tokens to score or to pool, and few requests ask for either.
        prompts = columns.requests if any(map(_reads_prompt, self.catching_up)) else ()
        return StepPlan(
            step=self.step,
            slots=columns.slots,
            num_tokens=columns.num_tokens,
            num_drafts=columns.drafts,
            starts=columns.starts,
            samples=columns.samples,
            admissions=self.admissions,
            new_blocks=self._block_columns(),
            total_tokens=self.total_tokens,
            max_drafts=-1 if columns.total_drafts else 0,
            num_sampling=columns.num_sampling,
            score_rows=[
                i
                for i, r in enumerate(prompts)
                if r.params.prompt_logprobs is not None and columns.starts[i] + 1 < r.prompt_len
            ],
            restores=list(self.copies.restores.items()),
            saves=list(self.copies.saves.items()),
            pool_rows=[i for i, r in enumerate(prompts) if r.source.pooling is not None],
        )

    def _block_columns(self) -> np.ndarray:
        """Return the new blocks as rows of an array, int32 [blocks, 4]."""
        if not self.new_blocks:
            return _NO_BLOCKS
        count = 4 * len(self.new_blocks)
        return np.fromiter(chain.from_iterable(self.new_blocks), np.int32, count).reshape(-1, 4)

    def record(
        self,
        plan: StepPlan,
        running: int,
        waiting: int,
        wait_reason: str | None,
        free_blocks: int,
        now_s: float,
    ) -> StepRecord:
        """Build the record of the plan for the log.

        The other arguments describe the scheduler's state after the step is scheduled.
        """
        columns = self.columns
        return StepRecord(
            step=self.step,
            time_s=now_s,
            rows=RecordedRows(columns.ids, plan.starts, plan.num_tokens, plan.total_tokens),
            admitted=[AdmissionRecord(a.request.id, len(a.tokens), a.computed) for a in self.admissions],
            preempted=self.preempted,
            running=running,
            waiting=waiting,
            wait_reason=wait_reason,
            free_blocks=free_blocks,
            prompt_tokens=sum([row.num_tokens for row in self.catching_up]),
            drafts=columns.total_drafts,
        )

    def computed(self) -> Iterator[ComputedRow]:
        """Iterate over the rows, with how far each reaches without draft tokens."""
        columns = self.columns
        ends = (columns.starts + columns.num_tokens - columns.drafts).tolist()
        yield from map(ComputedRow, columns.requests, ends)

    def take_scores(self, by_row: dict[int, LogprobArrays]) -> dict[str, PromptScores]:
        """Return the prompt log-probabilities of the step by request id, and note in the requests how far they reach.

        Entries that were delivered before a preemption are left out.
        """
        found: dict[str, PromptScores] = {}
        columns = self.columns
        for row, arrays in by_row.items():
            request = columns.requests[row]
            top = request.params.prompt_logprobs
            if request.ended or top is None:
                continue
            first = int(columns.starts[row]) + 1  # entry i scores the token at position first + i
            last = min(first + len(arrays), request.prompt_len)
            begin = max(first, request.scored)
            if begin < last:
                entries = [arrays.at(i - first, top) for i in range(begin, last)]
                found[request.id] = PromptScores(begin, entries)
                request.scored = last
        return found
