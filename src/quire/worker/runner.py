"""The runner: execution of step plans on one device, in two phases, without ever waiting for it.

`forward` applies the plan to the slot columns, builds the ragged batch and runs the model up to the logits. `sample`
turns the logits into tokens, appends these to the columns and sends them to the host. All work is queued on one stream,
in plan order; that makes it safe for the scheduler to release blocks early.
"""

from __future__ import annotations

import numpy as np
import torch

from quire.models.decoder import Model
from quire.parallel.pipeline import NO_LINK, Link
from quire.sampling.logprobs import scored_rows
from quire.sampling.sampler import Sampler
from quire.speculation.drafter import Drafter
from quire.types import StepHandle, StepPlan, TokenMasks
from quire.worker.batch import Batcher
from quire.worker.graphs import LaunchedStep, Launcher
from quire.worker.memory.states import NO_STATES, StateMemory
from quire.worker.pooling import Pooler
from quire.worker.results import Arrays, Results, StepOutput
from quire.worker.staging import Staging
from quire.worker.state import SlotState


class Runner:
    """Execution of step plans on one device: model, launcher, slot columns, sampling and results."""

    def __init__(
        self,
        *,
        model: Model,
        launcher: Launcher,
        batcher: Batcher,
        state: SlotState,
        sampler: Sampler,
        staging: Staging,
        results: Results,
        pooler: Pooler,
        drafter: Drafter,
        link: Link = NO_LINK,
        states: StateMemory = NO_STATES,
    ) -> None:
        self.launcher, self.batcher, self.sampler, self.state = launcher, batcher, sampler, state
        self._model, self._staging, self._results, self._pooler = model, staging, results, pooler
        self._drafter, self._link, self._states = drafter, link, states
        self._launched: LaunchedStep | None = None
        self._score_tops: dict[int, int] = {}  # by slot: number of prompt log-probabilities per token

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> None:
        """Queue the step of `plan` up to its logits."""
        self._staging.begin()
        self.apply(plan)
        for slot, row in plan.restores:
            self._states.restore(slot, row)
        self._link.receive(plan.total_tokens)
        self._launched = self.launcher.launch(plan, self._staging)
        self._link.send(plan.total_tokens)
        for slot, row in plan.saves:
            self._states.save(slot, row)

    def apply(self, plan: StepPlan) -> None:
        """Write the new owners of slots and the new blocks of `plan` to the columns."""
        if plan.admissions:
            self._drafter.admit(plan.admissions)
        self.state.apply(plan, self._staging)
        for admit in plan.admissions:
            self.sampler.admit(admit.slot, admit.request)
            self._score_tops[admit.slot] = admit.request.params.prompt_logprobs or 0
            self._pooler.admit(admit.slot, admit.request)
        if plan.admissions:
            self.sampler.flush()

    @torch.inference_mode()
    def drafts(self) -> np.ndarray:
        """Wait for the step that `forward` has queued last, and return its draft tokens, int32 [rows, most drafts]."""
        assert self._launched is not None, "drafts must follow a forward"
        step, state = self._launched.step, self.state
        offsets = torch.arange(step.plan.max_drafts, device=step.slots.device)
        places = (state.num_tokens[step.slots].unsqueeze(1) + offsets).clamp_(max=state.max_len - 1)
        return state.tokens[step.slots.unsqueeze(1), places].cpu().numpy()

    @torch.inference_mode()
    def sample(self, step_id: int, masks: TokenMasks | None) -> StepHandle:
        """Queue the sampling of the step that `forward` has queued last.

        Args:
            step_id: number of that step.
            masks: tokens allowed by structured output, if any row has a constraint.

        Returns:
            A handle whose `wait` returns the results.
        """
        launched = self._launched
        assert launched is not None and launched.step.plan.step == step_id, (
            "sample must follow the forward of the same step"
        )
        self._launched = None
        step, plan = launched.step, launched.step.plan
        output = StepOutput(step_id, plan.samples, step.tokens_host)
        if plan.max_drafts:
            output.logit_samples = plan.per_logit_row(plan.samples)
        assert masks is None or launched.logits is not None, (
            "a step with masks must be sampled outside of its graph"
        )
        if launched.logits is not None:
            at = step.logit_rows
            out = self.sampler.sample(launched.logits, at.slots_host, at.slots, masks, at.lengths)
            output.logprobs = out.logprobs
            for row in plan.score_rows:
                output.prompt_logprobs[row] = self._score(launched, row)
            if plan.pool_rows:
                assert launched.hidden is not None
                output.pool_rows = plan.pool_rows
                output.pooled = self._pooler.pool(plan, launched.hidden, self._staging)
            output.tokens = self.batcher.advance(step, out.tokens)
        if plan.samples.any():
            self._link.publish(lambda: self.batcher.on_device(step, output.tokens))
        return self._results.handle(output)

    @torch.inference_mode()
    def warm_up(self) -> bool:
        """Make one later step cheaper while the engine is idle. Return False if nothing is left to do."""
        return self.launcher.warm_up(self._staging)

    @torch.inference_mode()
    def capture_common(self) -> None:
        """Capture the steps that most requests need. They do not run, so the weights may still be undefined."""
        self.launcher.capture_common()

    @torch.inference_mode()
    def run_common(self) -> None:
        """Run the steps of `capture_common` once each, with any content, so that their kernels are compiled."""
        self.launcher.run_common()

    @torch.inference_mode()
    def recover(self, drop_graphs: bool) -> None:
        """Prepare for the next step after one that failed half-way, and release the memory that it held.

        Steps launched before it are not affected. The columns of its slots are invalid until new owners overwrite them.
        """
        self._launched = None
        self.batcher.recover()
        if drop_graphs:
            self.launcher.drop_graphs()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
            torch.cuda.empty_cache()

    def _score(self, launched: LaunchedStep, row: int) -> Arrays:
        """Compute the log-probability of the token after each token of a row.

        The last of them may be beyond the prompt.
        """
        plan, state, hidden = launched.step.plan, self.state, launched.hidden
        assert hidden is not None
        begin, slot = int(plan.num_tokens[:row].sum()), int(plan.slots[row])
        end = begin + int(plan.num_tokens[row])
        following = torch.arange(1, end - begin + 1, device=hidden.device) + state.num_computed[slot]
        targets = state.tokens[slot].index_select(0, following.clamp_(max=state.token_row - 1)).long()
        top = self._score_tops[slot]
        parts, most = [], scored_rows(self._model.spec.vocab_size)
        for at in range(begin, end, most):
            stop = min(at + most, end)
            logits = self._model.logits(hidden[at:stop])
            parts.append(self.sampler.prompt_logprobs(logits, targets[at - begin : stop - begin], top))
        ids, values, ranks = (torch.cat(column) for column in zip(*parts))
        return ids, values, ranks
