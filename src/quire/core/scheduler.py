"""The scheduler: it decides how many tokens of which requests the next step runs, and applies the results of steps.

It owns every `Request`, the slots and, through `Blocks`, the blocks. One rule covers prompts, chunks, decoding and
recomputation after a preemption: a request wants `known + pending + drafts - computed` tokens.

Draft tokens are scheduled as if all were accepted, and `retire` corrects the count when the result arrives. With
overlap the next step has been scheduled by then; the device knows the true position of every row.

Blocks and slots are released as soon as a request ends or is preempted, although steps in flight may still use them.
This is safe because their next owner writes to them later in stream order. `Scheduler.check` states the invariants.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections import deque
from typing import NamedTuple

from quire.core.block_pool import BlockPool
from quire.core.blocks import BlockDemand, Blocks
from quire.core.clocks import Clocks
from quire.core.draft_depth import DraftDepth, NoDrafts
from quire.core.failure import find_failure
from quire.core.plan_builder import PlanBuilder
from quire.core.policy import Policy
from quire.core.request_limits import SchedulerLimits
from quire.core.shared_prefix import NoSharedPrefix, SharedPrefix
from quire.core.shares import Shares, Shortage
from quire.core.steplog import StepLog, StepRecord
from quire.core.waiting_queue import WaitingQueue
from quire.types import (
    EngineOutput,
    EngineRequest,
    FinishReason,
    Request,
    RequestError,
    RequestFailure,
    RequestOrder,
    StepPlan,
    StepResult,
)

# What a chunk of a prompt counts for at least in a step that also decodes: on two CPU cores, a chunk of 9 tokens takes
# as long as 20 more tokens in a chunk that is there.
_CHUNK_TOKENS = 32


def _order(request: Request) -> RequestOrder:
    return request.order


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
    """

    def __init__(
        self,
        blocks: Blocks,
        policy: Policy,
        limits: SchedulerLimits,
        log: StepLog,
        shared: SharedPrefix | None = None,
        depth: DraftDepth | None = None,
    ) -> None:
        self.blocks, self.policy, self.limits = blocks, policy, limits
        self.shared = shared or NoSharedPrefix()
        self.depth = depth or NoDrafts()
        self.log = log
        self.clocks = Clocks(log)
        self.requests: dict[str, Request] = {}  # every request that is not finished
        self.shares = Shares()
        self.waiting = WaitingQueue(self.shares)
        self.running: list[Request] = []  # sorted by order
        self._free_slots = list(range(limits.max_num_seqs))[::-1]
        self._in_flight: deque[tuple[ScheduledStep, PlanBuilder]] = deque()
        self._outputs: list[EngineOutput] = []
        self._arrivals = 0
        self._admissions = 0
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
        request = Request(
            id=source.id,
            prompt_len=len(source.prompt),
            tokens=array("i", source.prompt),
            params=source.params,
            order=self.policy.order(source, self._arrivals),
            limit=limit,
            stop_ids=frozenset(source.stop_ids),
            eos_ids=frozenset(source.eos_ids),
            min_tokens=0 if source.grammar else source.params.min_tokens,
            source=source,
            held=held,
        )
        self.clocks.arrive(request)
        self._arrivals += 1
        self.requests[request.id] = request
        self.depth.start(request)
        self.log.totals.requests += 1
        self.log.totals.prompt_tokens += request.prompt_len
        self.shares.enter(request)
        self.waiting.add(request)

    def settle(self, request_id: str, error: str | None, drafts: bool = True) -> None:
        """Let a held or paused request run, with draft tokens or without, or end it with `error`.

        Unknown ids are ignored.
        """
        if request := self.requests.get(request_id):
            request.paused, request.may_draft = False, drafts
            if request.held:
                self.clocks.release(request)
                request.held = None
            if error is not None:
                output = self._finish(request, [], "error")
                output.error = RequestFailure(error, param="structured_outputs")
                self._outputs.append(output)

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
            newest, builder = self._in_flight[-1]
            request.dropped_step = newest.plan.step
            builder.forget_sample(request)
            if request.status == "running":
                self.preempt(request)

    def abort(self, request_id: str) -> None:
        """End a request now. Unknown ids are ignored, because the request may just have finished."""
        if request := self.requests.get(request_id):
            self._outputs.append(self._finish(request, [], "abort"))
            self.log.totals.aborted += 1

    @property
    def pool(self) -> BlockPool:
        """Return the pool of blocks, for figures about it."""
        return self.blocks.pool

    @property
    def has_work(self) -> bool:
        """Return whether there are unfinished requests, steps in flight or outputs to take."""
        return bool(self.requests or self._in_flight or self._outputs)

    # ------------------------------------------------------------------------------- next step

    def schedule(self) -> ScheduledStep | None:
        """Schedule the next step. Rows that want one token go before longer ones.

        Returns:
            The step, or None if no request can run.
        """
        builder = PlanBuilder(self.limits.max_num_batched_tokens, self._step)
        was_empty = not self.running
        contended = self.shares.contended
        if contended and self.waiting:
            self._balance(builder, was_empty)
        long_rows: list[tuple[Request, int]] = []
        lookahead = self.limits.lookahead
        # Draft tokens get what is left after one token for every request.
        most_drafts = max(0, min(builder.budget, self.limits.max_logit_rows) - len(self.running))
        for request in list(self.running):
            if request.paused:
                continue
            pending, known = request.pending, len(request.tokens)
            if pending and (not lookahead or known + pending >= request.limit):
                continue  # its next input token is not known yet, or it has its full length
            want = known + pending - request.computed
            if want > 1:
                long_rows.append((request, want))
            elif builder.budget >= want:
                drafts = request.drafts
                if drafts:
                    room = request.limit - known - pending - 1
                    drafts = max(0, min(drafts, most_drafts, room))
                    if request.catching_up or not request.may_draft:
                        drafts = 0
                most_drafts -= self._place(builder, request, want, drafts)
        if builder.rows:
            self._limit_prompts(builder)
        if contended:
            self.shares.sort_by_turn(long_rows)
        for request, want in long_rows:
            if n := self.policy.chunk(want, builder.budget):
                self._place(builder, request, n, 0)
        self._wait_reason = self._admit(builder, was_empty) if self.waiting else None
        self.clocks.wait(self._wait_reason)
        return self._finish_plan(builder) if builder.rows else None

    def _limit_prompts(self, builder: PlanBuilder) -> None:
        """Limit the prompt tokens of a step that also decodes, so that inter-token latency stays even."""
        limit = self.limits.mixed_prefill_tokens
        if limit < self.limits.max_num_batched_tokens:
            builder.budget, builder.min_charge = min(builder.budget, limit), _CHUNK_TOKENS

    def _place(self, builder: PlanBuilder, request: Request, n: int, drafts: int) -> int:
        """Add a row of `n` tokens and `drafts` draft tokens.

        If there are too few blocks, drop the drafts, then preempt other requests.

        Returns:
            The number of draft tokens in the row.
        """
        if request.status != "running":
            return 0  # preempted earlier in this step
        if request.computed + n + drafts > request.room:
            while (added := self.blocks.grow(request, request.computed + n + drafts)) is None:
                if drafts:
                    drafts = 0
                elif not self._preempt_other(builder, request):
                    return 0  # requests in front of it hold the blocks: try again in the next step
            builder.new_blocks += added
        self._emit(builder, request, n + drafts, drafts)
        return drafts

    def _emit(self, builder: PlanBuilder, request: Request, n: int, drafts: int) -> None:
        """Add a row of `n` tokens whose blocks the request holds, and count them as computed."""
        samples = builder.add(request, n, drafts)
        request.last_step = builder.step
        if request.catching_up:
            request.catching_up = not samples
        request.computed += n
        if request.computed >= request.full_at:
            builder.published.update(self.blocks.publish(request))
            if not request.catching_up:
                builder.filled.append(request)
        if samples:
            request.pending += 1 + drafts
            if not self.limits.keeps_kv:
                request.computed = 0

    def _preempt_other(self, builder: PlanBuilder, request: Request) -> bool:
        """Preempt a request that comes after `request` in order and has no row in this step.

        The first request in order therefore always gets its blocks, so every batch makes progress.

        Returns:
            False if there is no such request.
        """
        victim = self.shares.last(self.running, builder.step, request)
        if victim is None:
            return False
        self.preempt(victim)
        builder.preempted.append(victim.id)
        self.log.totals.pressure += 1
        return True

    def preempt(self, victim: Request) -> None:
        """Return a running request to the waiting queue. Its full blocks stay in the prefix cache."""
        self.running.remove(victim)
        self._release(victim)
        victim.status, victim.computed = "waiting", 0
        victim.preemptions += 1
        self.waiting.add(victim)
        self.clocks.preempt(victim)

    def _balance(self, builder: PlanBuilder, was_empty: bool) -> None:
        """Admit the request whose turn it is before rows fill the step, so that other clients leave it tokens.

        Clients that hold more than their share make room for it. At most one request is admitted in this way per
        step, because the next one may then find its blocks in the prefix cache.
        """
        ready = (r for r in self.waiting.by_turn(self.running) if not (r.pending or r.held or r.paused))
        request = next(ready, None)
        if request is None or not self.policy.admits(was_empty, builder.budget):
            return
        match = self.blocks.match(request)
        reserved = max(1, builder.budget - self.limits.max_num_seqs)  # left over if all rows run one token
        if not self.policy.chunk(request.known - match.tokens, reserved):
            return
        demand = self.blocks.demand(request, match)
        slots = 0 if self._free_slots else 1
        shortage = Shortage(slots, demand.missing, demand.size, frozenset(match.blocks))
        victims = self.shares.claim(request, self.running, shortage, self.pool.refs)
        if victims is None:
            return
        for victim in victims:
            self.preempt(victim)
            builder.preempted.append(victim.id)
        self.log.totals.yielded += len(victims)
        self.waiting.remove(request)
        self._start(builder, request, demand, 0)

    def _admit(self, builder: PlanBuilder, was_empty: bool) -> str | None:
        """Move waiting requests into the batch. Return the reason why the first remaining one must wait."""
        skipped = None
        for request in self.waiting.by_turn(self.running):
            if request.pending or request.held or request.paused:
                # `pending`: while a step of it is in flight, its length is not known.
                skipped = skipped or request.held or ("grammar" if request.paused else "results")
                continue
            if not self._free_slots:
                return "slots"
            if not self.policy.admits(was_empty, builder.budget):
                return "batch" if builder.budget else "tokens"
            match = self.blocks.match(request)
            n = self.policy.chunk(request.known - match.tokens, builder.budget)
            if n == 0 and not (was_empty and builder.rows):
                return "tokens"
            demand = self.blocks.demand(request, match)
            if demand.missing > 0:
                return "blocks"
            self.waiting.remove(request)
            if not builder.published.isdisjoint(match.blocks):
                # A row must not read a block that another row of its step writes, so this one runs in the next step.
                # Its tokens still count against the budget: as many requests are admitted as if it ran now.
                builder.charge(n)
                n = 0
            self._start(builder, request, demand, n)
        return skipped

    def _start(self, builder: PlanBuilder, request: Request, demand: BlockDemand, n: int) -> None:
        """Give a request a slot and its blocks, and run its first `n` tokens unless `n` is 0."""
        self._admissions += 1
        self.blocks.admit(request, demand)
        request.slot = self._free_slots.pop()
        request.status, request.last_step, request.admitted_known = "running", builder.step, request.known
        request.computed, request.catching_up = demand.match.tokens, True
        self.shares.take_slot(request)
        prefix_end = ""
        if request.cached < 0:
            request.cached = request.computed
            self.shares.waive_cached(request)
            prefix_end = self.blocks.cache.end_of_match(request, request.computed)
        self.clocks.admit(request, prefix_end)
        self.log.totals.queried_tokens += request.known
        self.log.totals.cached_tokens += request.computed
        insort(self.running, request, key=_order)
        builder.admit(request)
        if n:
            self._emit(builder, request, n, 0)
        self.shares.settle(request)

    def _finish_plan(self, builder: PlanBuilder) -> ScheduledStep:
        """Build the plan, append its record to the log, and queue it as the newest step in flight."""
        for request in builder.filled:
            self.blocks.trim(request)
        plan = builder.plan()
        if plan.total_tokens == len(builder.rows):  # one token each
            plan.shared = self.shared.find(builder.rows, (self._admissions, plan.slots.tobytes()))
        self._step += 1
        record = builder.record(len(self.running), len(self.waiting), self._wait_reason, self.pool.num_free)
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
        rows, caught_up = builder.rows, self.clocks.end_step(record, builder.catching_up)
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
            if request.status == "finished" or request.dropped_step == plan.step:
                continue  # the request ended while this step was in flight, or its row had no mask
            record.generated += len(new)
            if drafts[index]:
                if request.status == "running":  # otherwise its next admission sets the count
                    request.computed -= drafts[index] - (len(new) - 1)
                self.log.totals.count_drafts(drafts[index], len(new) - 1)
                request.timing.draft_tokens += drafts[index]
                request.timing.accepted_tokens += len(new) - 1
                self.depth.observe(request, drafts[index], len(new) - 1)
            pooled = None if result.pooled is None else result.pooled.get(index)
            if failure := find_failure(request, new, pooled):
                scores.pop(request.id, None)
                self._outputs.append(self._fail_request(request, new[:-1], failure))
                continue
            output = self._append(request, new)
            if caught_up and request in caught_up:
                output.timing = self.clocks.timing(request)
            if result.logprobs is not None and (top := request.params.logprobs) is not None:
                output.logprobs = result.logprobs.of(first, len(output.token_ids), top)
            if (scored := scores.pop(request.id, None)) is not None:
                output.prompt_logprobs_start, output.prompt_logprobs = scored.start, scored.entries
            if pooled is not None:
                output.pooled = pooled.tobytes()
            self._outputs.append(output)
        self.depth.end_step(record, rows)
        for request_id, scored in scores.items():
            self._outputs.append(
                EngineOutput(
                    request_id, [], prompt_logprobs=scored.entries, prompt_logprobs_start=scored.start
                )
            )

    def fail(self, error: str) -> None:
        """End the requests of the newest step with `error`, because nothing that it wrote is reliable.

        All earlier steps must have been retired; their requests continue. A slot that the failed step was to fill is
        overwritten at its next admission.
        """
        (((plan, record), builder),) = self._in_flight
        self._in_flight.clear()
        self.clocks.fail_step(record)
        self.blocks.cache.withdraw(builder.published)
        admitted = (self.requests.get(admit.request.id) for admit in plan.admissions)
        for request in dict.fromkeys([*builder.rows, *admitted]):
            if request is not None and request.status != "finished":
                output = self._finish(request, [], "error")
                output.error = RequestFailure(error, internal=True)
                self._outputs.append(output)

    def _fail_request(self, request: Request, new: list[int], failure: RequestFailure) -> EngineOutput:
        """End a request for which no token can be sampled after the tokens `new`, unless one of these ends it.

        Its blocks may hold NaN, so no other request may read them.
        """
        if new and (output := self._append(request, new)).finish_reason is not None:
            return output
        if failure.internal:
            self.blocks.cache.forget(request)
            self.log.totals.not_finite += 1
        output = self._finish(request, [], "error")
        output.token_ids, output.error = new, failure
        return output

    def _append(self, request: Request, new: list[int]) -> EngineOutput:
        """Append sampled tokens to a request, up to the first one that ends it."""
        tokens, accepted = request.tokens, new
        for count, token in enumerate(new, 1):
            tokens.append(token)
            if token in request.stop_ids and len(tokens) - request.prompt_len >= request.min_tokens:
                return self._finish(request, new[:count], "stop", None if token in request.eos_ids else token)
            if len(tokens) >= request.limit:
                return self._finish(request, new[:count], "length")
        self.log.totals.generated_tokens += len(accepted)
        return EngineOutput(request.id, accepted, num_cached_tokens=request.cached)

    def _finish(
        self, request: Request, new: list[int], reason: FinishReason, stop_reason: int | None = None
    ) -> EngineOutput:
        """End a request and release what it holds. Return its last output, with the tokens `new`."""
        self.shares.settle(request)
        self.shares.leave(request)
        if request.status == "running":
            self.running.remove(request)
            self._release(request)
        else:
            self.waiting.remove(request)
        request.status = "finished"
        self.clocks.finish(request)
        del self.requests[request.id]
        totals = self.log.totals
        totals.finished += 1
        totals.generated_tokens += len(new)
        cached = max(request.cached, 0)
        return EngineOutput(request.id, new, reason, stop_reason, cached, timing=request.timing)

    def _release(self, request: Request) -> None:
        self.blocks.release(request)
        self._free_slots.append(request.slot)
        self.shares.give_slot(request)
        request.slot = -1

    def take_outputs(self) -> list[EngineOutput]:
        """Return the outputs since the last call, in order, and forget them."""
        outputs, self._outputs = self._outputs, []
        return outputs

    # ------------------------------------------------------------------------------- invariants

    def check(self) -> None:
        """Check the invariants of slots, blocks and requests. Raises AssertionError if one is broken."""
        self.blocks.check(self.requests.values())
        assert len(self._free_slots) + len(self.running) == self.limits.max_num_seqs, "a slot was lost"
        assert len(self.waiting) + len(self.running) == len(self.requests), "a request was lost"
        assert all(r.status == "running" and r.slot >= 0 for r in self.running)
        assert all(r.status == "waiting" for r in self.waiting)
        self.waiting.check()
        self.shares.check(self.requests.values())
        assert self.running == sorted(self.running, key=_order)
        for r in self.running:
            assert r.computed <= r.known + r.pending, "more KV entries than tokens known or in flight"
