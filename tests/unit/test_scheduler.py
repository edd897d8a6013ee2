"""The scheduler, pool, prefix cache and step loop compared with sequential decoding, under random loads.

A fake device runs launched work in order and only when the host waits, so the host cannot read results too early. Each
entry of its KV cache holds the hash of the whole token prefix, so every forward pass checks that the block table points
to the right keys. The state of a slot, and each snapshot of one, is the hash of all tokens that went into it.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from quire.core import shares
from quire.core.block_pool import FIFO, LRU, BlockPool
from quire.core.blocks import Blocks
from quire.core.draft_depth import FixedDepth, NoDrafts
from quire.core.engine import Engine
from quire.core.grammar_interface import NoGrammar
from quire.core.policy import Policy, chunked, continuous, fcfs, priority, static, whole
from quire.core.prefix_cache import HashPrefixCache, NoPrefixCache, PrefixMatch
from quire.core.request_limits import SchedulerLimits
from quire.core.scheduler import Scheduler
from quire.core.shares import Shares
from quire.core.snapshot_policy import SnapshotPolicy
from quire.core.snapshot_pool import SnapshotPool
from quire.core.snapshots import NoSnapshots
from quire.core.steplog import StepLog
from quire.core.waiting_queue import WaitingQueue
from quire.types import (
    NOT_FINITE,
    REJECTED,
    EngineRequest,
    KVGroup,
    RequestError,
    RequestFailure,
    SamplingParams,
    StepFailed,
    StepPlan,
    StepResult,
)
from quire.types.request_table import EXTRA, KNOWN

VOCAB, EOS = 23, 0


def chain(h: int, token: int) -> int:
    return hash((h, token))


def pick(h: int) -> int:
    """Return the next token after the prefix with hash `h`: this function is the model."""
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


def sampled_tokens(rows: list[list[int]]) -> np.ndarray:
    """Return the tokens of rows as a step's result has them."""
    most = max(map(len, rows), default=1)
    return np.array([row + [REJECTED] * (most - len(row)) for row in rows], np.int32).reshape(-1, most)


