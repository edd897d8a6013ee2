"""The scheduler: it decides how many tokens of which requests the next step runs, and applies the results of steps.

One rule covers prompts, chunks, decoding and recomputation after a preemption: a request wants `known + pending +
drafts - computed` tokens. `Lifecycle` owns the requests, `RowPlacer` adds their rows, `BatchAdmission` lets waiting ones in,
and `Retirement` applies results.

Draft tokens are scheduled as if all were accepted, and `retire` corrects the count when the result arrives. With
overlap the next step has been scheduled by then; the device knows the true position of every row.

Blocks and slots are released as soon as a request ends or is preempted, although steps in flight may still use them.
This is safe because their next owner writes to them later in stream order. `Scheduler.check` states the invariants.
"""

from __future__ import annotations

from array import array
from collections import deque
from typing import NamedTuple

from quire.core.batch_admission import BatchAdmission
from quire.core.block_pool import BlockPool
from quire.core.blocks import Blocks
from quire.core.connector import KVConnector, NoConnector
from quire.core.draft_depth import DraftDepth, NoDrafts
from quire.core.lifecycle import Lifecycle
from quire.core.plan_builder import PlanBuilder
from quire.core.policy import Policy
from quire.core.prompt_budget import FixedBudget, PromptBudget
from quire.core.request_limits import SchedulerLimits
from quire.core.retirement import Retirement
from quire.core.rows import RowPlacer
from quire.core.shared_prefix import NoSharedPrefix, SharedPrefix
from quire.core.steplog import StepLog, StepRecord
from quire.types import (
    EngineRequest,
    OutputPart,
    Request,
    RequestError,
    RequestFailure,
    StepPlan,
    StepResult,
)

# What a chunk of a prompt counts for at least in a step that also decodes: on two CPU cores, a chunk of 9 tokens takes
# as long as 20 more tokens in a chunk that is there.
_CHUNK_TOKENS = 32
# After this time a first token is due whatever the target, so that no request waits for ever behind shorter targets.
_PATIENCE_S = 60.0


class ScheduledStep(NamedTuple):
    """A step to launch: its plan, and its record in the log, to which the step loop adds durations."""

    plan: StepPlan
    record: StepRecord


