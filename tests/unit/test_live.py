"""The data of the live view: correct and bounded steps, requests and blocks, collected only for open viewers."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest

from fake_engine import FakeProcess
from quire.config import EngineConfig
from quire.core import live_state as live
from quire.core.block_pool import LRU, BlockPool
from quire.core.blocks import Blocks
from quire.core.engine import Engine
from quire.core.grammar_interface import NoGrammar
from quire.core.policy import Policy
from quire.core.prefix_cache import HashPrefixCache
from quire.core.request_limits import SchedulerLimits
from quire.core.scheduler import Scheduler
from quire.core.steplog import StepLog
from quire.frontend.client import ipc as msg
from quire.serve.async_engine import AsyncEngine
from quire.serve.http.auth import ANYONE, ApiClient
from quire.serve.http.errors import ApiError
from quire.serve.observe.live import LiveStream
from quire.serve.observe.live_view import KEPT_STEPS, LiveView, LiveViews
from quire.serve.replicas.replica_set import ReplicaSet
from quire.serve.settings import ServeConfig
from quire.types import EngineDead, EngineLive, EngineRequest, SamplingParams
from quire.worker.echo_executor import EchoExecutor

EOS = 0


def engine(max_num_seqs: int = 2, blocks: int = 100) -> Engine:
    pool = BlockPool(blocks, LRU())
    log = StepLog()
    limits = SchedulerLimits(max_num_seqs, 64, 256, 4)
    scheduler = Scheduler(Blocks(pool, HashPrefixCache(pool, 4), 4), Policy(), limits, log)
    return Engine(scheduler, EchoExecutor(100, EOS, frozenset({EOS})), NoGrammar(), 2, log)


def request(name: str, prompt: list[int], tokens: int = 40) -> EngineRequest:
    return EngineRequest(name, prompt, SamplingParams(max_tokens=tokens, ignore_eos=True), client="alpha")


def look(host: Engine, since: int = -1) -> EngineLive:
    return live.live_of(host, 0, since)


def as_json(body: bytes) -> list[dict]:
    return json.loads(body)


def cells(found: EngineLive) -> np.ndarray:
    return np.frombuffer(found.blocks, "<u2")


def test_an_engine_that_has_done_nothing() -> None:
    found = look(engine())
    assert found.steps == found.running == found.waiting == []
    assert (cells(found) == live.BLANK).all() and len(cells(found)) == 100


def test_requests_that_run_and_wait() -> None:
    host = engine()
    for i in range(5):
        host.add(request(f"r{i}", [10 + i] * 9))
    for _ in range(6):
        host.step()
    found = look(host)
    assert [r.id for r in found.running] == ["r0", "r1"]
    assert [(r.id, r.state) for r in found.waiting] == [("r2", "slots"), ("r3", "turn"), ("r4", "turn")]
    first = found.running[0]
    assert (first.state, first.prompt, first.limit, first.client) == ("decode", 9, 40, "alpha")
    assert first.generated > 0 and first.blocks == host.scheduler.running[0].num_blocks and first.slot == 0
    assert found.waiting[0].slot == -1 and found.waiting[0].blocks == 0
    msg.decode_to_client(msg.encode(msg.Live(found)))  # it can be encoded


def test_the_map_of_blocks_agrees_with_the_books() -> None:
    host = engine(max_num_seqs=4)
    start = list(range(1, 17))  # four blocks shared by all requests
    host.add(request("a", [*start, 50], 12))
    while host.has_work:
        host.step()
    for name in "bcd":
        host.add(request(name, [*start, ord(name)]))
    host.step()
    found, pool = look(host), host.scheduler.pool
    kinds = cells(found)
    for block in range(pool.num_blocks):
        holders = [i for i, r in enumerate(host.scheduler.running) if block in r.held_blocks()]
        if len(holders) > 1:
            expected = live.SHARED
        elif holders:
            expected = live.FIRST_OWNER + holders[0]
        else:
            expected = live.EVICTABLE if pool.cached[block] else live.BLANK
        assert kinds[block] == expected
    assert found.shared_blocks == 4 == np.count_nonzero(kinds == live.SHARED)
    assert np.count_nonzero(kinds == live.EVICTABLE) == pool.num_cached > 0


def test_a_client_sees_its_own_requests_only() -> None:
    host = engine(max_num_seqs=4)
    for i in range(9):
        one = request(f"r{i}", [10 + i] * 9)
        one.client = "beta" if i in (2, 7) else "alpha"
        host.add(one)
    for _ in range(6):
        host.step()
    found = live.live_of(host, 0, -1, "beta")
    mine = {r.id for r in (*found.running, *found.waiting)}
    assert mine == {"r2", "r7"} and {r.client for r in (*found.running, *found.waiting)} == {"beta"}
    load, others = found.stats.load, found.stats.others
    assert (load.running + load.waiting, others.running + others.waiting) == (2, 7)
    assert load.waiting_tokens == 9 * load.waiting and set(found.stats.served_tokens) == {"beta"}
    kinds, pool = cells(found), host.scheduler.pool
    for block in range(pool.num_blocks):
        holders = [r for r in host.scheduler.running if block in r.held_blocks()]
        if holders:
            own = holders[0].source.client == "beta"
            place = [r.id for r in found.running].index(holders[0].id) if own else 0
            assert kinds[block] == (live.FIRST_OWNER + place if own else live.OTHERS)
    everything = look(host)
    assert len(everything.running) + len(everything.waiting) == 9 and live.OTHERS not in cells(everything)


def test_many_blocks_become_fewer_cells() -> None:
    host = engine(blocks=5 * live.MAX_CELLS + 7)
    host.add(request("a", [5] * 9))
    host.step()
    found = look(host)
    assert found.blocks_per_cell == 6 and len(cells(found)) == -(-host.scheduler.pool.num_blocks // 6)
    assert set(cells(found).tolist()) == {live.BLANK, live.FIRST_OWNER}


def test_steps_by_kind_of_token() -> None:
    host = engine()
    host.add(request("a", [7] * 9, 8))
    while host.has_work:
        host.step()
    steps = look(host).steps
    assert [s.step for s in steps] == list(range(len(steps)))
    assert (steps[0].prefill, steps[0].decode, steps[0].admitted) == (9, 0, 1)
    assert all((s.prefill, s.decode, s.drafts) == (0, 1, 0) for s in steps[1:])
    assert all(s.took_s > 0 for s in steps)
    assert look(host, steps[-3].step).steps == steps[-2:] and look(host, steps[-1].step).steps == []


def test_steps_in_flight_are_not_told_yet() -> None:
    host = engine()
    host.add(request("a", [7] * 9))
    host.step()
    assert len(host.log) == 1 and look(host).steps == []  # the step is in flight
    host.step()
    assert [s.step for s in look(host).steps] == [0]


def test_it_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MAX_STEPS", 5)
    monkeypatch.setattr(live, "MAX_RUNNING", 3)
    monkeypatch.setattr(live, "MAX_WAITING", 2)
    host = engine(max_num_seqs=4)
    for i in range(12):
        host.add(request(f"r{i}", [i + 1] * 5))
    for _ in range(20):
        host.step()
    found = look(host)
    assert (len(found.steps), len(found.running), len(found.waiting)) == (5, 3, 2)
    assert found.stats.load.running == 4 and found.stats.load.waiting == 8


def test_looking_changes_nothing() -> None:
    host, other = engine(), engine()
    orders = []
    for each in (host, other):
        for i in range(7):
            each.add(request(f"r{i}", [i + 1] * (3 + i)))
        order = []
        while each.has_work:
            order += [output.id for output in each.step() if output.finish_reason]
            if each is host:
                look(each)
        orders.append(order)
    assert orders[0] == orders[1]


# ------------------------------------------------------------------------------- viewers


class Asked:
    """A fake engine that counts polls and returns prepared answers."""

    def __init__(self, host: Engine) -> None:
        self.host, self.count, self.dead = host, 0, False

    async def __call__(self, since: int) -> EngineLive:
        self.count += 1
        if self.dead:
            raise EngineDead("out of memory")
        if self.host.has_work:
            self.host.step()
        return look(self.host, since)


def started(tokens: int = 200) -> Asked:
    host = engine()
    host.add(request("a", [7] * 9, tokens))
    return Asked(host)


def test_nobody_looks_nobody_asks() -> None:
    async def scene() -> None:
        asked = started()
        view = LiveView(asked, interval_s=0.001)
        await asyncio.sleep(0.02)
        assert asked.count == 0
        seen = view.enter()
        await view.next_events(seen)
        view.leave()
        count = asked.count
        await asyncio.sleep(0.02)
        assert asked.count == count > 0 and view.viewers == 0

    asyncio.run(scene())


def test_many_look_at_the_price_of_one_and_each_step_comes_once() -> None:
    async def scene() -> None:
        asked = started(60)
        view = LiveView(asked, interval_s=0.001)

        async def viewer() -> list[int]:
            seen, found = view.enter(), []
            while not found or found[-1] < 55:
                (_, steps), (_, state) = await view.next_events(seen)
                found += [step["step"] for step in as_json(steps)]
                assert b'"steps":[]' in state
            view.leave()
            return found

        results = await asyncio.gather(*(viewer() for _ in range(8)))
        assert all(found == list(range(found[-1] + 1)) for found in results)
        assert asked.count < 80

    asyncio.run(scene())


def test_a_view_keeps_a_bounded_number_of_steps() -> None:
    async def scene() -> None:
        host = engine()
        host.add(request("a", [7] * 9, 10))
        host.step()
        host.step()
        state = look(host)
        steps = [replace(state.steps[0], step=number) for number in range(3 * KEPT_STEPS)]

        async def ask(since: int) -> EngineLive:
            return replace(state, steps=steps)

        view = LiveView(ask)
        (_, events), _ = await view.next_events(view.enter())
        numbers = [step["step"] for step in as_json(events)]
        assert numbers == list(range(2 * KEPT_STEPS, 3 * KEPT_STEPS))
        view.leave()

    asyncio.run(scene())


def test_a_slow_viewer_skips_states() -> None:
    async def scene() -> None:
        asked = started()
        view = LiveView(asked, interval_s=0.0001)
        seen = view.enter()
        await view.next_events(seen)
        async with asyncio.timeout(30):
            while asked.count < 10:
                await asyncio.sleep(0.001)
        (_, steps), _ = await view.next_events(seen)  # all missed steps at once
        assert len(as_json(steps)) > 5
        view.leave()

    asyncio.run(scene())


def test_nothing_new_is_no_news() -> None:
    async def scene() -> None:
        view = LiveView(Asked(engine()), interval_s=0.001)
        seen = view.enter()
        await view.next_events(seen)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await view.next_events(seen)
        view.leave()

    asyncio.run(scene())


def test_the_end_of_the_engine_and_of_the_server() -> None:
    async def scene() -> None:
        asked = started()
        view = LiveView(asked, interval_s=0.001)
        seen = view.enter()
        await view.next_events(seen)
        asked.dead = True
        with pytest.raises(ApiError, match="out of memory"):
            while True:
                await view.next_events(seen)
        other = LiveView(started(), interval_s=10)
        seen = other.enter()
        await other.next_events(seen)
        asyncio.get_running_loop().call_later(0.01, other.close)
        assert await other.next_events(seen) == []
        view.leave()
        other.leave()

    asyncio.run(scene())


def test_a_stream_ends_when_its_viewer_leaves_or_does_not_read() -> None:
    async def scene(leaves: bool, reads: bool) -> list[dict]:
        view = LiveView(started(), interval_s=0.001)
        sent: list[dict] = []

        async def receive() -> dict:
            while not (leaves and len(sent) > 5):
                await asyncio.sleep(0.001)
            return {"type": "http.disconnect"}

        async def send(message: dict) -> None:
            sent.append(message)
            if not reads and len(sent) > 2:
                await asyncio.sleep(60)

        async with asyncio.timeout(30):
            await LiveStream(view, slow_reader_timeout_s=0.1)({}, receive, send)
        assert view.viewers == 0
        return sent

    left = asyncio.run(scene(leaves=True, reads=True))
    assert len(left) > 5 and b"event: state" in left[-1]["body"]
    deaf = asyncio.run(scene(leaves=False, reads=False))
    assert len(deaf) == 3 and all(
        message.get("more_body", True) for message in deaf
    )  # the connection is closed


def test_an_answer_that_nobody_waits_for_any_more_is_not_the_next_ones() -> None:
    async def scene() -> None:
        process = FakeProcess()
        replicas = ReplicaSet(EngineConfig(), start=lambda number, secret: process)  # type: ignore[arg-type, return-value]
        server = AsyncEngine(EngineConfig(), ServeConfig(), replicas)
        await replicas.ready()
        replicas.listen(server)
        left, stays = asyncio.ensure_future(server.live(7)), asyncio.ensure_future(server.live(-1))
        await asyncio.sleep(0)
        left.cancel()
        answers = [look(engine()) for _ in range(2)]
        for answer in answers:
            process.answers.put_nowait(msg.Live(answer))
        assert await stays == answers[1]
        assert [one for one in process.asked if isinstance(one, msg.AskLive)] == [
            msg.AskLive(7),
            msg.AskLive(-1),
        ]

    asyncio.run(scene())


def test_each_client_looks_at_its_own() -> None:
    async def scene() -> None:
        asked: list[str | None] = []

        async def ask(since: int, owner: str | None) -> EngineLive:
            asked.append(owner)
            return look(engine())

        views = LiveViews(ask)
        anna, bert, ops, root = (
            ApiClient("anna"),
            ApiClient("bert"),
            ApiClient("ops", admin=True),
            ApiClient("root", admin=True),
        )
        assert views.of(anna) is views.of(ApiClient("anna")) is not views.of(bert)
        assert views.of(ops) is views.of(root) is views.of(ANYONE)
        seen = [(view, view.enter()) for view in map(views.of, (anna, anna, bert, ops))]
        for view, one in seen:
            await view.next_events(one)
        assert sorted(asked, key=str) == [None, "anna", "bert"]
        with pytest.raises(ApiError):  # the viewers of one client leave room for others
            for _ in range(1000):
                views.of(anna).enter()
        views.of(bert).enter()
        views.close()
        assert await views.of(anna).next_events(seen[0][1]) == []

    asyncio.run(scene())


def test_only_so_many_may_look() -> None:
    async def scene() -> None:
        view = LiveView(started())
        with pytest.raises(ApiError) as caught:
            for _ in range(1000):
                view.enter()
        assert caught.value.status == 503
        for _ in range(view.viewers):
            view.leave()

    asyncio.run(scene())
