"""The runner: carries out plans on one device, in two phases, without ever waiting for it.

`forward` applies the plan to the slot columns, builds the ragged batch and runs the model; `sample` turns
the wanted hidden states into tokens, writes them to the columns and sends them home. Everything is queued
on one stream, in plan order, which is what makes the scheduler's early release of pages safe.
"""

from __future__ import annotations

from typing import Any

import torch

from quire.models.decoder import Model
from quire.sampling.sampler import Sampler
from quire.types import StepHandle, StepPlan
from quire.worker.batch import BatchBuilder, Step
from quire.worker.graphs import GraphRunner
from quire.worker.results import Arrays, Results, StepOutput
from quire.worker.staging import Staging
from quire.worker.state import SlotState

_SCORE_ROWS = 512  # prompt positions whose logits are held at once


class Runner:
    def __init__(
        self,
        model: Model,
        graphs: GraphRunner,
        state: SlotState,
        builder: BatchBuilder,
        sampler: Sampler,
        staging: Staging,
        results: Results,
    ) -> None:
        self._model, self._graphs, self._state = model, graphs, state
        self._builder, self._sampler = builder, sampler
        self._staging, self._results = staging, results
        self._step: Step | None = None
        self._hidden = torch.empty(0)
        self._score_tops: dict[int, int] = {}  # slot -> top alternatives of its prompt log-probabilities

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> None:
        self._staging.begin()
        self._state.apply(plan, self._staging)
        for admit in plan.admits:
            self._sampler.admit(admit.slot, admit.request)
            self._score_tops[admit.slot] = admit.request.params.prompt_logprobs or 0
        if plan.admits:
            self._sampler.flush()
        self._step = self._builder.build(plan, self._staging)
        self._hidden = self._graphs.run(self._step.batch)

    @torch.inference_mode()
    def sample(self, step_id: int, masks: Any) -> StepHandle:
        step = self._step
        assert step is not None and step.plan.step == step_id, "sample must follow its own forward"
        if step.sampling_slots.shape[0]:
            logits = self._model.logits(self._hidden.index_select(0, step.batch.logit_index))
            out = self._sampler.sample(logits, step.sampling_slots_host, step.sampling_slots, masks)
            tokens, logprobs = out.tokens, out.logprobs
        else:
            tokens, logprobs = step.sampling_slots.int(), None
        output = StepOutput(step_id, tokens, logprobs)
        for row in step.plan.score_rows:
            output.prompt_logprobs[row] = self._score(step, row)
        self._state.advance(step.slots, step.num_tokens, step.sampling_slots, tokens)
        self._step = None
        return self._results.handle(output)

    def _score(self, step: Step, row: int) -> Arrays:
        """Log-probabilities of the token after each token of a row (the last may be beyond the prompt)."""
        plan, batch, state = step.plan, step.batch, self._state
        begin = int(plan.num_tokens[:row].sum())
        end = begin + int(plan.num_tokens[row])
        following = (batch.positions[begin:end] + 1).clamp_(max=state.max_len - 1)
        targets = state.tokens[int(plan.slots[row])].index_select(0, following).long()
        top = self._score_tops[int(plan.slots[row])]
        parts = []
        for at in range(begin, end, _SCORE_ROWS):
            stop = min(at + _SCORE_ROWS, end)
            logits = self._model.logits(self._hidden[at:stop])
            parts.append(self._sampler.prompt_logprobs(logits, targets[at - begin : stop - begin], top))
        ids, values, ranks = (torch.cat(column) for column in zip(*parts))
        return ids, values, ranks
