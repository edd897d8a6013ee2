"""The stages of a step as functions, and the choice of those that may be captured."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.attention.expansion_rule import NO_EXPANSION, ExpansionRule
from quire.models.decoder import Model
from quire.sampling.sampler import Sampler
from quire.types import StepPlan
from quire.worker.step.batch import Batcher, DeviceStep, SameObjects
from quire.worker.step.step_stages import FILTERED_TOKENS, LOGITS, NO_STAGES, TOKENS, Prefix, StepStage


class StageFunctions:
    """The stages that one rank runs in each step.

    Args:
        model: back end of the stages MODEL and HEAD.
        batcher: back end of the stages PREPARE and COMMIT.
        sampler: back end of the stage SAMPLE.
        has_head: the rank computes logits. Otherwise its steps end after MODEL, and count their KV entries there,
            because the tokens are sampled elsewhere (stage.py).
        rule: which rows attend to expanded latents, in shapes that depend on their lengths.
    """

    def __init__(
        self,
        model: Model,
        batcher: Batcher,
        sampler: Sampler,
        has_head: bool = True,
        rule: ExpansionRule = NO_EXPANSION,
    ) -> None:
        self.model, self.batcher, self.sampler, self.has_head = model, batcher, sampler, has_head
        self._rule = rule
        self._slots, self._sampled = (
            SameObjects(),
            TOKENS,
        )  # of the newest step: its slots, and what they allow
        # Plain functions: bound ones would refer back to this object, and its model would outlive a closed engine.
        cls = StageFunctions
        self._functions: dict[StepStage, Callable[[StageFunctions, DeviceStep], None]] = {
            StepStage.PREPARE: cls._prepare,
            StepStage.MODEL: cls._run_model,
        }
        if has_head:
            self._functions |= {
                StepStage.HEAD: cls._compute_logits,
                StepStage.SAMPLE: cls._sample,
                StepStage.COMMIT: cls._commit,
            }

    def run(self, step: DeviceStep, last: StepStage) -> None:
        """Run the stages of `step` that have not run yet, up to `last`."""
        if step.done >= last:
            return
        for stage, function in self._functions.items():
            if step.done < stage <= last:
                function(self, step)
        step.done = last

    def prefix(self, plan: StepPlan) -> Prefix:
        """Return the stages of `plan` that may be captured: those that need nothing from the host."""
        if plan.admissions:  # otherwise the parameters of slots are those of the step before
            self._slots.forget()
        if plan.keeps_hidden:  # prompts are scored and pooled between the stages
            return NO_STAGES
        if plan.total_tokens > len(plan.slots) and self._expands(plan):
            return NO_STAGES
        if not self._slots.come_again(plan.slots):
            if self.sampler.needs_host_work(plan.slots):
                self._sampled = LOGITS
            else:
                self._sampled = FILTERED_TOKENS if self.sampler.has_filters(plan.slots) else TOKENS
        return self._sampled

    def _expands(self, plan: StepPlan) -> bool:
        """Return whether a row attends to expanded latents, whose number the back end takes from the host."""
        return bool(self._rule.rows(plan.num_tokens, plan.starts + plan.num_tokens).any())

    def _prepare(self, step: DeviceStep) -> None:
        self.batcher.prepare(step)

    def _run_model(self, step: DeviceStep) -> None:
        step.hidden = self.model(step.batch)
        if not self.has_head:
            self.batcher.count(step)

    def _compute_logits(self, step: DeviceStep) -> None:
        assert step.hidden is not None
        if step.plan is not None and step.plan.keeps_hidden:
            step.logits = self.model.logits(step.hidden.index_select(0, step.batch.logit_index))
        else:
            step.logits, step.hidden = self.model.logits(step.hidden), None

    def _sample(self, step: DeviceStep) -> None:
        at = step.logit_rows
        if step.shape is None:
            out = self.sampler.sample(step.logits, at.slots_host, at.slots, step.masks, at.lengths)
            step.sampled, step.logprobs = out.tokens, out.logprobs
        else:
            step.sampled = torch.empty(len(step.logits), dtype=torch.int32, device=step.logits.device)
            self.sampler.choose(step.logits, at.slots, step.sampled, step.shape.prefix.filters, at.lengths)

    def _commit(self, step: DeviceStep) -> None:
        step.tokens = self.batcher.advance(step, step.sampled)
