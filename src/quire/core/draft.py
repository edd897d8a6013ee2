"""A plan in the making: what the scheduler has put into the next step so far."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from quire.types import Admit, Request, StepPlan


@dataclass(slots=True)
class Draft:
    """One list per column of the plan. `budget`: tokens that may still be added."""

    budget: int
    step: int
    rows: list[Request] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    num_drafts: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    admits: list[Admit] = field(default_factory=list)
    new_blocks: list[tuple[int, int, list[int]]] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    # (request, tokens of its row, whether it then has caught up), of those that had not
    catching_up: list[tuple[Request, int, bool]] = field(default_factory=list)

    def admit(self, request: Request) -> None:
        """The request, as it is now, takes its slot."""
        tokens, blocks = request.tokens[:], request.blocks[:]
        self.admits.append(
            Admit(request.slot, tokens, request.prompt_len, request.computed, blocks, request.source)
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

    def plan(self) -> StepPlan:
        starts, num_tokens = np.array(self.starts, np.int32), np.array(self.num_tokens, np.int32)
        return StepPlan(
            step=self.step,
            slots=np.array(self.slots, np.int32),
            num_tokens=num_tokens,
            num_drafts=np.array(self.num_drafts, np.int32),
            starts=starts,
            samples=np.array(self.samples, np.bool_),
            admits=self.admits,
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
