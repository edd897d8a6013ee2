"""The retirement of steps: their results are applied to the requests, or their requests end with an error."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import numpy as np

from quire.core.draft_depth import DraftDepth
from quire.core.failure import find_failure
from quire.core.lifecycle import Lifecycle
from quire.core.plan_builder import PlanBuilder, PromptScores
from quire.core.steplog import StepRecord
from quire.types import (
    REJECTED,
    EngineOutput,
    NewTokens,
    OutputPart,
    Request,
    RequestFailure,
    StepPlan,
    StepResult,
)
from quire.types.request_table import KNOWN, VISIT_AT


class _SampledRows:
    """The rows of a step that have sampled, in the order of its result.

    Attributes:
        rows: their places in the plan.
        requests: the requests of all rows of the plan.
        table_rows: int64 [sampling rows], the rows of their requests in the table.
        most: integers [sampling rows], most tokens that each row yields.
        ids: the ids of their requests.
        tokens: int32 [sampling rows, 1 + most drafts], as in the result.
        caught_up: requests that have caught up with this step.
        scores: prompt log-probabilities by request id.
    """

    def __init__(
        self,
        plan: StepPlan,
        builder: PlanBuilder,
        result: StepResult,
        caught_up: set[Request],
        scores: dict[str, PromptScores],
    ) -> None:
        self.plan, self.builder, self.result = plan, builder, result
        self.caught_up, self.scores, self.tokens = caught_up, scores, result.tokens
        columns = builder.columns
        self.requests, self.ids = columns.requests, columns.ids
        self.table_rows, self.most = columns.table_rows, columns.most
        self.rows: Sequence[int] = range(len(self.ids))
        if columns.num_sampling < len(self.rows):
            self.rows = columns.samples.nonzero()[0].tolist()
            self.table_rows, self.most = self.table_rows[self.rows], self.most[self.rows]
            self.ids = [self.ids[row] for row in self.rows]

    def special(self) -> list[Request]:
        """Return the requests of which the step has brought more than tokens, or whose tokens are dropped."""
        builder, pooled, scored = self.builder, self.result.pooled or (), self.result.prompt_logprobs or ()
        if not (self.caught_up or builder.dropped or pooled or scored):
            return []
        return [*self.caught_up, *builder.dropped, *(self.requests[row] for row in (*pooled, *scored))]

    def first_logit_row(self, index: int) -> int:
        """Return the first row of logits of a sampling row."""
        return int(self.most[:index].sum())


class Retirement:
    """The part of a scheduler that applies the results of steps.

    Attributes:
        outputs: the outputs that have not been taken.
    """

    def __init__(self, life: Lifecycle) -> None:
        self._life, self._log = life, life.log
        self.outputs: list[OutputPart] = []

    def apply(
        self, plan: StepPlan, record: StepRecord, builder: PlanBuilder, result: StepResult, depth: DraftDepth
    ) -> None:
        """Apply the result of a step to the requests of its rows.

        Most rows bring one more token and nothing else: these are handled together, as columns.

        Args:
            plan: the step.
            record: its record in the log.
            builder: the builder of its plan.
            result: its result.
            depth: learns how many draft tokens were accepted.
        """
        self.outputs += self._life.connector.retire(builder.computed())
        caught_up = self._life.clocks.end_step(record, builder.catching_up, result.times)
        scores = builder.take_scores(result.prompt_logprobs) if result.prompt_logprobs else {}
        sampled = _SampledRows(plan, builder, result, caught_up, scores)
        table, tokens = self._life.table, sampled.tokens
        found: list[int] = []
        ids, plain, newest = sampled.ids, sampled.table_rows, tokens[:, 0]
        known = table.data[KNOWN][plain]
        visits = self._visits(sampled, known, newest)
        if np.count_nonzero(visits):
            found, is_plain = visits.nonzero()[0].tolist(), ~visits
            plain, known, newest = plain[is_plain], known[is_plain], newest[is_plain]
            ids = list(compress(ids, is_plain.tobytes()))
        table.append(plain, known, newest)
        self._log.totals.generated_tokens += len(plain)
        record.generated += len(plain)
        if ids:
            self.outputs.append(NewTokens(ids, newest.tolist()))
        visited = [self._visit(sampled, index, record, depth) for index in found]
        self.outputs += [output for output in visited if output is not None]
        depth.end_step(record, builder.rows)
        for request_id, scored in scores.items():
            self.outputs.append(
                EngineOutput(
                    request_id, [], prompt_logprobs=scored.entries, prompt_logprobs_start=scored.start
                )
            )

    def _visits(self, sampled: _SampledRows, known: np.ndarray, newest: np.ndarray) -> np.ndarray:
        """Return which rows have more to it than one more token, bool [sampling rows].

        Args:
            sampled: the rows.
            known: the tokens that their requests know before.
            newest: the first token of each row.
        """
        rows = sampled.table_rows
        visits = known + sampled.most >= self._life.table.data[VISIT_AT][rows]
        visits = visits | self._life.stops.mark(newest)  # numpy takes longer in place if there are few
        if sampled.plan.max_drafts:
            visits = visits | (sampled.most > 1)
        if special := sampled.special():
            marked = np.zeros(len(self._life.table.tails), np.bool_)
            marked[[request.row for request in special]] = True
            visits = visits | marked[rows]
        return visits

    def _visit(
        self, sampled: _SampledRows, index: int, record: StepRecord, depth: DraftDepth
    ) -> EngineOutput | None:
        """Apply the result of a row, and return its output, if it has any."""
        row = sampled.rows[index]
        request, result, scores = sampled.requests[row], sampled.result, sampled.scores
        request.pending -= int(sampled.most[index])
        if request.ended:  # while this step was in flight
            request.end()
            return None
        if request in sampled.builder.dropped:  # the row had no mask
            return None
        new = [token for token in result.tokens[index].tolist() if token != REJECTED]
        record.generated += len(new)
        if drafts := int(sampled.most[index]) - 1:
            self._count_drafts(request, drafts, len(new) - 1, depth)
        pooled = None if result.pooled is None else result.pooled.get(row)
        # The sentinels for a missing token are negative.
        if (new[-1] < 0 or pooled is not None) and (failure := find_failure(request, new, pooled)):
            scores.pop(request.id, None)
            return self._fail_request(request, new[:-1], failure)
        output = self._append(request, new)
        if request in sampled.caught_up:
            output.timing = self._life.clocks.timing(request)
        if result.logprobs is not None and (top := request.params.logprobs) is not None:
            output.logprobs = result.logprobs.of(sampled.first_logit_row(index), len(output.token_ids), top)
        if (scored := scores.pop(request.id, None)) is not None:
            output.prompt_logprobs_start, output.prompt_logprobs = scored.start, scored.entries
        if pooled is not None:
            output.pooled = pooled.tobytes()
        return output

    def fail(self, plan: StepPlan, record: StepRecord, builder: PlanBuilder, error: str) -> None:
        """End the requests of a step with `error`, because nothing that it wrote is reliable."""
        life = self._life
        life.clocks.fail_step(record)
        life.blocks.withdraw(builder.published, builder.copies)
        admitted = (life.requests.get(admit.request.id) for admit in plan.admissions)
        for request in dict.fromkeys([*builder.rows, *admitted]):
            if request is None:
                continue
            request.pending = 0  # no step is in flight any more
            if request.ended:
                request.end()
            else:
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
        known = request.known
        for count, token in enumerate(new, 1):
            request.append(token)
            if token in request.stop_ids and known + count - request.prompt_len >= request.min_tokens:
                stop = None if token in request.eos_ids else token
                return self._life.finish(request, new[:count], "stop", stop)
            if known + count >= request.limit:
                return self._life.finish(request, new[:count], "length")
        self._log.totals.generated_tokens += len(new)
        return EngineOutput(request.id, new, num_cached_tokens=request.cached)