class Scheduler:
    """The scheduler of one engine.

    Args:
        blocks: the blocks of all requests.
        policy: order, admission and chunking.
        limits: the sizes of batch, step and context.
        log: the log that gets a record of every step.
        shared: finds the blocks that rows of a decoding step share; None looks for none.
        depth: chooses how many draft tokens each request verifies; None drafts none.
        prompts: chooses how many prompt tokens a step that decodes may have; None takes the number of `limits`.
        connector: fetches blocks from elsewhere; None has nowhere to fetch from.
    """

    def __init__(
        self,
        blocks: Blocks,
        policy: Policy,
        limits: SchedulerLimits,
        log: StepLog,
        shared: SharedPrefix | None = None,
        depth: DraftDepth | None = None,
        prompts: PromptBudget | None = None,
        connector: KVConnector | None = None,
    ) -> None:
        self.blocks, self.policy, self.limits, self.log = blocks, policy, limits, log
        self.shared = shared or NoSharedPrefix()
        self.depth = depth or NoDrafts()
        self.life = life = Lifecycle(blocks, log, limits.max_num_seqs, connector or NoConnector())
        self.connector = life.connector
        self.prompts = prompts or FixedBudget(limits.mixed_prefill_tokens)
        self.requests, self.waiting, self.running = life.requests, life.waiting, life.running
        self.shares, self.clocks = life.shares, life.clocks
        self._rows = RowPlacer(life, limits)
        self._admission = BatchAdmission(life, policy, self._rows)
        self._retirement = Retirement(life)
        self._in_flight: deque[tuple[ScheduledStep, PlanBuilder]] = deque()
        self._arrivals = 0
        self._step = 0
        self._wait_reason: str | None = None

    # ------------------------------------------------------------------------------ requests in

    def add(self, source: EngineRequest, held: str | None = None) -> None:
        """Queue a request.

        Args:
            source: the request.
            held: the reason why it must not be admitted before `settle` names it, or None.

        Raises:
            RequestError: if its id is in use or it could never run. The message gives the sizes.
        """
        if source.id in self.requests:
            raise RequestError(f"request id {source.id!r} is already in use", param="request_id")
        limit = self.limits.full_length(source, self.blocks)
        due_s = self.log.now() + min(_PATIENCE_S, source.targets.over(self.limits.targets).ttft_s)
        request = Request(
            id=source.id,
            prompt_len=len(source.prompt),
            _tokens=array("i", source.prompt),
            params=source.params,
            order=self.policy.order(source, due_s, self._arrivals),
            limit=limit,
            stop_ids=frozenset(source.stop_ids),
            eos_ids=frozenset(source.eos_ids),
            min_tokens=0 if source.grammar else source.params.min_tokens,
            source=source,
            table=self.life.table,
            held=held,
        )
        self._arrivals += 1
        self.depth.start(request)
        self.life.add(request)

    def settle(self, request_id: str, error: str | None, drafts: bool = True) -> None:
        """Let a held or paused request run, with draft tokens or without, or end it with `error`.

        Unknown ids are ignored.
        """
        if request := self.requests.get(request_id):
            request.paused, request.may_draft = False, drafts
            if request.held and request.status == "waiting":
                self.life.release(request)
            if error is not None:
                output = self.life.finish(request, [], "error")
                output.error = RequestFailure(error, param="structured_outputs")
                self._retirement.outputs.append(output)

    def pause(self, request_id: str, drops_token: bool) -> None:
        """Keep a request out of further steps until `settle` names it. Unknown ids are ignored.

        Args:
            request_id: id of the request.
            drops_token: drop the token that the newest step samples for it. The device counts that token, so the
                request gives up its slot and is computed again.
        """
        if (request := self.requests.get(request_id)) is None:
            return
        request.paused = True
        if drops_token:
            self._in_flight[-1][1].forget_sample(request)
            if request.status == "running":
                self.preempt(request)

    def abort(self, request_id: str) -> None:
        """End a request now. Unknown ids are ignored, because the request may just have finished."""
        if request := self.requests.get(request_id):
            self._retirement.outputs.append(self.life.finish(request, [], "abort"))
            self.log.totals.aborted += 1
        self.life.forget(request_id)

    def preempt(self, victim: Request) -> None:
        """Return a running request to the waiting queue. Its full blocks stay in the prefix cache."""
        self.life.preempt(victim)

    @property
    def pool(self) -> BlockPool:
        """Return the pool of blocks, for figures about it."""
        return self.blocks.pool

    @property
    def has_work(self) -> bool:
        """Return whether there are unfinished requests, steps in flight, outputs to take or blocks on their way."""
        return bool(self.requests or self._in_flight or self._retirement.outputs or self.connector.busy)

    # ------------------------------------------------------------------------------- next step

    def schedule(self) -> ScheduledStep | None:
        """Schedule the next step. Rows that want one token go before longer ones.

        Returns:
            The step, or None if no request can run.
        """
        self.hear()
        builder = PlanBuilder(self.limits.max_num_batched_tokens, self._step)
        was_empty = not self.running
        contended = self.shares.contended
        if contended and self.waiting:
            self._admission.balance(builder, was_empty)
        long_rows = self._rows.place_decoding(builder)
        if builder.num_rows:
            self._limit_prompts(builder, long_rows[0][0] if long_rows else self.waiting.first)
        if contended:
            self.shares.sort_by_turn(long_rows)
        for request, want in long_rows:
            if n := self.policy.chunk(want, builder.budget):
                self._rows.place(builder, request, self.blocks.snapshots.clip(request, n), 0)
        self._wait_reason = self._admission.admit(builder, was_empty, self.prompts) if self.waiting else None
        self.clocks.wait(self._wait_reason)
        return self._finish_plan(builder) if builder.num_rows else None

    def hear(self) -> None:
        """Take in what the connector has to say: blocks that have arrived, and processes that are up or not."""
        for news in self.connector.done():
            self.life.hear(news)

    def _limit_prompts(self, builder: PlanBuilder, first: Request | None) -> None:
        """Limit the prompt tokens of a step that also decodes, so that inter-token latency stays even."""
        coming = min(len(self.running) + len(self.waiting), self.limits.max_num_seqs) - builder.num_rows
        limit = self.prompts.tokens(builder.columns.starts, builder.rows, first, coming, self.log.now())
        if limit < self.limits.max_num_batched_tokens:
            builder.budget, builder.min_charge = min(builder.budget, limit), _CHUNK_TOKENS

    def _finish_plan(self, builder: PlanBuilder) -> ScheduledStep:
        """Build the plan, append its record to the log, and queue it as the newest step in flight."""
        self.blocks.trim_all(builder.filled)
        self.blocks.snapshots.end_step(builder.copies)
        plan = builder.plan()
        if plan.total_tokens == builder.num_rows:  # one token each
            plan.shared = self.shared.find(builder.rows, (self.life.admissions, plan.slots.tobytes()))
        self._step += 1
        free, now_s = self.pool.num_free, self.log.now()
        record = builder.record(plan, len(self.running), len(self.waiting), self._wait_reason, free, now_s)
        record.predicted_s = self.prompts.predict(record)
        step = ScheduledStep(plan, record)
        self._in_flight.append((step, builder))
        self.log.totals.computed_tokens += plan.total_tokens
        self.log.append(record)
        return step

    # --------------------------------------------------------------------------------- results

    def retire(self, result: StepResult) -> None:
        """Apply the result of the oldest step in flight. `take_outputs` then returns its outputs."""
        (plan, record), builder = self._in_flight.popleft()
        assert result.step == plan.step, f"result of step {result.step}, expected {plan.step}"
        self._retirement.apply(plan, record, builder, result, self.depth)
        self.prompts.end_step(record)

    def fail(self, error: str) -> None:
        """End the requests of the newest step with `error`, because nothing that it wrote is reliable.

        All earlier steps must have been retired; their requests continue. A slot that the failed step was to fill is
        overwritten at its next admission.
        """
        (((plan, record), builder),) = self._in_flight
        self._in_flight.clear()
        self._retirement.fail(plan, record, builder, error)

    def take_outputs(self) -> list[OutputPart]:
        """Return the outputs since the last call, in order, and forget them."""
        outputs, self._retirement.outputs = self._retirement.outputs, []
        return outputs

    def check(self) -> None:
        """Check the invariants of slots, blocks and requests. Raises AssertionError if one is broken."""
        self.life.check()
