"""The builder of a plan. The scheduler adds rows to it, and reads from it which rows the results belong to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from quire.core.clocks import CatchUpRow
from quire.core.snapshots import StateCopies
from quire.core.steplog import AdmissionRecord, StepRecord
from quire.types import LogprobArrays, NewBlocks, Request, SlotAdmission, StepPlan, TokenLogprobs


class ComputedRow(NamedTuple):
    """A request of which a step has computed the KV entries before `end`."""

    request: Request
    end: int


@dataclass(slots=True)
class PromptScores:
    """Log-probabilities of the prompt positions from `start` on."""

    start: int
    entries: list[TokenLogprobs]


@dataclass(slots=True)
class PlanBuilder:
    """A plan under construction, with one list per column.

    `budget` is the number of tokens that may still be added; a row takes at least `min_charge` of it.
    """

    budget: int
    step: int
    min_charge: int = 0
    rows: list[Request] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    num_drafts: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    admissions: list[SlotAdmission] = field(default_factory=list)
    new_blocks: list[NewBlocks] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    published: set[int] = field(default_factory=set)  # blocks that this step fills and publishes
    filled: list[Request] = field(default_factory=list)  # decoding requests of which this step fills a block
    catching_up: list[CatchUpRow] = field(default_factory=list)
    copies: StateCopies = field(default_factory=StateCopies)

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
        samples = start + n == len(request.tokens) + request.pending + drafts
        self.charge(n)
        self.rows.append(request)
        self.slots.append(request.slot)
        self.num_tokens.append(n)
        self.num_drafts.append(drafts)
        self.starts.append(start)
        self.samples.append(samples)
        if request.catching_up:
            self.catching_up.append(CatchUpRow(request, n - drafts, samples))
        return samples

    def charge(self, n: int) -> None:
        """Take a row of `n` tokens out of the budget."""
        left = self.budget - (n if n > self.min_charge else self.min_charge)
        self.budget = left if left > 0 else 0

    def forget_sample(self, request: Request) -> None:
        """Note that the sampled token of a request is dropped, so that the request has not caught up."""
        self.catching_up = [
            row._replace(is_last=False) if row.request is request else row for row in self.catching_up
        ]

    def plan(self) -> StepPlan:
        """Build the plan."""
        starts, num_tokens = np.array(self.starts, np.int32), np.array(self.num_tokens, np.int32)
        # Only rows that catch up hold prompt tokens to score or to pool; in most steps there are none.
        prompts = self.rows if self.catching_up else ()
        return StepPlan(
            step=self.step,
            slots=np.array(self.slots, np.int32),
            num_tokens=num_tokens,
            num_drafts=np.array(self.num_drafts, np.int32),
            starts=starts,
            samples=np.array(self.samples, np.bool_),
            admissions=self.admissions,
            new_blocks=self.new_blocks,
            total_tokens=sum(self.num_tokens),
            max_seq_len=int((starts + num_tokens).max(initial=0)),
            score_rows=[
                i
                for i, r in enumerate(prompts)
                if r.params.prompt_logprobs is not None and self.starts[i] + 1 < r.prompt_len
            ],
            restores=list(self.copies.restores.items()),
            saves=list(self.copies.saves.items()),
            pool_rows=[i for i, r in enumerate(prompts) if r.source.pooling is not None],
        )

    def record(
        self, running: int, waiting: int, wait_reason: str | None, free_blocks: int, now_s: float
    ) -> StepRecord:
        """Build the record for the log. The arguments describe the scheduler's state after the step is scheduled."""
        return StepRecord(
            step=self.step,
            time_s=now_s,
            rows=[(r.id, s, n) for r, s, n in zip(self.rows, self.starts, self.num_tokens)],
            admitted=[AdmissionRecord(a.request.id, len(a.tokens), a.computed) for a in self.admissions],
            preempted=self.preempted,
            running=running,
            waiting=waiting,
            wait_reason=wait_reason,
            free_blocks=free_blocks,
            prompt_tokens=sum(row.num_tokens for row in self.catching_up),
            drafts=sum(self.num_drafts),
        )

    def computed(self) -> Iterator[ComputedRow]:
        """Iterate over the rows, with how far each reaches without draft tokens."""
        ends = zip(self.rows, self.starts, self.num_tokens, self.num_drafts)
        return (ComputedRow(request, start + count - drafts) for request, start, count, drafts in ends)

    def take_scores(self, by_row: dict[int, LogprobArrays]) -> dict[str, PromptScores]:
        """Return the prompt log-probabilities of the step by request id, and note in the requests how far they reach.

        Entries that were delivered before a preemption are left out.
        """
        found: dict[str, PromptScores] = {}
        for row, arrays in by_row.items():
            request = self.rows[row]
            top = request.params.prompt_logprobs
            if request.ended or top is None:
                continue
            first = self.starts[row] + 1  # entry i scores the token at position first + i
            last = min(first + len(arrays), request.prompt_len)
            begin = max(first, request.scored)
            if begin < last:
                entries = [arrays.at(i - first, top) for i in range(begin, last)]
                found[request.id] = PromptScores(begin, entries)
                request.scored = last
        return found
