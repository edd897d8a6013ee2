"""The runner: execution of step plans on one device, in two phases, without ever waiting for it.

`forward` applies the plan to the slot columns and queues the first stages of its step, at least up to the logits.
`sample` queues the others, and sends the tokens to the host. All work is queued on one stream, in plan order; that makes
it safe for the scheduler to release blocks early.
"""

from __future__ import annotations

import numpy as np
import torch

from quire.parallel.pipeline import NO_LINK, Link
from quire.sampling.logprobs import scored_rows
from quire.types import StepHandle, StepPlan, TokenMasks
from quire.worker.launch.launcher import Launcher
from quire.worker.pooling import Pooler
from quire.worker.results import Arrays, Results, StepOutput
from quire.worker.staging import Staging
from quire.worker.step.batch import DeviceStep
from quire.worker.step.stage_functions import StageFunctions
from quire.worker.step.step_stages import StepStage


class Runner:
    """Execution of step plans on one device: stages, launcher, slot columns and results."""

    def __init__(
        self,
        *,
        stages: StageFunctions,
        launcher: Launcher,
        staging: Staging,
        results: Results,
        pooler: Pooler,
        link: Link = NO_LINK,
    ) -> None:
        self.launcher, self.batcher, self.sampler = launcher, stages.batcher, stages.sampler
        parts = stages.batcher.parts
        self.state, self._states, self._drafter = parts.state, parts.states, parts.drafter
        self._stages, self._staging, self._results = stages, staging, results
        self._pooler, self._link = pooler, link
        self._open: dict[int, DeviceStep] = {}  # by id: steps that `forward` has queued and `sample` has not
        self._score_tops: dict[int, int] = {}  # by slot: number of prompt log-probabilities per token

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> None:
        """Queue the step of `plan` up to its logits."""
        self._results.begin(plan.step)
        self._staging.begin()
        self.apply(plan)
        for slot, row in plan.restores:
            self._states.restore(slot, row)
        self._drafter.keep_up(plan)
        self._link.receive(plan.total_tokens)
        step = self._open[plan.step] = self.launcher.launch(plan, self._staging)
        self._stages.run(step, StepStage.HEAD)
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
        assert self._open, "drafts must follow a forward"
        step, state = next(reversed(self._open.values())), self.state
        offsets = torch.arange(step.max_drafts, device=step.slots.device)
        places = (state.num_tokens[step.slots].unsqueeze(1) + offsets).clamp_(max=state.max_len - 1)
        return state.tokens[step.slots.unsqueeze(1), places].cpu().numpy()

    def sample(self, step_id: int, masks: TokenMasks | None) -> StepHandle:
        """Queue the stages of a step that `forward` has left.

        Args:
            step_id: number of the step.
            masks: tokens allowed by structured output, if any row has a constraint.

        Returns:
            A handle whose `wait` returns the results.
        """
        step, plan = self._take(step_id)
        assert masks is None or step.done < StepStage.SAMPLE, (
            "a step with masks must be sampled after its launch"
        )
        output = StepOutput(step_id, None if plan.num_sampling == step.rows else plan.samples, None)
        # A captured step needs no further operation of torch, and to enter inference mode for none takes 2 us.
        if step.done < StepStage.COMMIT:
            step.masks = masks
            self._finish(step, plan, output)
        output.tokens = step.tokens
        if plan.num_sampling:
            self._link.publish(lambda: self.batcher.on_device(step))
        return self._results.handle(output)

    @torch.inference_mode()
    def _finish(self, step: DeviceStep, plan: StepPlan, output: StepOutput) -> None:
        """Run the stages that the launcher has left, and put all results but the tokens into `output`."""
        self._stages.run(step, StepStage.SAMPLE)
        output.logprobs = step.logprobs
        if plan.max_drafts and output.samples is not None:
            output.logit_samples = plan.per_logit_row(plan.samples)
        for row in plan.score_rows:
            output.prompt_logprobs[row] = self._score(step, plan, row)
        if plan.pool_rows:
            assert step.hidden is not None
            output.pool_rows = plan.pool_rows
            output.pooled = self._pooler.pool(plan, step.hidden, self._staging)
        self._stages.run(step, StepStage.COMMIT)

    def _take(self, step_id: int) -> tuple[DeviceStep, StepPlan]:
        """Return a step that `forward` has queued, and its plan, and forget it."""
        assert step_id in self._open, "sample must follow the forward of the same step"
        step = self._open.pop(step_id)
        assert step.plan is not None
        return step, step.plan

    @torch.inference_mode()
    def warm_up(self) -> bool:
        """Make one later step cheaper while the engine is idle. Return False if nothing is left to do."""
        return self.launcher.warm_up(self._staging)

    @torch.inference_mode()
    def capture_common(self) -> None:
        """Capture the steps that most requests need. They do not run, so the weights may still be undefined."""
        self.launcher.capture_common()

    @torch.inference_mode()
    def run_common(self, most: int | None = None) -> None:
        """Run the steps of `capture_common` once each, with any content, so that their kernels are compiled.

        Args:
            most: number of steps, of which those whose kernels take longest to compile come first; None: all.
        """
        self.launcher.run_common(most)

    @torch.inference_mode()
    def recover(self, drop_graphs: bool) -> None:
        """Prepare for the next step after one that failed half-way, and release the memory that it held.

        Steps launched before it are not affected. The columns of its slots are invalid until new owners overwrite them.
        """
        self._open.clear()
        self.batcher.recover()
        if drop_graphs:
            self.launcher.drop_graphs()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
            torch.cuda.empty_cache()

    def _score(self, step: DeviceStep, plan: StepPlan, row: int) -> Arrays:
        """Compute the log-probability of the token after each token of a row.

        The last of them may be beyond the prompt.
        """
        state, hidden = self.state, step.hidden
        assert hidden is not None
        begin, slot = int(plan.num_tokens[:row].sum()), int(plan.slots[row])
        end = begin + int(plan.num_tokens[row])
        following = torch.arange(1, end - begin + 1, device=hidden.device) + state.num_computed[slot]
        targets = state.tokens[slot].index_select(0, following.clamp_(max=state.token_row - 1)).long()
        top = self._score_tops[slot]
        parts, most = [], scored_rows(self._stages.model.spec.vocab_size)
        for at in range(begin, end, most):
            stop = min(at + most, end)
            logits = self._stages.model.logits(hidden[at:stop])
            parts.append(self.sampler.prompt_logprobs(logits, targets[at - begin : stop - begin], top))
        ids, values, ranks = (torch.cat(column) for column in zip(*parts))
        return ids, values, ranks
