"""A plan in the making, what the scheduler has put into the next step so far; later, whose its results are."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from quire.core.steplog import StepRecord
from quire.types import LogprobArrays, Request, SlotAdmission, StepPlan, TokenLogprobs


@dataclass(slots=True)
class PlanBuilder:
    """One list per column of the plan. `budget`: tokens that may still be added."""

    budget: int
    step: int
    rows: list[Request] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    num_drafts: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    admissions: list[SlotAdmission] = field(default_factory=list)
    new_blocks: list[tuple[int, int, list[int]]] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    published: set[int] = field(default_factory=set)  # blocks that this step completes, offered to others
    # (request, tokens of its row, whether it then has caught up), of those that had not
    catching_up: list[tuple[Request, int, bool]] = field(default_factory=list)

    def admit(self, request: Request) -> None:
        """The request, as it is now, takes its slot."""
        tokens, blocks = request.tokens[:], request.blocks[:]
        self.admissions.append(
            SlotAdmission(request.slot, tokens, request.prompt_len, request.computed, blocks, request.source)
        )

    def add(self, request: Request, n: int) -> bool:
        """A row of the request's next `n` tokens; whether it reaches the last, so that a new one is sampled."""
        drafts, start = request.drafts, request.computed
        samples = start + n == len(request.tokens) + request.pending + drafts
        self.budget -= n
        self.rows.append(request)
        self.slots.append(request.slot)
        self.num_tokens.append(n)
        self.num_drafts.append(drafts)
        self.starts.append(start)
        self.samples.append(samples)
        if request.catching_up:
            self.catching_up.append((request, n, samples))
        return samples

    def forget_sample(self, request: Request) -> None:
        """Note that the token of this request will not be used, so that the request has not caught up."""
        self.catching_up = [
            (other, n, samples and other is not request) for other, n, samples in self.catching_up
        ]

    def plan(self) -> StepPlan:
        starts, num_tokens = np.array(self.starts, np.int32), np.array(self.num_tokens, np.int32)
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
                for i, r in enumerate(self.rows)
                if r.params.prompt_logprobs is not None and self.starts[i] + 1 < r.prompt_len
            ],
            pool_rows=[i for i, r in enumerate(self.rows) if r.source.pooling is not None],
        )

    def record(self, running: int, waiting: int, wait_reason: str | None, free_blocks: int) -> StepRecord:
        """What the log keeps of this step, with the state in which it leaves the scheduler."""
        return StepRecord(
            step=self.step,
            time_s=time.monotonic(),
            rows=[(r.id, s, n) for r, s, n in zip(self.rows, self.starts, self.num_tokens)],
            admitted=[(a.request.id, len(a.tokens), a.computed) for a in self.admissions],
            preempted=self.preempted,
            running=running,
            waiting=waiting,
            wait_reason=wait_reason,
            free_blocks=free_blocks,
            prompt_tokens=sum(n for _, n, _ in self.catching_up),
            drafts=sum(self.num_drafts),
        )

    def take_scores(self, by_row: dict[int, LogprobArrays]) -> dict[str, tuple[int, list[TokenLogprobs]]]:
        """The step's prompt log-probabilities by request, with the position of the first; after a preemption
        those that were delivered already are dropped."""
        found: dict[str, tuple[int, list[TokenLogprobs]]] = {}
        for row, arrays in by_row.items():
            request = self.rows[row]
            top = request.params.prompt_logprobs
            if request.status == "finished" or top is None:
                continue
            first = self.starts[row] + 1  # entry i scores the token at position first + i
            last = min(first + len(arrays), request.prompt_len)
            begin = max(first, request.scored)
            if begin < last:
                found[request.id] = (begin, [arrays.at(i - first, top) for i in range(begin, last)])
                request.scored = last
        return found
