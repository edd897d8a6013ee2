"""The scheduler: decides who runs how many tokens in the next step, and books what came of it.

Owns every `Request`, the slots and, through the pool, the pages. One rule serves prompt, chunk, decode
and recovery alike: a request wants known + pending + drafts - computed tokens. Blocks and slots are
released at once on finish and preemption, while steps that use them may still be in flight: whoever gets
them next writes later in stream order. Invariants are spelled out in `check`.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections import deque

from quire.core.blocks import BlockPool
from quire.core.clocks import Clocks
from quire.core.draft import Draft
from quire.core.failure import Failure, find_failure
from quire.core.limits import Limits
from quire.core.policy import Policy
from quire.core.prefix import PrefixCache
from quire.core.shared import NoSharedPrefix, SharedPrefix
from quire.core.steplog import StepLog
from quire.core.waiting import Waiting
from quire.types import (
    EngineOutput,
    EngineRequest,
    FinishReason,
    Request,
    RequestError,
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
        self.waiting = Waiting()
        self.running: list[Request] = []  # sorted by order
        self._free_slots = list(range(limits.max_num_seqs))[::-1]
        self._in_flight: deque[tuple[StepPlan, Draft]] = deque()
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
            raise RequestError(f"request id {source.id!r} is already in use")
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
        self.waiting.add(request)

    def settle(self, request_id: str, error: str | None) -> None:
        """Let a held request run, or end a request with an error; unknown ids are ignored."""
        if request := self.requests.get(request_id):
            self.clocks.released(request)
            if error is not None:
                output = self._finish(request, [], "error")
                output.error = error
                self._outputs.append(output)

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
        draft = Draft(self.limits.max_num_batched_tokens, self._step)
        was_empty = not self.running
        long_rows: list[tuple[Request, int]] = []
        lookahead = self.limits.lookahead
        for request in list(self.running):
            pending, known = request.pending, len(request.tokens)
            if pending and (not lookahead or known + pending >= request.limit):
                continue  # its next input is not decided yet, or it has its full length
            want = known + pending + request.drafts - request.computed
            if want > 1 + request.drafts:
                long_rows.append((request, want))
            elif draft.budget >= want:
                self._place(draft, request, want)
        if draft.rows:
            draft.budget = min(draft.budget, self.limits.mixed_prefill_tokens)
        for request, want in long_rows:
            if n := self.policy.chunk(want, draft.budget):
                self._place(draft, request, n)
        self._wait_reason = self._admit(draft, was_empty) if self.waiting else None
        self.clocks.wait(self._wait_reason)
        return self._finish_plan(draft) if draft.rows else None

    def _place(self, draft: Draft, request: Request, n: int) -> None:
        """Add a row of n tokens, making room for its KV by preemption when pages run out."""
        if request.status != "running":
            return  # preempted earlier in this step
        held = len(request.blocks)
        if (need := -(-(request.computed + n) // self.limits.block_size) - held) > 0:
            while need > self.pool.num_free:
                if not self._preempt_other(draft, request):
                    return  # those in front run or finish first: try again in the next step
            fresh = self.pool.take(need)
            request.blocks += fresh
            draft.new_blocks.append((request.slot, held, fresh))
        self._emit(draft, request, n)

    def _emit(self, draft: Draft, request: Request, n: int) -> None:
        samples = draft.add(request, n)
        request.last_step = draft.step
        if request.catching_up:
            request.catching_up = not samples
        request.computed += n
        if request.computed >= request.publish_at:
            self.cache.publish(request)
        if samples:
            request.pending += 1 + request.drafts
            if not self.limits.keeps_kv:
                request.computed = 0

    def _preempt_other(self, draft: Draft, request: Request) -> bool:
        """Take the pages of the last request in order that is not in this step; False if none is behind
        `request`. The first in order therefore always gets its pages, and so the batch always moves on."""
        victim = next((r for r in reversed(self.running) if r.last_step != draft.step), request)
        if victim.order <= request.order:
            return False
        self.running.remove(victim)
        self._release(victim)
        victim.status, victim.computed, victim.published, victim.publish_at = "waiting", 0, 0, 0
        victim.preemptions += 1
        self.waiting.add(victim)
        draft.preempted.append(victim.id)
        self.clocks.preempted(victim)
        return True

    def _admit(self, draft: Draft, was_empty: bool) -> str | None:
        """Move waiting requests into the batch; returns why the first one left must wait."""
        skipped = None
        for request in self.waiting.by_turn(self.running):
            if request.pending or request.held:  # preempted with a step in flight: its length is not known
                skipped = skipped or request.held or "results"
                continue
            if not self._free_slots:
                return "slots"
            if not self.policy.admits(was_empty, draft.budget):
                return "batch" if draft.budget else "tokens"
            hits = self.cache.match(request)
            computed = len(hits) * self.limits.block_size
            n = self.policy.chunk(request.known - computed, draft.budget)
            if n == 0 and not (was_empty and draft.rows):
                return "tokens"
            fresh = -(-request.known // self.limits.block_size) - len(hits)
            if fresh > self.pool.num_free - sum(1 for block in hits if not self.pool.refs[block]):
                return "pages"
            self.waiting.remove(request)
            self._start(draft, request, hits, fresh, n)
        return skipped

    def _start(self, draft: Draft, request: Request, hits: list[int], fresh: int, n: int) -> None:
        self._admissions += 1
        self.pool.share(hits)
        request.blocks = hits + self.pool.take(fresh)
        request.slot = self._free_slots.pop()
        request.status = "running"
        request.computed = len(hits) * self.limits.block_size
        if request.cached < 0:
            request.cached = request.computed
            self.waiting.charge(request, request.prompt_len - request.computed)
            request.timing.prefix_end = self.cache.end_of_match(request, len(hits))
        self.clocks.admitted(request)
        self.log.totals.queried_tokens += request.known
        self.log.totals.cached_tokens += request.computed
        insort(self.running, request, key=_order)
        draft.admit(request)
        if n:
            self._emit(draft, request, n)

    def _finish_plan(self, draft: Draft) -> StepPlan:
        plan = draft.plan()
        if plan.total_tokens == len(draft.rows):  # one token each
            plan.shared = self.shared.find(draft.rows, (self._admissions, plan.slots.tobytes()))
        self._step += 1
        self._in_flight.append((plan, draft))
        self.log.totals.computed_tokens += plan.total_tokens
        self.log.append(
            draft.record(len(self.running), len(self.waiting), self._wait_reason, self.pool.num_free)
        )
        return plan

    # --------------------------------------------------------------------------------- results

    def retire(self, result: StepResult) -> None:
        """Book the oldest step in flight; what it brings the requests is handed out by `take_outputs`."""
        plan, draft = self._in_flight.popleft()
        assert result.step == plan.step, f"result of step {result.step}, expected {plan.step}"
        rows, caught_up = draft.rows, self.clocks.retired(plan.step, draft.catching_up)
        scores = draft.take_scores(result.prompt_logprobs) if result.prompt_logprobs else {}
        drafts = plan.num_drafts.tolist()
        sampled = 0
        for index, (request, samples) in enumerate(zip(rows, plan.samples.tolist())):
            if not samples:
                continue
            new = result.tokens[sampled]
            sampled += 1
            request.pending -= 1 + drafts[index]
            if request.status == "finished":
                continue  # a surplus row: the request ended while this step was in flight
            if self.limits.keeps_kv:
                request.computed -= drafts[index] - (len(new) - 1)
            pooled = None if result.pooled is None else result.pooled.get(index)
            if failure := find_failure(request, new[0], pooled):
                scores.pop(request.id, None)
                self._outputs.append(self._fail(request, failure))
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

    def _fail(self, request: Request, failure: Failure) -> EngineOutput:
        """End a request that no token can be sampled for. What it computed may not be finite: nobody reads it."""
        if failure.is_numeric:
            self.cache.forget(request)
            self.log.totals.not_finite += 1
        output = self._finish(request, [], "error")
        output.error, output.internal = failure.message, failure.is_numeric
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
        if request.status == "running":
            self.running.remove(request)
            self._release(request)
        else:
            self.waiting.remove(request)
        request.status = "finished"
        self.clocks.finished(request)
        self.waiting.settle(request)
        del self.requests[request.id]
        totals = self.log.totals
        totals.finished += 1
        totals.generated_tokens += len(new)
        cached = max(request.cached, 0)
        return EngineOutput(request.id, new, reason, stop_reason, cached, timing=request.timing)

    def _release(self, request: Request) -> None:
        self.pool.release(request.blocks)
        self._free_slots.append(request.slot)
        request.blocks, request.slot = [], -1

    def take_outputs(self) -> list[EngineOutput]:
        """What happened since the last call, in order."""
        outputs, self._outputs = self._outputs, []
        return outputs

    # -------------------------------------------------------------------------------- the books

    def check(self) -> None:
        """Raise AssertionError unless slots, pages and requests add up."""
        self.pool.check(request.blocks for request in self.requests.values())
        assert len(self._free_slots) + len(self.running) == self.limits.max_num_seqs, "a slot was lost"
        assert len(self.waiting) + len(self.running) == len(self.requests), "a request was lost"
        assert all(r.status == "running" and r.slot >= 0 for r in self.running)
        assert all(r.status == "waiting" and not r.blocks for r in self.waiting)
        self.waiting.check()
        assert self.running == sorted(self.running, key=_order)
        for r in self.running:
            assert r.computed <= r.known + r.pending + r.drafts, "computed beyond what is known or in flight"
            assert len(r.blocks) * self.limits.block_size >= r.computed, "KV entries without a page"
