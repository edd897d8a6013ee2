"""The runner: carries out plans on one device, in two phases, without ever waiting for it.

`forward` applies the plan to the slot columns, builds the ragged batch and runs the model up to the logits;
`sample` turns those into tokens, writes them to the columns and sends them home. Everything is queued
on one stream, in plan order, which is what makes the scheduler's early release of pages safe.
"""

from __future__ import annotations

from typing import Any

import torch

from quire.models.decoder import Model
from quire.sampling.sampler import Sampler
from quire.types import StepHandle, StepPlan
from quire.worker.graphs import Launched, Launcher
from quire.worker.results import Arrays, Results, StepOutput
from quire.worker.staging import Staging
from quire.worker.state import SlotState

_SCORE_ROWS = 512  # prompt positions whose logits are held at once


class Runner:
    def __init__(
        self,
        model: Model,
        launcher: Launcher,
        state: SlotState,
        sampler: Sampler,
        staging: Staging,
        results: Results,
    ) -> None:
        self._model, self._launcher, self._state, self._sampler = model, launcher, state, sampler
        self._staging, self._results = staging, results
        self._launched: Launched | None = None
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
        self._launched = self._launcher.launch(plan, self._staging)

    @torch.inference_mode()
    def sample(self, step_id: int, masks: Any) -> StepHandle:
        launched = self._launched
        assert launched is not None and launched.step.plan.step == step_id, (
            "sample must follow its own forward"
        )
        self._launched = None
        step = launched.step
        if (
            launched.greedy is not None
            and masks is None
            and self._sampler.is_plain_greedy(step.sampling_slots_host)
        ):
            launched.greedy.replay()
            assert launched.tokens is not None
            # A copy: the next replay overwrites the static buffer before this one is on the host.
            return self._results.handle(StepOutput(step_id, launched.tokens.clone(), None))
        tokens, logprobs = step.sampling_slots.int(), None
        if step.sampling_slots.shape[0]:
            out = self._sampler.sample(launched.logits, step.sampling_slots_host, step.sampling_slots, masks)
            tokens, logprobs = out.tokens, out.logprobs
        output = StepOutput(step_id, tokens, logprobs)
        for row in step.plan.score_rows:
            output.prompt_logprobs[row] = self._score(launched, row)
        self._state.advance(step.slots, step.num_tokens, step.sampling_slots, tokens)
        return self._results.handle(output)

    def _score(self, launched: Launched, row: int) -> Arrays:
        """Log-probabilities of the token after each token of a row (the last may be beyond the prompt)."""
        plan, batch, state = launched.step.plan, launched.step.batch, self._state
        begin = int(plan.num_tokens[:row].sum())
        end = begin + int(plan.num_tokens[row])
        following = (batch.positions[begin:end] + 1).clamp_(max=state.max_len - 1)
        targets = state.tokens[int(plan.slots[row])].index_select(0, following).long()
        top = self._score_tops[int(plan.slots[row])]
        parts = []
        for at in range(begin, end, _SCORE_ROWS):
            stop = min(at + _SCORE_ROWS, end)
            logits = self._model.logits(launched.hidden[at:stop])
            parts.append(self._sampler.prompt_logprobs(logits, targets[at - begin : stop - begin], top))
        ids, values, ranks = (torch.cat(column) for column in zip(*parts))
        return ids, values, ranks