@dataclass
class FakeDevice:
    """An executor over plain dictionaries. Launched work runs when a handle is waited for."""

    block_size: int
    keeps_kv: bool
    groups: tuple[KVGroup, ...] = (KVGroup(),)
    stages: int = 1
    sampled_in: dict = field(default_factory=dict)  # by slot: the step in which it last sampled
    retired: int = -1  # the last step whose handle has been waited for
    queue: deque = field(default_factory=deque)
    kv: dict = field(default_factory=dict)
    columns: dict = field(default_factory=dict)
    hidden: dict = field(default_factory=dict)
    states: dict = field(default_factory=dict)  # by slot; every model keeps one, and some engines restore it
    snapshots: dict = field(default_factory=dict)
    has_states: bool = False
    plans: dict = field(default_factory=dict)
    failing: random.Random | None = None  # decides which launches run out of memory
    drafter: random.Random = field(default_factory=lambda: random.Random(0))  # decides which drafts are right

    def forward(self, plan: StepPlan) -> None:
        if self.failing and self.failing.random() < 0.06:
            self._fail(plan)
        for a in plan.admissions:
            self.sampled_in.pop(a.slot, None)
        for slot, samples in zip(plan.slots.tolist(), plan.samples.tolist()):
            last = self.sampled_in.get(slot, -1)
            assert last <= max(self.retired, plan.step - self.stages), "a stage lacks the input token"
            if samples:
                self.sampled_in[slot] = plan.step
        self.plans[plan.step] = plan
        self.queue.append(lambda: self._forward(plan))

    def sample(self, step: int, masks: object) -> Handle:
        handle = Handle(self)
        plan = self.plans.pop(step)
        if self.failing and self.failing.random() < 0.06:
            self._fail(plan)
        self.queue.append(lambda: handle.set(self._sample(plan)))
        return handle

    def close(self) -> None:
        self.queue.clear()

    def _fail(self, plan: StepPlan) -> None:
        """Queue, behind the steps in flight, the corruption of everything that a failing step may write."""

        def spoil() -> None:
            for a in plan.admissions:
                self.columns[a.slot] = dict(tokens=[-1], computed=99, blocks=[list(b) for b in a.blocks])
            for slot, group, _, block in plan.new_blocks.tolist():
                self.columns[slot]["blocks"][group].append(block)
            for slot, n, start in zip(plan.slots.tolist(), plan.num_tokens.tolist(), plan.starts.tolist()):
                for position in range(start, start + n):
                    for group in range(len(self.groups)):
                        self.kv[self._entry(self.columns[slot], group, position)] = "spoiled"
                self.states[slot] = "spoiled"
            for _, row in plan.saves:
                self.snapshots[row] = "spoiled"

        self.queue.append(spoil)
        raise StepFailed("no memory")

    def _forward(self, plan: StepPlan) -> None:
        for a in plan.admissions:
            blocks = [list(table) for table in a.blocks]
            self.columns[a.slot] = dict(tokens=list(a.tokens), computed=a.computed, blocks=blocks)
        for slot, group, index, block in plan.new_blocks.tolist():
            assert len(self.columns[slot]["blocks"][group]) == index
            self.columns[slot]["blocks"][group].append(block)
        for slot, row in plan.restores:
            self.states[slot] = self.snapshots[row]
        assert len(set(plan.slots.tolist())) == len(plan.slots), "a slot runs twice in one step"
        assert plan.num_tokens.sum() == plan.total_tokens
        hidden, writer, ends = {}, {}, {}
        for slot, n, drafts, bound in zip(
            plan.slots.tolist(), plan.num_tokens.tolist(), plan.num_drafts.tolist(), plan.starts.tolist()
        ):
            column = self.columns[slot]
            start = column["computed"]
            assert start <= bound, "the host knows of fewer tokens than the device"
            column["drafts"] = self._draft(column, drafts)
            known = column["tokens"] + column["drafts"]
            tokens, ends[slot] = known[start : start + n], known[: start + n]
            assert len(tokens) == n, "the device does not have the input tokens yet"
            assert not drafts or start + n == len(known), "the row does not reach its drafts"
            h, states = self._prefix(column, start), []
            assert not (self.has_states and start) or self.states[slot] == h, "a row has a wrong state"
            for position, token in enumerate(tokens, start):
                h = chain(h, token)
                states.append(h)
                for group in range(len(self.groups)):
                    entry = self._entry(column, group, position)
                    assert entry not in writer, "two rows write the same KV entry"
                    self.kv[entry], writer[entry] = (group, h), slot
            hidden[slot] = states[-1 - drafts :]
            self.states[slot] = states[-1]
        for slot, end in ends.items():
            column, h = self.columns[slot], -1
            for position, token in enumerate(end):
                h = chain(h, token)
                for number, group in enumerate(self.groups):
                    if group.window is not None and position <= column["computed"] - group.window:
                        continue  # behind the window of the row's first token
                    entry = self._entry(column, number, position)
                    assert self.kv.get(entry) == (number, h), "attention would read wrong KV"
                    assert writer.get(entry, slot) == slot, "a row reads what another row of its step writes"
        drafts_of = dict(zip(plan.slots.tolist(), plan.num_drafts.tolist()))
        for slot, row in plan.saves:
            assert not drafts_of[slot], "a snapshot may hold drafts that are rejected"
            self.snapshots[row] = self.states[slot]
        self.hidden[plan.step] = hidden

    def drafts(self) -> np.ndarray:
        """Run everything that is launched, and return the drafts of the newest step."""
        while self.queue:
            self.queue.popleft()()
        plan = self.plans[max(self.plans)]
        drafts = np.full((len(plan.slots), plan.max_drafts), -9, np.int32)
        for row, slot in enumerate(plan.slots.tolist()):
            own = self.columns[slot]["drafts"]
            drafts[row, : len(own)] = own
        return drafts

    def _draft(self, column: dict, count: int) -> list[int]:
        """Guess the next tokens, rightly in seven of ten cases."""
        h, drafts = self._prefix(column, len(column["tokens"])), []
        for _ in range(count):
            drafts.append(pick(h) if self.drafter.random() < 0.7 else self.drafter.randrange(VOCAB))
            h = chain(h, drafts[-1])
        return drafts

    def _entry(self, column: dict, group: int, position: int) -> tuple[int, int]:
        return column["blocks"][group][position // self.block_size], position % self.block_size

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
                drafts = column.pop("drafts")
                tokens = [pick(h) for h in hidden[slot]]
                accepted = 0
                while accepted < len(drafts) and drafts[accepted] == tokens[accepted]:
                    accepted += 1
                column["computed"] -= len(drafts) - accepted
                self.states[slot] = hidden[slot][accepted]
                column["tokens"] += tokens[: accepted + 1]
                out.append(tokens[: accepted + 1])
                if not self.keeps_kv:
                    column["computed"] = 0
        return StepResult(plan.step, sampled_tokens(out))


class Handle:
    is_timed = False

    def __init__(self, device: FakeDevice) -> None:
        self._device, self._result = device, None

    def set(self, result: StepResult) -> None:
        self._result = result

    def ready(self) -> bool:
        return self._result is not None

    def wait(self) -> StepResult:
        while self._result is None:
            self._device.queue.popleft()()
        self._device.retired = self._result.step
        return self._result


# By group: one group without a window, and mixtures of lifetimes.
WINDOWS = [(None,), (None,), (None, 5), (None, 3, 11), (7,), (1, 9), (None, None, 2)]


def make_engine(rng: random.Random | None = None, **fixed) -> tuple[Engine, int]:
    def choose(name, options):
        return fixed[name] if name in fixed else rng.choice(options)

    max_len = choose("max_len", [24, 40])
    layout = choose("layout", ["paged", "paged", "paged", "contiguous", "none"])
    block_size = choose("block_size", [1, 3, 4, 16]) if layout == "paged" else max_len
    windows = fixed.get("windows", (None,))
    if rng is not None and layout == "paged" and "windows" not in fixed:
        windows = rng.choice(WINDOWS)
    groups = tuple(KVGroup((), window) for window in windows)
    keeps = layout != "none"
    chunk = choose("chunk", [True, True, False]) and keeps
    budget = choose("budget", [1, 6, 9, 64]) if chunk else max(64, max_len)
    per_request = sum(group.most_blocks(max_len, budget, block_size) for group in groups)
    num_blocks = choose("num_blocks", [per_request, per_request + 3, 3 * per_request, 40 * per_request])
    stages = fixed.get("stages", 1) if rng is None or "stages" in fixed else rng.choice([1, 1, 2, 3])
    depth = max(stages, choose("depth", [1, 2, 2, 3, 4]))
    pool = BlockPool(num_blocks, choose("evictor", [LRU, FIFO])())
    caches = keeps and choose("prefix", [True, False])
    policy = Policy(
        order=choose("order", [fcfs, priority]),
        admits=choose("admits", [continuous, continuous, static]),
        chunk=chunked if chunk else whole,
    )
    mixed = choose("mixed", [1, 5, budget]) if chunk else budget
    limits = SchedulerLimits(
        choose("rows", [1, 3, 8]), budget, max_len, block_size, keeps, depth > 1, mixed, stages=stages
    )
    log = StepLog()
    rows = fixed.get("snapshots", rng.choice([None, None, 1, 2, 5, 40]) if rng else None)
    snapshots = NoSnapshots()
    if rows and caches:
        interval = choose("interval", [0, 2 * block_size, 6 * block_size])
        where = SnapshotPolicy(block_size, interval, choose("answers", [0, block_size, 3 * block_size]))
        snapshots = SnapshotPool(rows, block_size, type(pool.evictor)(), where)
    cache = NoPrefixCache(len(groups))
    if caches:
        cache = HashPrefixCache(pool, block_size, groups, snapshots=snapshots)
    blocks = Blocks(pool, cache, block_size, groups, budget, snapshots)
    scheduler = Scheduler(blocks, policy, limits, log, depth=fixed.get("drafts"))
    device = FakeDevice(block_size, keeps, groups, stages, has_states=bool(rows))
    return Engine(scheduler, device, NoGrammar(), depth, log, check_invariants=True), max_len


def random_requests(rng: random.Random, max_len: int) -> list[EngineRequest]:
    shared = [rng.randrange(1, VOCAB) for _ in range(16)]
    out = []
    for i in range(rng.randrange(1, 14)):
        prompt = shared[: rng.randrange(16)] if rng.random() < 0.6 else []
        prompt = prompt + [rng.randrange(1, VOCAB) for _ in range(rng.randrange(1, 7))]
        if out and rng.random() < 0.2:
            prompt = rng.choice(out).prompt  # then the whole prompt may be cached
        params = SamplingParams(max_tokens=rng.choice([None, *range(1, 13)]))
        params.min_tokens = rng.choice([0, 0, 2])
        stop = [EOS] if rng.random() < 0.8 else []
        out.append(EngineRequest(f"r{i}", prompt, params, stop, stop, priority=rng.randrange(3)))
    return out


def assign_clients(rng: random.Random, requests: list[EngineRequest]) -> None:
    """Distribute the requests over one to four clients of different weights."""
    names = "abcd"[: rng.choice([1, 1, 2, 3, 4])]
    weights = {name: rng.choice([0.3, 1.0, 1.0, 4.0]) for name in names}
    for request in requests:
        request.client = rng.choice(names)
        request.weight = weights[request.client]
        request.cache_salt = rng.choice(["", request.client])


class CountingShares(Shares):
    """Shares that count how often each request made room for one of another client."""

    counts: Counter[str]

    def claim(self, request, running, shortage, refs):
        found = super().claim(request, running, shortage, refs)
        for giver in found or ():
            assert giver.source.client != request.source.client
            assert giver.order.priority >= request.order.priority, "a more urgent request made room"
            self.counts[giver.id] += 1
        return found


class ChangingDepth(NoDrafts):
    """A depth that changes at random, for some requests always 0."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._most = self._rng.choice([0, 1, 2, 3, 7])

    def start(self, request) -> None:
        request.drafts = self._rng.choice([0, self._most])

    def end_step(self, record, rows) -> None:
        for request in rows:
            if request.drafts:
                request.drafts = self._rng.randint(1, self._most)


def serve_at_random(
    engine: Engine, todo: list[EngineRequest], rng: random.Random, arrivals: float, steps: int = 4000
) -> tuple[dict[str, EngineRequest], dict[str, list[int]], dict[str, str]]:
    """Serve requests that arrive with a probability of `arrivals` per step, some of which are aborted early.

    Returns:
        By name: the requests, their tokens, and why they ended.
    """
    added: dict[str, EngineRequest] = {}
    got: dict[str, list[int]] = {}
    ended: dict[str, str] = {}
    for step in range(steps):
        if todo and rng.random() < arrivals:
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
                failure = RequestFailure("no memory", internal=True)
                assert output.error == (failure if output.finish_reason == "error" else None)
        if not todo and not engine.has_work:
            break
    assert set(ended) == set(added), f"no final output for {set(added) - set(ended)}"
    return added, got, ended


def random_run(seed: int, fails: bool = False) -> Engine:
    rng = random.Random(seed)
    engine, max_len = make_engine(rng)
    snapshots = engine.scheduler.blocks.snapshots
    if engine.scheduler.limits.keeps_kv and not (snapshots.num_rows and snapshots.policy.answers):
        engine.scheduler.depth = ChangingDepth(seed)
    engine.executor.failing = random.Random(seed) if fails else None
    todo = random_requests(rng, max_len)
    assign_clients(random.Random(seed), todo)
    engine.scheduler.shares.__class__, engine.scheduler.shares.counts = CountingShares, Counter()
    added, got, ended = serve_at_random(engine, todo, rng, arrivals=0.5)
    for name, request in added.items():
        want = reference(request, max_len)
        if ended[name] in ("abort", "error"):
            assert got[name] == want[: len(got[name])]
        else:
            assert got[name] == want, (seed, name)
            stopped = want[-1] in request.stop_ids and len(want) >= request.params.min_tokens
            assert ended[name] == ("stop" if stopped else "length")
    for name, count in engine.scheduler.shares.counts.items():
        assert count <= 1 + len(got[name]) / shares.QUANTUM, f"{name} made room {count} times"
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks
    assert not len(engine.scheduler.life.table), "a request kept its row of the table"
    engine.ended = list(ended.values())
    return engine


@pytest.mark.parametrize("start", range(0, 2000, 250))
def test_random_loads_agree_with_sequential_decoding(start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    preempted = cached = yielded = accepted = rejected = 0
    for seed in range(start, start + 250):
        monkeypatch.setattr(shares, "QUANTUM", 1 + seed % 4)  # because outputs are short here
        totals = random_run(seed).log.totals
        preempted += totals.preemptions
        cached += totals.cached_tokens
        yielded += totals.yielded
        accepted += totals.accepted_tokens
        rejected += totals.draft_tokens - totals.accepted_tokens
    assert accepted > 300 and rejected > 300
    assert preempted and cached, "the load exercised neither preemption nor the prefix cache"
    assert yielded > 50, "clients seldom made room for each other"


def test_nobody_waits_for_ever_beside_endless_newcomers(monkeypatch: pytest.MonkeyPatch) -> None:
    """While other clients replace each request that ends, every request of one client still ends."""
    monkeypatch.setattr(shares, "QUANTUM", 4)
    for seed in range(40):
        rng = random.Random(seed)
        engine, max_len = make_engine(rng, order=fcfs, admits=continuous)
        budget = engine.scheduler.limits.max_num_batched_tokens
        if budget < 2 * engine.scheduler.limits.max_num_seqs:
            continue  # running requests fill every step with single tokens
        ended: set[str] = set()
        for number in range(4):
            engine.add(request(f"v{number}", [rng.randrange(1, VOCAB) for _ in range(9)], 8, client="victim"))
        for step in range(1500):
            if len(engine.scheduler.waiting) < 6:
                prompt = [rng.randrange(1, VOCAB) for _ in range(rng.randrange(1, max_len - 12))]
                engine.add(request(f"n{step}", prompt, rng.randrange(1, 12), client=rng.choice("ab")))
            ended |= {output.id for output in engine.step() if output.finish_reason}
            if {f"v{number}" for number in range(4)} <= ended:
                break
        else:
            raise AssertionError(f"seed {seed}: of the victim's requests only {ended} ended")


def test_a_step_without_memory_fails_its_requests_and_no_others() -> None:
    ends = [end for seed in range(400) for end in random_run(seed, fails=True).ended]
    assert ends.count("error") > 300 and ends.count("stop") + ends.count("length") > 300


def test_what_a_failed_step_published_is_forgotten() -> None:
    engine, _ = make_engine(**SMALL)
    engine.add(request("a", [5] * 10))
    while engine.has_work:
        engine.step()
    cached = engine.scheduler.pool.num_cached
    engine.add(request("b", [5] * 8 + [6] * 8))
    engine.add(request("c", [5] * 8 + [6] * 8))
    engine.executor.failing = random.Random()
    engine.executor.failing.random = lambda: 0.0
    ended = {output.id: output.error and output.error.message for output in engine.step()}
    assert ended == {"b": "no memory", "c": "no memory"}
    assert engine.scheduler.pool.num_cached == cached, "blocks that were never written can be found"
    engine.executor.failing = None
    engine.add(request("d", [5] * 8 + [6] * 8))
    assert drain(engine)["d"] == reference(request("d", [5] * 8 + [6] * 8), 40)


def test_freed_blocks_are_used_before_untouched_ones_and_cached_ones_last() -> None:
    """An untouched block takes new memory on a CPU, and evicting a cached one costs a later request its prefix."""
    pool = BlockPool(6, LRU())
    first = pool.take(3)
    pool.cached[first[0]] = 1
    pool.release(first)
    assert pool.take(2) == first[1:], "an untouched block was taken although a freed one was there"
    untouched = [block for block in range(6) if block not in first]
    assert sorted(pool.take(3)) == untouched, "a cached block was evicted although an untouched one was there"
    assert pool.take(1) == first[:1] and pool.evictions == 1


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


def test_equal_prompts_in_one_step_share_blocks() -> None:
    engine, _ = make_engine(**SMALL)
    for i in range(3):
        engine.add(request(f"r{i}", [5] * 10))
    engine.step()
    admitted = engine.log.last.admitted
    assert admitted == [("r0", 10, 0), ("r1", 10, 8), ("r2", 10, 8)]
    assert engine.scheduler.pool.num_blocks - engine.scheduler.pool.num_free == 2 + 3


def test_a_row_runs_a_step_after_the_row_that_writes_its_prefix() -> None:
    engine, _ = make_engine(**{**SMALL, "budget": 16})
    for i in range(3):
        engine.add(request(f"r{i}", [5] * 9 + [i] * i))
    engine.step()
    assert list(engine.log.last.rows) == [("r0", 0, 9)]
    assert [name for name, _, _ in engine.log.last.admitted] == ["r0", "r1", "r2"]
    engine.step()
    assert list(engine.log.last.rows) == [("r0", 9, 1), ("r1", 8, 2), ("r2", 8, 3)]


def test_requests_that_wait_for_their_prefix_take_no_more_than_the_budget() -> None:
    engine, _ = make_engine(**{**SMALL, "budget": 14})
    for i in range(4):
        engine.add(request(f"r{i}", [5] * 9 + [i] * i))
    engine.step()
    assert [name for name, _, _ in engine.log.last.admitted] == ["r0", "r1", "r2"]  # 9 + 2 + 3 tokens


def test_a_block_that_decoding_completes_is_read_in_the_next_step() -> None:
    engine, _ = make_engine(**{**SMALL, "depth": 1})
    first = request("first", [5] * 7, 3)
    answer = reference(first, 40)
    engine.add(first)
    engine.step()  # its first token is the eighth, which completes a block in the next step
    engine.add(request("second", [5] * 7 + answer[:2], 1))
    engine.step()
    assert list(engine.log.last.rows) == [("first", 7, 1)]
    assert engine.log.last.admitted == [("second", 9, 8)]
    engine.step()
    assert list(engine.log.last.rows) == [("first", 8, 1), ("second", 8, 1)]


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
    assert list(engine.log.last.rows) == [("short", 2, 1), ("long", 0, 7)]


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
    blocks = list(range(100))[::-1]  # the order of age differs from the order of ids
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
        engine.add(request("filler", [3] * 32, 1))  # needs 8 blocks, more than are blank
        drain(engine)
        hits = {}
        for name in sorted(prompts, key=lambda name: name != survivor):  # a miss evicts, so probe it last
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
        ([1] * 30, 10, "needs 10 KV blocks of 4 tokens .* holds 9 blocks"),
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
    engine.scheduler.requests["r"].tables[0].blocks.pop()
    with pytest.raises(AssertionError):
        engine.scheduler.check()


def test_plan_arrays_are_compact() -> None:
    engine, _ = make_engine(**SMALL)
    engine.add(request("r", [1] * 9))
    scheduled = engine.scheduler.schedule()
    assert scheduled is not None
    assert scheduled.plan.slots.dtype == np.int32 and scheduled.plan.samples.tolist() == [True]


# ------------------------------------------------------------- the simulation detects broken rules


def _break_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockPool, "share", lambda self, blocks: None)


def _break_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    original = HashPrefixCache.match

    def match(self: HashPrefixCache, request) -> PrefixMatch:
        request.append(0)  # as if the last token did not need to be computed
        try:
            return original(self, request)
        finally:
            request.tokens.pop()
            request.table.data[[KNOWN, EXTRA], request.row] -= 1

    monkeypatch.setattr(HashPrefixCache, "match", match)


def _break_readmission(monkeypatch: pytest.MonkeyPatch) -> None:
    original = WaitingQueue.by_turn

    def by_turn(self: WaitingQueue, running):
        for request in original(self, running):
            pending, request.pending = request.pending, 0  # as if nothing were in flight
            try:
                yield request
            finally:
                request.pending += pending

    monkeypatch.setattr(WaitingQueue, "by_turn", by_turn)


def _break_forgetting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockPool, "on_evict", lambda self, forget: None)


def _break_length_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    original = SchedulerLimits.full_length
    monkeypatch.setattr(
        SchedulerLimits, "full_length", lambda self, request, blocks: original(self, request, blocks) + 1
    )


def _break_preemption_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    original = HashPrefixCache.restart

    def restart(self: HashPrefixCache, request) -> None:
        original(self, request)
        request.names = [b"stale"] * 99

    monkeypatch.setattr(HashPrefixCache, "restart", restart)


def _break_publishing(monkeypatch: pytest.MonkeyPatch) -> None:
    original = HashPrefixCache.publish

    def publish(self: HashPrefixCache, requests, counts) -> tuple[int, ...]:
        original(self, requests, counts)
        return ()  # as if no request could find the block in this step

    monkeypatch.setattr(HashPrefixCache, "publish", publish)


def _break_release(monkeypatch: pytest.MonkeyPatch) -> None:
    original = BlockPool.release
    monkeypatch.setattr(BlockPool, "release", lambda self, blocks: original(self, blocks[1:]))


def _break_roll_back(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Scheduler.retire

    def retire(self: Scheduler, result: StepResult) -> None:
        before = {request: request.computed for request in self.running}
        original(self, result)
        for request in self.running:
            request.computed = before[request]

    monkeypatch.setattr(Scheduler, "retire", retire)


def _break_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedule a request again although the first stage of the pipeline does not have its token yet."""
    original = Scheduler.__init__

    def init(self: Scheduler, blocks, policy, limits, *args, **kwargs) -> None:
        original(self, blocks, policy, replace(limits, stages=1), *args, **kwargs)

    monkeypatch.setattr(Scheduler, "__init__", init)


def _break_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Release a block of each window too many."""
    original = Blocks.trim

    def trim(self: Blocks, request) -> None:
        request.computed += 1
        original(self, request)
        request.computed -= 1

    monkeypatch.setattr(Blocks, "trim", trim)


def _break_window_match(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count on blocks behind the end of a match that are no longer cached."""
    original = KVGroup.first_block
    monkeypatch.setattr(
        KVGroup,
        "first_block",
        lambda self, position, size: original(self, position, size) + bool(self.window),
    )


def _break_time_of_trimming(monkeypatch: pytest.MonkeyPatch) -> None:
    """Release blocks behind a window in the step that reads them."""
    original = Blocks.publish

    def publish(self: Blocks, requests, tokens):
        published = original(self, requests, tokens)
        self.trim_all(requests)
        return published

    monkeypatch.setattr(Blocks, "publish", publish)


def _break_time_of_restoring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore a snapshot in the step that saves it."""
    original = SnapshotPool.restore

    def restore(self: SnapshotPool, request, copies) -> bool:
        ready = original(self, request, copies)
        copies.restores |= copies.deferred
        copies.deferred = {}
        return ready

    monkeypatch.setattr(SnapshotPool, "restore", restore)


def _break_eviction_of_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save a snapshot over one that is still named."""
    original = SnapshotPool._take

    def take(self: SnapshotPool) -> int | None:
        row = next(iter(self._name_of), None)
        if row is None or row in self._saving:
            return original(self)
        return row

    monkeypatch.setattr(SnapshotPool, "_take", take)


def _break_release_of_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lose the rows of requests that end before their tokens are known."""

    def release(self: SnapshotPool, request) -> None:
        request.reserved_rows = []

    monkeypatch.setattr(SnapshotPool, "release", release)


@pytest.mark.parametrize(
    "rule",
    [
        _break_stages,
        _break_time_of_restoring,
        _break_eviction_of_snapshots,
        _break_release_of_snapshots,
        _break_window,
        _break_window_match,
        _break_time_of_trimming,
        _break_roll_back,
        _break_share,
        _break_last_token,
        _break_readmission,
        _break_forgetting,
        _break_length_limit,
        _break_preemption_reset,
        _break_publishing,
        _break_release,
    ],
)
def test_a_broken_rule_is_noticed(rule, monkeypatch: pytest.MonkeyPatch) -> None:
    rule(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017  an assertion, or a crash of the loop
        for seed in range(1000):
            random_run(seed)


@pytest.mark.parametrize("rule", ["withdraw", "withdraw snapshots", "retire first"])
def test_a_broken_rule_of_failed_steps_is_noticed(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if rule == "withdraw":
        monkeypatch.setattr(HashPrefixCache, "withdraw", lambda self, blocks: None)
    elif rule == "withdraw snapshots":
        monkeypatch.setattr(SnapshotPool, "withdraw", lambda self, copies: None)
    else:
        monkeypatch.setattr(Engine, "_give_up", lambda self, error: self.scheduler.fail(error))
    with pytest.raises(Exception):  # noqa: B017  an assertion, or a crash of the loop
        for seed in range(800, 1200):
            random_run(seed, fails=True)


def test_a_step_that_decodes_takes_few_chunks_however_short() -> None:
    """Each chunk has a cost of its own, so 64 tokens of budget are two chunks of 32, not sixteen of 4."""
    engine, _ = make_engine(
        max_len=40, layout="paged", block_size=4, num_blocks=1000, chunk=True, budget=96, depth=2, prefix=False,
        evictor=LRU, order=fcfs, admits=continuous, mixed=64, rows=32,
    )  # fmt: skip
    first = SamplingParams(max_tokens=20, ignore_eos=True)
    engine.add(EngineRequest("first", [1, 2], first))
    engine.step()
    for i in range(16):
        engine.add(EngineRequest(f"r{i}", [3, 4, 5, i + 1], SamplingParams(max_tokens=1)))
    while engine.has_work:
        engine.step()
    chunks = [sum(count > 1 for *_, count in record.rows) for record in engine.log]
    assert max(chunks) == 2 and sum(chunks) >= 16


def test_an_abort_is_counted_once() -> None:
    engine, _ = make_engine(random.Random(0), layout="paged")
    engine.add(EngineRequest("a", [1, 2], SamplingParams(max_tokens=20, ignore_eos=True)))
    engine.step()
    engine.abort("a")
    engine.abort("a")
    assert engine.log.totals.aborted == 1


# ---------------------------------------------------------------------------------------- drafts


def all_right(engine: Engine) -> None:
    """Let the device guess every draft token rightly."""
    engine.executor.drafter = random.Random()
    engine.executor.drafter.random = lambda: 0.0


def test_accepted_drafts_save_steps() -> None:
    steps = {}
    for depth in (0, 3):
        engine, _ = make_engine(**{**SMALL, "depth": 1}, drafts=FixedDepth(depth))
        all_right(engine)
        engine.add(request("r", [1, 2, 3], 17))
        assert drain(engine)["r"] == reference(request("r", [1, 2, 3], 17), 40)
        steps[depth] = engine.log.totals.steps
    assert steps == {0: 17, 3: 5}  # the prompt, and four steps of 1 + 3 tokens


def test_drafts_of_a_small_budget_are_dropped_before_tokens_of_other_requests() -> None:
    engine, _ = make_engine(**{**SMALL, "depth": 1, "budget": 4}, drafts=FixedDepth(7))
    engine.add(request("a", [1, 2], 9))
    engine.add(request("b", [3, 4], 9))
    engine.step()
    engine.step()
    assert [count for *_, count in engine.log.last.rows] == [3, 1]
    assert engine.log.last.drafts == 2


def test_drafts_without_blocks_are_dropped_before_a_request_is_preempted() -> None:
    engine, _ = make_engine(**{**SMALL, "depth": 1, "num_blocks": 5}, drafts=FixedDepth(7))
    for name in "ab":
        engine.add(request(name, [ord(name)] * 7, 9))
    got = drain(engine)
    assert [len(got[name]) for name in "ab"] == [9, 9]
    first = next(record for record in engine.log if record.preempted)
    assert first.drafts == 0 and engine.log.totals.draft_tokens


def test_a_request_ends_within_its_accepted_drafts() -> None:
    prompt = [1, 2, 3]
    want = reference(request("r", prompt, 12), 40)
    for tokens, stop in ((6, []), (12, [want[5]])):
        engine, _ = make_engine(**SMALL, drafts=FixedDepth(7))
        all_right(engine)
        engine.add(request("r", prompt, tokens, stop_ids=stop))
        assert drain(engine)["r"] == want[: want.index(stop[0]) + 1 if stop else tokens]
        assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks


def test_a_failure_after_accepted_drafts_keeps_their_tokens() -> None:
    engine, _ = make_engine(**{**SMALL, "depth": 1}, drafts=FixedDepth(3))
    all_right(engine)
    engine.add(request("r", [1, 2, 3], 12))
    first = engine.step()
    good = reference(request("r", [1, 2, 3], 12), 40)
    sample = engine.executor._sample

    def fail(plan: StepPlan) -> StepResult:
        return StepResult(plan.step, sampled_tokens([[*sample(plan).tokens[0, :2].tolist(), NOT_FINITE]]))

    engine.executor._sample = fail
    (output,) = engine.step()
    assert first[0].token_ids + output.token_ids == good[:3]
    assert output.finish_reason == "error" and "position 6 is not finite" in output.error.message
    assert engine.log.totals.generated_tokens == 3
