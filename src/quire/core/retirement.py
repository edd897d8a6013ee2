"""The retirement of steps: their results are applied to the requests, or their requests end with an error."""

from __future__ import annotations

from quire.core.draft_depth import DraftDepth
from quire.core.failure import find_failure
from quire.core.lifecycle import Lifecycle
from quire.core.plan_builder import PlanBuilder
from quire.core.steplog import StepRecord
from quire.types import EngineOutput, Request, RequestFailure, StepPlan, StepResult


class Retirement:
    """The part of a scheduler that applies the results of steps.

    Attributes:
        outputs: the outputs that have not been taken.
    """

    def __init__(self, life: Lifecycle) -> None:
        self._life, self._log = life, life.log
        self.outputs: list[EngineOutput] = []

    def apply(
        self, plan: StepPlan, record: StepRecord, builder: PlanBuilder, result: StepResult, depth: DraftDepth
    ) -> None:
        """Apply the result of a step to the requests of its rows.

        Args:
            plan: the step.
            record: its record in the log.
            builder: the builder of its plan.
            result: its result.
            depth: learns how many draft tokens were accepted.
        """
        self.outputs += self._life.connector.retire(builder.computed())
        rows, caught_up = builder.rows, self._life.clocks.end_step(record, builder.catching_up)
        scores = builder.take_scores(result.prompt_logprobs) if result.prompt_logprobs else {}
        drafts = plan.num_drafts.tolist()
        sampled = logit_rows = 0
        for index, (request, samples) in enumerate(zip(rows, plan.samples.tolist())):
            if not samples:
                continue
            new, first = result.tokens[sampled], logit_rows
            sampled += 1
            logit_rows += 1 + drafts[index]
            request.pending -= 1 + drafts[index]
            if request.ended or request.dropped_step == plan.step:
                continue  # the request ended while this step was in flight, or its row had no mask
            record.generated += len(new)
            if drafts[index]:
                self._count_drafts(request, drafts[index], len(new) - 1, depth)
            pooled = None if result.pooled is None else result.pooled.get(index)
            # The sentinels for a missing token are negative.
            if (new[-1] < 0 or pooled is not None) and (failure := find_failure(request, new, pooled)):
                scores.pop(request.id, None)
                self.outputs.append(self._fail_request(request, new[:-1], failure))
                continue
            output = self._append(request, new)
            if caught_up and request in caught_up:
                output.timing = self._life.clocks.timing(request)
            if result.logprobs is not None and (top := request.params.logprobs) is not None:
                output.logprobs = result.logprobs.of(first, len(output.token_ids), top)
            if (scored := scores.pop(request.id, None)) is not None:
                output.prompt_logprobs_start, output.prompt_logprobs = scored.start, scored.entries
            if pooled is not None:
                output.pooled = pooled.tobytes()
            self.outputs.append(output)
        depth.end_step(record, rows)
        for request_id, scored in scores.items():
            self.outputs.append(
                EngineOutput(
                    request_id, [], prompt_logprobs=scored.entries, prompt_logprobs_start=scored.start
                )
            )

    def fail(self, plan: StepPlan, record: StepRecord, builder: PlanBuilder, error: str) -> None:
        """End the requests of a step with `error`, because nothing that it wrote is reliable."""
        life = self._life
        life.clocks.fail_step(record)
        life.blocks.withdraw(builder.published, builder.copies)
        admitted = (life.requests.get(admit.request.id) for admit in plan.admissions)
        for request in dict.fromkeys([*builder.rows, *admitted]):
            if request is not None and not request.ended:
                output = life.finish(request, [], "error")
                output.error = RequestFailure(error, internal=True)
                self.outputs.append(output)

    def _count_drafts(self, request: Request, drafted: int, accepted: int, depth: DraftDepth) -> None:
        """Take back the rejected draft tokens of a row, and count the accepted ones."""
        if request.status == "running":  # otherwise its next admission sets the count
            request.computed -= drafted - accepted
        self._log.totals.count_drafts(drafted, accepted)
        request.timing.draft_tokens += drafted
        request.timing.accepted_tokens += accepted
        depth.observe(request, drafted, accepted)

    def _fail_request(self, request: Request, new: list[int], failure: RequestFailure) -> EngineOutput:
        """End a request for which no token can be sampled after the tokens `new`, unless one of these ends it.

        Its blocks may hold NaN, so no other request may read them.
        """
        if new and (output := self._append(request, new)).finish_reason is not None:
            return output
        if failure.internal:
            self._life.blocks.cache.forget(request)
            self._log.totals.not_finite += 1
        output = self._life.finish(request, [], "error")
        output.token_ids, output.error = new, failure
        return output

    def _append(self, request: Request, new: list[int]) -> EngineOutput:
        """Append sampled tokens to a request, up to the first one that ends it."""
        tokens, stop_ids = request.tokens, request.stop_ids
        before = known = len(tokens)
        for token in new:
            tokens.append(token)
            known += 1
            if token in stop_ids and known - request.prompt_len >= request.min_tokens:
                stop = None if token in request.eos_ids else token
                return self._life.finish(request, new[: known - before], "stop", stop)
            if known >= request.limit:
                return self._life.finish(request, new[: known - before], "length")
        self._log.totals.generated_tokens += len(new)
        return EngineOutput(request.id, new, num_cached_tokens=request.cached)
