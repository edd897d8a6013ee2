"""The real scheduler, pool, prefix cache and step loop against sequential decoding, under random loads.

A fake device runs launched work in order and only when the host waits, so the host can never peek. Its
KV cache stores, per page entry, the hash of the whole token prefix: every forward checks that the block
table it was given really holds the right keys.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest

from quire.core.blocks import FIFO, LRU, BlockPool
from quire.core.engine import Engine
from quire.core.grammar import NoGrammar
from quire.core.limits import Limits
from quire.core.policy import Policy, chunked, continuous, fcfs, priority, static, whole
from quire.core.prefix import HashPrefixCache, NoPrefixCache
from quire.core.scheduler import Scheduler
from quire.core.steplog import StepLog
from quire.types import EngineRequest, RequestError, SamplingParams, StepPlan, StepResult

VOCAB, EOS = 23, 0


def chain(h: int, token: int) -> int:
    return hash((h, token))


def pick(h: int) -> int:
    """The model: the next token after the prefix with hash h."""
    return h // 7 % VOCAB


def reference(request: EngineRequest, max_model_len: int) -> list[int]:
    h, out = -1, []
    for token in request.prompt:
        h = chain(h, token)
    limit = min(request.params.max_tokens or 1 << 30, max_model_len - len(request.prompt))
    while len(out) < limit:
        out.append(pick(h))
        h = chain(h, out[-1])
        if out[-1] in request.stop_ids and len(out) >= request.params.min_tokens:
            break
    return out


@dataclass
class FakeDevice:
    """Executor over plain dictionaries; `lazy` work runs when a handle is waited for."""

    block_size: int
    keeps_kv: bool
    queue: deque = field(default_factory=deque)
    kv: dict = field(default_factory=dict)
    columns: dict = field(default_factory=dict)
    hidden: dict = field(default_factory=dict)
    plans: dict = field(default_factory=dict)

    def forward(self, plan: StepPlan) -> None:
        self.plans[plan.step] = plan
        self.queue.append(lambda: self._forward(plan))

    def sample(self, step: int, masks: object) -> Handle:
        handle = Handle(self)
        plan = self.plans.pop(step)
        self.queue.append(lambda: handle.set(self._sample(plan)))
        return handle

    def close(self) -> None:
        self.queue.clear()

    def _forward(self, plan: StepPlan) -> None:
        for a in plan.admits:
            self.columns[a.slot] = dict(tokens=list(a.tokens), computed=a.computed, blocks=list(a.blocks))
        for slot, index, blocks in plan.new_blocks:
            assert len(self.columns[slot]["blocks"]) == index
            self.columns[slot]["blocks"] += blocks
        assert len(set(plan.slots.tolist())) == len(plan.slots), "a slot runs twice in one step"
        assert plan.num_tokens.sum() == plan.total_tokens
        hidden, writes = {}, []
        for slot, n, start in zip(plan.slots.tolist(), plan.num_tokens.tolist(), plan.starts.tolist()):
            column = self.columns[slot]
            assert column["computed"] == start, "host and device disagree"
            tokens = column["tokens"][start : start + n]
            assert len(tokens) == n, "the device does not have the input tokens yet"
            h = self._prefix(column, start)
            for position, token in enumerate(tokens, start):
                h = chain(h, token)
                writes.append((column["blocks"][position // self.block_size], position % self.block_size, h))
            hidden[slot] = h
        for block, offset, h in writes:  # all KV of a layer is written before attention reads it
            self.kv[block, offset] = h
        for slot, n, start in zip(plan.slots.tolist(), plan.num_tokens.tolist(), plan.starts.tolist()):
            column, h = self.columns[slot], -1
            for position, token in enumerate(column["tokens"][: start + n]):
                h = chain(h, token)
                block = column["blocks"][position // self.block_size]
                assert self.kv.get((block, position % self.block_size)) == h, "attention would read wrong KV"
        self.hidden[plan.step] = hidden

    def _prefix(self, column: dict, length: int) -> int:
        h = -1
        for token in column["tokens"][:length]:
            h = chain(h, token)
        return h

    def _sample(self, plan: StepPlan) -> StepResult:
        out, hidden = [], self.hidden.pop(plan.step)
        for slot, n, samples in zip(plan.slots.tolist(), plan.num_tokens.tolist(), plan.samples.tolist()):
            column = self.columns[slot]
            column["computed"] += n
            if samples:
                token = pick(hidden[slot])
                column["tokens"].append(token)
                out.append([token])
                if not self.keeps_kv:
                    column["computed"] = 0
        return StepResult(plan.step, out)


class Handle:
    def __init__(self, device: FakeDevice) -> None:
        self._device, self._result = device, None

    def set(self, result: StepResult) -> None:
        self._result = result

    def wait(self) -> StepResult:
        while self._result is None:
            self._device.queue.popleft()()
        return self._result


def make_engine(rng: random.Random | None = None, **fixed) -> tuple[Engine, int]:
    def choose(name, options):
        return fixed[name] if name in fixed else rng.choice(options)

    max_len = choose("max_len", [24, 40])
    layout = choose("layout", ["paged", "paged", "paged", "contiguous", "none"])
    block_size = choose("block_size", [1, 3, 4, 16]) if layout == "paged" else max_len
    per_request = -(-max_len // block_size)
    num_blocks = choose("num_blocks", [per_request, per_request + 3, 3 * per_request, 40 * per_request])
    keeps = layout != "none"
    chunk = choose("chunk", [True, True, False]) and keeps
    budget = choose("budget", [1, 6, 9, 64]) if chunk else max(64, max_len)
    depth = choose("depth", [1, 2, 2, 3])
    pool = BlockPool(num_blocks, choose("evictor", [LRU, FIFO])())
    cache = (
        HashPrefixCache(pool, block_size) if keeps and choose("prefix", [True, False]) else NoPrefixCache()
    )
    policy = Policy(
        order=choose("order", [fcfs, priority]),
        admits=choose("admits", [continuous, continuous, static]),
        chunk=chunked if chunk else whole,
    )
    mixed = choose("mixed", [1, 5, budget]) if chunk else budget
    limits = Limits(choose("rows", [1, 3, 8]), budget, max_len, block_size, keeps, depth > 1, mixed)
    log = StepLog()
    scheduler = Scheduler(pool, cache, policy, limits, log)
    return Engine(
        scheduler, FakeDevice(block_size, keeps), NoGrammar(), depth, log, check_invariants=True
    ), max_len


def random_requests(rng: random.Random, max_len: int) -> list[EngineRequest]:
    shared = [rng.randrange(1, VOCAB) for _ in range(16)]
    out = []
    for i in range(rng.randrange(1, 14)):
        prompt = shared[: rng.randrange(16)] if rng.random() < 0.6 else []
        prompt = prompt + [rng.randrange(1, VOCAB) for _ in range(rng.randrange(1, 7))]
        if out and rng.random() < 0.2:
            prompt = rng.choice(out).prompt  # the whole prompt may be in the cache
        params = SamplingParams(max_tokens=rng.choice([None, *range(1, 13)]))
        params.min_tokens = rng.choice([0, 0, 2])
        stop = [EOS] if rng.random() < 0.8 else []
        out.append(EngineRequest(f"r{i}", prompt, params, stop, stop, priority=rng.randrange(3)))
    return out


def random_run(seed: int) -> Engine:
    rng = random.Random(seed)
    engine, max_len = make_engine(rng)
    todo = random_requests(rng, max_len)
    added: dict[str, EngineRequest] = {}
    got: dict[str, list[int]] = {}
    ended: dict[str, str] = {}
    for step in range(3000):
        if todo and rng.random() < 0.5:
            request = todo.pop()
            engine.add(request)
            added[request.id], got[request.id] = request, []
        if step < 100 and rng.random() < 0.03 and (live := [i for i in added if i not in ended]):
            engine.abort(rng.choice(live))
        for output in engine.step():
            assert output.id not in ended, "an output after the final one"
            got[output.id] += output.token_ids
            if output.finish_reason:
                ended[output.id] = output.finish_reason
        if not todo and not engine.has_work:
            break
    assert set(ended) == set(added), f"no final output for {set(added) - set(ended)}"
    for name, request in added.items():
        want = reference(request, max_len)
        if ended[name] == "abort":
            assert got[name] == want[: len(got[name])]
        else:
            assert got[name] == want, (seed, name)
            stopped = want[-1] in request.stop_ids and len(want) >= request.params.min_tokens
            assert ended[name] == ("stop" if stopped else "length")
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks
    return engine


@pytest.mark.parametrize("start", range(0, 2000, 250))
def test_random_loads_agree_with_sequential_decoding(start: int) -> None:
    preempted = cached = 0
    for seed in range(start, start + 250):
        totals = random_run(seed).log.totals
        preempted += totals.preemptions
        cached += totals.cached_tokens
    assert preempted and cached, "the load exercised neither preemption nor the prefix cache"


def drain(engine: Engine) -> dict[str, list[int]]:
    got: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            got.setdefault(output.id, []).extend(output.token_ids)
    return got


def request(name: str, prompt: list[int], max_tokens: int = 4, **more) -> EngineRequest:
    return EngineRequest(name, prompt, SamplingParams(max_tokens=max_tokens), **more)


SMALL = dict(
    max_len=40, layout="paged", block_size=4, num_blocks=30, chunk=True, budget=64, depth=2, evictor=LRU,
    prefix=True, order=fcfs, admits=continuous, rows=8, mixed=64,
)  # fmt: skip


def test_equal_prompts_in_one_step_share_pages() -> None:
    engine, _ = make_engine(**SMALL)
    for i in range(3):
        engine.add(request(f"r{i}", [5] * 10))
    engine.step()
    admitted = engine.log.last.admitted
    assert admitted == [("r0", 10, 0), ("r1", 10, 8), ("r2", 10, 8)]
    assert engine.scheduler.pool.num_blocks - engine.scheduler.pool.num_free == 2 + 3


def test_salt_separates_equal_prompts() -> None:
    engine, _ = make_engine(**SMALL)
    engine.add(request("a", [5] * 10, cache_salt="x"))
    engine.add(request("b", [5] * 10, cache_salt="y"))
    engine.step()
    assert [cached for _, _, cached in engine.log.last.admitted] == [0, 0]


def test_decode_rows_go_before_chunks() -> None:
    engine, _ = make_engine(**{**SMALL, "budget": 8, "depth": 1})
    engine.add(request("short", [1, 2], 8))
    engine.step()
    engine.add(request("long", [3] * 30, 2))
    engine.step()
    assert engine.log.last.rows == [("short", 2, 1), ("long", 0, 7)]


def test_priority_runs_the_lower_number_first() -> None:
    engine, _ = make_engine(**{**SMALL, "order": priority, "rows": 1, "depth": 1})
    for i, p in enumerate([2, 1, 0]):
        engine.add(request(f"r{i}", [1, 2, 3], 1, priority=p))
    order = [output.id for _ in range(5) for output in engine.step() if output.finish_reason]
    assert order == ["r2", "r1", "r0"]


def test_static_batch_admits_only_into_an_empty_batch() -> None:
    engine, _ = make_engine(**{**SMALL, "admits": static, "depth": 1, "budget": 6})
    for i, n in enumerate([2, 6]):
        engine.add(request(f"r{i}", [1, 2, 3, 4], n))
    engine.step()
    engine.add(request("late", [1, 2], 1))
    assert len(engine.log.last.admitted) == 2, "a static batch is filled beyond the tokens of its first step"
    while "late" in engine.scheduler.requests:
        engine.step()
        if engine.log.last.admitted:
            assert engine.log.last.running == 1


def test_fifo_keeps_its_order_when_it_drops_stale_entries() -> None:
    blocks = list(range(100))[::-1]  # so that the order of age is not that of the ids
    evictor = FIFO()
    for block in blocks:
        evictor.add(block)
    for block in blocks[:90]:
        evictor.discard(block)
    evictor.add(blocks[0])  # rebuilds the heap
    assert [evictor.pop() for _ in range(len(evictor))] == [blocks[0], *blocks[90:]]


def test_fifo_evicts_by_age_and_lru_by_use() -> None:
    for evictor, survivor in ((LRU, "old"), (FIFO, "new")):
        engine, _ = make_engine(**{**SMALL, "evictor": evictor, "num_blocks": 10, "depth": 1})
        prompts = {"old": [1] * 9, "new": [2] * 9}
        for name in ("old", "new", "old"):  # `old` is cached first and used last
            engine.add(request(f"{name}{engine.log.totals.requests}", prompts[name], 1))
            drain(engine)
        engine.add(request("filler", [3] * 32, 1))  # 8 pages: more than the blank ones
        drain(engine)
        hits = {}
        for name in sorted(prompts, key=lambda name: name != survivor):  # a miss evicts: probe it last
            engine.add(request(f"probe {name}", prompts[name], 1))
            engine.step()
            hits[name] = engine.log.last.admitted[0][2]
            drain(engine)
        assert hits[survivor] == 8 and max(hits.values()) == 8 and min(hits.values()) < 8, (evictor, hits)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "text"),
    [
        ([], 1, "at least one token"),
        ([1] * 40, 1, "max_model_len is 40"),
        ([1] * 30, 10, "needs 10 KV pages of 4 tokens .* holds 9 pages"),
    ],
)
def test_a_request_that_never_fits_is_refused_with_the_numbers(prompt, max_tokens, text) -> None:
    engine, _ = make_engine(**{**SMALL, "num_blocks": 9})
    with pytest.raises(RequestError, match=text):
        engine.add(request("r", prompt, max_tokens))
    engine.add(request("ok", [1, 2], 2))
    assert len(drain(engine)["ok"]) == 2


def test_duplicate_ids_are_refused() -> None:
    engine, _ = make_engine(**SMALL)
    engine.add(request("r", [1]))
    with pytest.raises(RequestError, match="already in use"):
        engine.add(request("r", [1]))


def test_a_broken_pool_is_noticed() -> None:
    engine, _ = make_engine(**SMALL)
    engine.add(request("r", [1] * 9))
    engine.step()
    engine.scheduler.requests["r"].blocks.pop()
    with pytest.raises(AssertionError):
        engine.scheduler.check()


def test_plan_arrays_are_compact() -> None:
    engine, _ = make_engine(**SMALL)
    engine.add(request("r", [1] * 9))
    plan = engine.scheduler.schedule()
    assert plan is not None and plan.slots.dtype == np.int32 and plan.samples.tolist() == [True]


# ------------------------------------------------------------- the simulation notices broken rules


def _break_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockPool, "share", lambda self, blocks: None)


def _break_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    original = HashPrefixCache.match

    def match(self: HashPrefixCache, request) -> list[int]:
        request.tokens.append(0)  # as if the last token need not be computed
        try:
            return original(self, request)
        finally:
            request.tokens.pop()

    monkeypatch.setattr(HashPrefixCache, "match", match)


def _break_readmission(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Scheduler._admit

    def admit(self: Scheduler, draft, was_empty):
        held = [(request, request.pending) for request in self.waiting]
        for request, _ in held:
            request.pending = 0  # as if nothing were in flight
        try:
            return original(self, draft, was_empty)
        finally:
            for request, pending in held:
                request.pending += pending

    monkeypatch.setattr(Scheduler, "_admit", admit)


def _break_forgetting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockPool, "on_evict", lambda self, forget: None)


def _break_length_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Scheduler._append

    def append(self: Scheduler, request, new):
        request.limit += 1
        return original(self, request, new)

    monkeypatch.setattr(Scheduler, "_append", append)


def _break_preemption_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Scheduler._preempt_other

    def preempt(self: Scheduler, draft, request):
        computed = {r.id: r.computed for r in self.running}
        done = original(self, draft, request)
        for waiting in self.waiting:
            if waiting.id in computed:
                waiting.names, waiting.published = [b"stale"] * 99, 0
        return done

    monkeypatch.setattr(Scheduler, "_preempt_other", preempt)


def _break_release(monkeypatch: pytest.MonkeyPatch) -> None:
    original = BlockPool.release
    monkeypatch.setattr(BlockPool, "release", lambda self, blocks: original(self, blocks[1:]))


@pytest.mark.parametrize(
    "rule",
    [
        _break_share,
        _break_last_token,
        _break_readmission,
        _break_forgetting,
        _break_length_limit,
        _break_preemption_reset,
        _break_release,
    ],
)
def test_a_broken_rule_is_noticed(rule, monkeypatch: pytest.MonkeyPatch) -> None:
    rule(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017  an assertion, or the loop falling over
        for seed in range(1000):
            random_run(seed)
