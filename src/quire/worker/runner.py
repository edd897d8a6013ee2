"""The runner: carries out plans on one device, in two phases, without ever waiting for it.

`forward` applies the plan to the slot columns, builds the ragged batch and runs the model up to the logits;
`sample` turns those into tokens, writes them to the columns and sends them home. Everything is queued
on one stream, in plan order, which is what makes the scheduler's early release of blocks safe.
"""

from __future__ import annotations

import torch

from quire.models.decoder import Model
from quire.sampling.logprobs import scored_rows
from quire.sampling.sampler import Sampler
from quire.types import StepHandle, StepPlan, TokenMasks
from quire.worker.batch import Batcher
from quire.worker.graphs import LaunchedStep, Launcher
from quire.worker.pooling import Pooler
from quire.worker.results import Arrays, Results, StepOutput
from quire.worker.staging import Staging
from quire.worker.state import SlotState


class Runner:
    def __init__(
        self,
        model: Model,
        launcher: Launcher,
        batcher: Batcher,
        state: SlotState,
        sampler: Sampler,
        staging: Staging,
        results: Results,
        pooler: Pooler,
    ) -> None:
        self._model, self._launcher, self._batcher = model, launcher, batcher
        self._state, self._sampler, self._staging, self._results = state, sampler, staging, results
        self._pooler = pooler
        self._launched: LaunchedStep | None = None
        self._score_tops: dict[int, int] = {}  # slot -> top alternatives of its prompt log-probabilities

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> None:
        self._staging.begin()
        self._state.apply(plan, self._staging)
        for admit in plan.admissions:
            self._sampler.admit(admit.slot, admit.request)
            self._score_tops[admit.slot] = admit.request.params.prompt_logprobs or 0
            self._pooler.admit(admit.slot, admit.request)
        if plan.admissions:
            self._sampler.flush()
        self._launched = self._launcher.launch(plan, self._staging)

    @torch.inference_mode()
    def sample(self, step_id: int, masks: TokenMasks | None) -> StepHandle:
        launched = self._launched
        assert launched is not None and launched.step.plan.step == step_id, (
            "sample must follow its own forward"
        )
        self._launched = None
        step, plan = launched.step, launched.step.plan
        output = StepOutput(step_id, plan.samples, step.tokens_host)
        assert masks is None or launched.logits is not None, "a step with masks is not sampled by a graph"
        if launched.logits is not None:
            out = self._sampler.sample(launched.logits, plan.slots, step.slots, masks)
            output.logprobs = out.logprobs
            for row in plan.score_rows:
                output.prompt_logprobs[row] = self._score(launched, row)
            if plan.pool_rows:
                assert launched.hidden is not None
                output.pool_rows = plan.pool_rows
                output.pooled = self._pooler.pool(plan, launched.hidden, self._staging)
            self._batcher.advance(step, out.tokens)
            if step.tokens_host is None:
                output.tokens = out.tokens
        return self._results.handle(output)

    @torch.inference_mode()
    def warm_up(self) -> bool:
        return self._launcher.warm_up(self._staging)

    @torch.inference_mode()
    def recover(self, drop_graphs: bool) -> None:
        """Be ready for the next step after one that failed in the middle, and give back what memory it left.

        Steps that were launched before it are not affected. Columns of its slots are not right: they are overwritten
        when the slots get new owners.
        """
        self._launched = None
        self._batcher.recover()
        if drop_graphs:
            self._launcher.drop_graphs()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
            torch.cuda.empty_cache()

    def _score(self, launched: LaunchedStep, row: int) -> Arrays:
        """Log-probabilities of the token after each token of a row (the last may be beyond the prompt)."""
        plan, state, hidden = launched.step.plan, self._state, launched.hidden
        assert hidden is not None
        begin, slot = int(plan.num_tokens[:row].sum()), int(plan.slots[row])
        end = begin + int(plan.num_tokens[row])
        following = torch.arange(1, end - begin + 1, device=hidden.device) + state.num_computed[slot]
        targets = state.tokens[slot].index_select(0, following.clamp_(max=state.max_len - 1)).long()
        top = self._score_tops[slot]
        parts, most = [], scored_rows(self._model.spec.vocab_size)
        for at in range(begin, end, most):
            stop = min(at + most, end)
            logits = self._model.logits(hidden[at:stop])
            parts.append(self._sampler.prompt_logprobs(logits, targets[at - begin : stop - begin], top))
        ids, values, ranks = (torch.cat(column) for column in zip(*parts))
        return ids, values, ranks
