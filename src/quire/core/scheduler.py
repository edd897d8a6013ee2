"""The scheduler: decides who runs how many tokens in the next step, and books what came of it.

Owns every `Request`, the slots and, through the pool, the blocks. One rule serves prompt, chunk, decode
and recovery alike: a request wants known + pending + drafts - computed tokens. Blocks and slots are
released at once on finish and preemption, while steps that use them may still be in flight: whoever gets
them next writes later in stream order. Invariants are spelled out in `check`.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections import deque

from quire.core.block_pool import BlockPool
from quire.core.clocks import Clocks
from quire.core.failure import find_failure
from quire.core.plan_builder import PlanBuilder
from quire.core.policy import Policy
from quire.core.prefix_cache import PrefixCache
from quire.core.request_limits import Limits
from quire.core.shared_prefix import NoSharedPrefix, SharedPrefix
from quire.core.shares import Missing, Shares
from quire.core.steplog import StepLog
from quire.core.waiting_queue import Waiting
from quire.types import (
    EngineOutput,
    EngineRequest,
    FinishReason,
    Request,
    RequestError,
    RequestFailure,
    StepPlan,
    StepResult,
)


def _order(request: Request) -> tuple[int, ...]:
    return request.order


class Scheduler:
    def __init__(
        self,
        pool: BlockPool,
        cache: PrefixCache,
        policy: Policy,
        limits: Limits,
        log: StepLog,
        shared: SharedPrefix | None = None,
    ) -> None:
        self.pool, self.cache, self.policy, self.limits = pool, cache, policy, limits
        self.shared = shared or NoSharedPrefix()
        self.log = log
        self.clocks = Clocks(log)
        self.requests: dict[str, Request] = {}  # every request that is not finished
        self.shares = Shares()
        self.waiting = Waiting(self.shares)
        self.running: list[Request] = []  # sorted by order
        self._free_slots = list(range(limits.max_num_seqs))[::-1]
        self._in_flight: deque[tuple[StepPlan, PlanBuilder]] = deque()
        self._outputs: list[EngineOutput] = []
        self._sequence = 0
        self._admissions = 0
        self._step = 0
        self._wait_reason: str | None = None

    # ------------------------------------------------------------------------------ requests in

    def add(self, source: EngineRequest, held: str | None = None) -> None:
        """Queue a request; while it is `held`, for that reason, it waits for `settle`. Raises RequestError,
        with the numbers, when it could never run."""
        if source.id in self.requests:
            raise RequestError(f"request id {source.id!r} is already in use", param="request_id")
        limit = self.limits.full_length(source, self.pool.num_blocks)
        request = Request(
            id=source.id,
            prompt_len=len(source.prompt),
            tokens=array("i", source.prompt),
            params=source.params,
            order=self.policy.order(source, self._sequence),
            limit=limit,
            stop_ids=frozenset(source.stop_ids),
            eos_ids=frozenset(source.eos_ids),
            min_tokens=0 if source.grammar else source.params.min_tokens,
            source=source,
            held=held,
        )
        self.clocks.arrived(request)
        self._sequence += 1
        self.requests[request.id] = request
        self.log.totals.requests += 1
        self.log.totals.prompt_tokens += request.prompt_len
        self.shares.enter(request)
        self.waiting.add(request)

    def settle(self, request_id: str, error: str | None) -> None:
        """Let a held or paused request run, or end one with an error; unknown ids are ignored."""
        if request := self.requests.get(request_id):
            request.paused = False
            self.clocks.released(request)
            if error is not None:
                output = self._finish(request, [], "error")
                output.error = RequestFailure(error, param="structured_outputs")
                self._outputs.append(output)

    def pause(self, request_id: str, drops_token: bool) -> None:
        """Keep a request out of further steps until `settle`; unknown ids are ignored.

        Args:
            request_id: which request.
            drops_token: the token that the newest step samples for it is not to be used. The device will have
                counted it, so the request gives up its slot and is computed again.
        """
        if (request := self.requests.get(request_id)) is None:
            return
        request.paused = True
        if drops_token:
            plan, builder = self._in_flight[-1]
            request.dropped_step = plan.step
            builder.forget_sample(request)
            if request.status == "running":
                self._preempt(request)

    def abort(self, request_id: str) -> None:
        """End a request now; unknown ids are ignored, for it may just have finished."""
        if request := self.requests.get(request_id):
            self._outputs.append(self._finish(request, [], "abort"))
            self.log.totals.aborted += 1

    @property
    def has_work(self) -> bool:
        return bool(self.requests or self._in_flight or self._outputs)

    # ------------------------------------------------------------------------------- next step

    def schedule(self) -> StepPlan | None:
        """The next step, or None when nobody can run. Rows that want one token go before longer ones."""
        builder = PlanBuilder(self.limits.max_num_batched_tokens, self._step)
        was_empty = not self.running
        contended = self.shares.contended
        if contended and self.waiting:
            self._balance(builder, was_empty)
        long_rows: list[tuple[Request, int]] = []
        lookahead = self.limits.lookahead
        for request in list(self.running):
            if request.paused:
                continue
            pending, known = request.pending, len(request.tokens)
            if pending and (not lookahead or known + pending >= request.limit):
                continue  # its next input is not decided yet, or it has its full length
            want = known + pending + request.drafts - request.computed
            if want > 1 + request.drafts:
                long_rows.append((request, want))
            elif builder.budget >= want:
                self._place(builder, request, want)
        if builder.rows:
            builder.budget = min(builder.budget, self.limits.mixed_prefill_tokens)
        if contended:
            self.shares.sort_by_turn(long_rows)
        for request, want in long_rows:
            if n := self.policy.chunk(want, builder.budget):
                self._place(builder, request, n)
        self._wait_reason = self._admit(builder, was_empty) if self.waiting else None
        self.clocks.wait(self._wait_reason)
        return self._finish_plan(builder) if builder.rows else None

    def _place(self, builder: PlanBuilder, request: Request, n: int) -> None:
        """Add a row of n tokens, making room for its KV by preemption when blocks run out."""
        if request.status != "running":
            return  # preempted earlier in this step
        held = len(request.blocks)
        if (need := -(-(request.computed + n) // self.limits.block_size) - held) > 0:
            while need > self.pool.num_free:
                if not self._preempt_other(builder, request):
                    return  # those in front run or finish first: try again in the next step
            fresh = self.pool.take(need)
            request.blocks += fresh
            builder.new_blocks.append((request.slot, held, fresh))
        self._emit(builder, request, n)

    def _emit(self, builder: PlanBuilder, request: Request, n: int) -> None:
        samples = builder.add(request, n)
        request.last_step = builder.step
        if request.catching_up:
            request.catching_up = not samples
        request.computed += n
        if request.computed >= request.publish_at:
            builder.published.update(self.cache.publish(request))
        if samples:
            request.pending += 1 + request.drafts
            if not self.limits.keeps_kv:
                request.computed = 0

    def _preempt_other(self, builder: PlanBuilder, request: Request) -> bool:
        """Take the blocks of a request behind this one that is not in this step; False if there is none. The first
        in order therefore always gets its blocks, and so the batch always moves on."""
        victim = self.shares.last(self.running, builder.step, request)
        if victim is None:
            return False
        self._preempt(victim)
        builder.preempted.append(victim.id)
        self.log.totals.pressure += 1
        return True

    def _preempt(self, victim: Request) -> None:
        """Move a running request back to its line. Its full blocks stay in the prefix cache."""
        self.running.remove(victim)
        self._release(victim)
        victim.status, victim.computed, victim.published, victim.publish_at = "waiting", 0, 0, 0
        victim.preemptions += 1
        self.waiting.add(victim)
        self.clocks.preempted(victim)

    def _balance(self, builder: PlanBuilder, was_empty: bool) -> None:
        """Admit the request whose turn it is before the step is filled, so that the rows of other clients leave it
        tokens; other clients that hold more than their share make room for it. One per step: the next request may
        then find the blocks of this one in the prefix cache."""
        ready = (r for r in self.waiting.by_turn(self.running) if not (r.pending or r.held or r.paused))
        request = next(ready, None)
        if request is None or not self.policy.admits(was_empty, builder.budget):
            return
        hits, fresh, missing = self._blocks_for(request)
        reserved = max(1, builder.budget - self.limits.max_num_seqs)  # what single tokens are sure to leave
        if not self.policy.chunk(request.known - len(hits) * self.limits.block_size, reserved):
            return
        lacks = Missing(0 if self._free_slots else 1, missing, len(hits) + fresh)
        victims = self.shares.claim(request, self.running, lacks, self.pool.refs)
        if victims is None:
            return
        for victim in victims:
            self._preempt(victim)
            builder.preempted.append(victim.id)
        self.log.totals.yielded += len(victims)
        self.waiting.remove(request)
        self._start(builder, request, hits, fresh, 0)

    def _blocks_for(self, request: Request) -> tuple[list[int], int, int]:
        """Return its cached blocks, the number of fresh ones it needs, and how many of these are not free."""
        hits = self.cache.match(request)
        fresh = -(-request.known // self.limits.block_size) - len(hits)
        evictable = sum(1 for block in hits if not self.pool.refs[block])
        return hits, fresh, fresh - (self.pool.num_free - evictable)

    def _admit(self, builder: PlanBuilder, was_empty: bool) -> str | None:
        """Move waiting requests into the batch; returns why the first one left must wait."""
        skipped = None
        for request in self.waiting.by_turn(self.running):
            if request.pending or request.held or request.paused:
                # With a step in flight its length is not known.
                skipped = skipped or request.held or ("grammar" if request.paused else "results")
                continue
            if not self._free_slots:
                return "slots"
            if not self.policy.admits(was_empty, builder.budget):
                return "batch" if builder.budget else "tokens"
            hits, fresh, missing = self._blocks_for(request)
            n = self.policy.chunk(request.known - len(hits) * self.limits.block_size, builder.budget)
            if n == 0 and not (was_empty and builder.rows):
                return "tokens"
            if missing > 0:
                return "blocks"
            self.waiting.remove(request)
            if not builder.published.isdisjoint(hits):
                # A row must not read what another row of its step writes: this one runs in the next step, and
                # its part of this step's budget is left unused, so no more are admitted than if it ran now.
                builder.budget, n = builder.budget - n, 0
            self._start(builder, request, hits, fresh, n)
        return skipped

    def _start(self, builder: PlanBuilder, request: Request, hits: list[int], fresh: int, n: int) -> None:
        self._admissions += 1
        self.pool.share(hits)
        request.blocks = hits + self.pool.take(fresh)
        request.slot = self._free_slots.pop()
        request.status, request.last_step, request.admitted_known = "running", builder.step, request.known
        request.computed = len(hits) * self.limits.block_size
        self.shares.take_slot(request)
        if request.cached < 0:
            request.cached = request.charged = request.computed
            request.timing.prefix_end = self.cache.end_of_match(request, len(hits))
        self.clocks.admitted(request)
        self.log.totals.queried_tokens += request.known
        self.log.totals.cached_tokens += request.computed
        insort(self.running, request, key=_order)
        builder.admit(request)
        if n:
            self._emit(builder, request, n)
        self.shares.settle(request)

    def _finish_plan(self, builder: PlanBuilder) -> StepPlan:
        plan = builder.plan()
        if plan.total_tokens == len(builder.rows):  # one token each
            plan.shared = self.shared.find(builder.rows, (self._admissions, plan.slots.tobytes()))
        self._step += 1
        self._in_flight.append((plan, builder))
        self.log.totals.computed_tokens += plan.total_tokens
        self.log.append(
            builder.record(len(self.running), len(self.waiting), self._wait_reason, self.pool.num_free)
        )
        return plan

    # --------------------------------------------------------------------------------- results

    def retire(self, result: StepResult) -> None:
        """Book the oldest step in flight; what it brings the requests is handed out by `take_outputs`."""
        plan, builder = self._in_flight.popleft()
        assert result.step == plan.step, f"result of step {result.step}, expected {plan.step}"
        rows, caught_up = builder.rows, self.clocks.retired(plan.step, builder.catching_up)
        scores = builder.take_scores(result.prompt_logprobs) if result.prompt_logprobs else {}
        drafts = plan.num_drafts.tolist()
        sampled = 0
        for index, (request, samples) in enumerate(zip(rows, plan.samples.tolist())):
            if not samples:
                continue
            new = result.tokens[sampled]
            sampled += 1
            request.pending -= 1 + drafts[index]
            if request.status == "finished" or request.dropped_step == plan.step:
                continue  # the request ended while this step was in flight, or had no mask for it
            if self.limits.keeps_kv:
                request.computed -= drafts[index] - (len(new) - 1)
            pooled = None if result.pooled is None else result.pooled.get(index)
            if failure := find_failure(request, new[0], pooled):
                scores.pop(request.id, None)
                self._outputs.append(self._fail_request(request, failure))
                continue
            output = self._append(request, new)
            if caught_up and request in caught_up:
                output.timing = self.clocks.timing(request)
            if result.logprobs is not None and (top := request.params.logprobs) is not None:
                output.logprobs = [result.logprobs.at(sampled - 1, top)]
            if request.id in scores:
                output.prompt_logprobs_start, output.prompt_logprobs = scores.pop(request.id)
            if pooled is not None:
                output.pooled = pooled.tobytes()
            self._outputs.append(output)
        for request_id, (start, entries) in scores.items():
            self._outputs.append(
                EngineOutput(request_id, [], prompt_logprobs=entries, prompt_logprobs_start=start)
            )

    def fail(self, error: str) -> None:
        """End the requests of the newest step with `error`: nothing that it should have written can be relied on.

        The steps before it have been retired, and their requests go on. A slot that the failed step was to fill is
        overwritten by its next admission.
        """
        ((plan, builder),) = self._in_flight
        self._in_flight.clear()
        self.clocks.failed(plan.step)
        self.cache.withdraw(builder.published)
        admitted = (self.requests.get(admit.request.id) for admit in plan.admits)
        for request in dict.fromkeys([*builder.rows, *admitted]):
            if request is not None and request.status != "finished":
                output = self._finish(request, [], "error")
                output.error = RequestFailure(error, internal=True)
                self._outputs.append(output)

    def _fail_request(self, request: Request, failure: RequestFailure) -> EngineOutput:
        """End a request that no token can be sampled for. What it computed may not be finite: nobody reads it."""
        if failure.internal:
            self.cache.forget(request)
            self.log.totals.not_finite += 1
        output = self._finish(request, [], "error")
        output.error = failure
        return output

    def _append(self, request: Request, new: list[int]) -> EngineOutput:
        """Commit sampled tokens up to the first that ends the request."""
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
        self.shares.settle(request)
        self.shares.leave(request)
        if request.status == "running":
            self.running.remove(request)
            self._release(request)
        else:
            self.waiting.remove(request)
        request.status = "finished"
        self.clocks.finished(request)
        del self.requests[request.id]
        totals = self.log.totals
        totals.finished += 1
        totals.generated_tokens += len(new)
        cached = max(request.cached, 0)
        return EngineOutput(request.id, new, reason, stop_reason, cached, timing=request.timing)

    def _release(self, request: Request) -> None:
        self.pool.release(request.blocks)
        self._free_slots.append(request.slot)
        self.shares.give_slot(request)
        request.blocks, request.slot = [], -1

    def take_outputs(self) -> list[EngineOutput]:
        """What happened since the last call, in order."""
        outputs, self._outputs = self._outputs, []
        return outputs

    # -------------------------------------------------------------------------------- the books

    def check(self) -> None:
        """Raise AssertionError unless slots, blocks and requests add up."""
        self.pool.check(request.blocks for request in self.requests.values())
        assert len(self._free_slots) + len(self.running) == self.limits.max_num_seqs, "a slot was lost"
        assert len(self.waiting) + len(self.running) == len(self.requests), "a request was lost"
        assert all(r.status == "running" and r.slot >= 0 for r in self.running)
        assert all(r.status == "waiting" and not r.blocks for r in self.waiting)
        self.waiting.check()
        self.shares.check(self.requests.values())
        assert self.running == sorted(self.running, key=_order)
        for r in self.running:
            assert r.computed <= r.known + r.pending + r.drafts, "computed beyond what is known or in flight"
            assert len(r.blocks) * self.limits.block_size >= r.computed, "KV entries without a block"
