"""Several engine processes behind one API process: routing, turns of clients, failures, sums."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from fake_engine import FakeProcess
from quire.config import EngineConfig
from quire.core.cache_journal import NameJournal
from quire.frontend.client import ipc as msg
from quire.frontend.client.channel import frame
from quire.frontend.client.replica_config import replica_config
from quire.frontend.output import OutputAssembler, RequestState
from quire.serve.replicas import replica_set
from quire.serve.replicas.job import EngineJob
from quire.serve.replicas.live_sum import LiveCursor, sum_live
from quire.serve.replicas.replica_set import ReplicaSet
from quire.serve.replicas.sums import add_totals, sum_figures
from quire.types import (
    EngineLive,
    EngineLoad,
    EngineOutput,
    EngineRequest,
    EngineStats,
    Figures,
    LiveRequest,
    LiveStep,
    SamplingParams,
    Totals,
)
from quire.types.block_names import SHORT_BYTES, NameChanges, split_names

SLOTS = 4


class Front:
    """A listener that keeps what it is told, with the text state that decides what may be retried."""

    def __init__(self, count: int, **settings: Any) -> None:
        self.processes: list[FakeProcess] = []  # also those that replaced others
        self.current: dict[int, FakeProcess] = {}
        self.outputs: list[EngineOutput] = []
        self.cause: str | None = None
        self.assembler = OutputAssembler()
        routing, sheds = settings.pop("routing", "prefix"), settings.pop("sheds", False)
        config = EngineConfig(data_parallel_size=count, **settings)
        self.set = ReplicaSet(config, routing, start=self._start, sheds=sheds)  # type: ignore[arg-type]

    def _start(self, number: int, secret: bytes = b"") -> FakeProcess:
        process = self.current[number] = FakeProcess(SLOTS)
        self.processes.append(process)
        return process

    def take_outputs(self, outputs: Sequence[EngineOutput], figures: Figures) -> None:
        self.outputs += outputs
        self.assembler.apply(outputs)

    def replicas_died(self, cause: str) -> None:
        self.cause = cause

    def submit(self, name: str, prompt: Sequence[int] = (1, 2, 3), n: int = 1, **fields: Any) -> EngineJob:
        ids = [name] if n == 1 else [f"{name}#{index}" for index in range(n)]
        requests = [EngineRequest(one, list(prompt), SamplingParams(), **fields) for one in ids]
        state = RequestState(name, None, requests, None)
        frames = b"".join(frame(msg.encode(msg.Add(request))) for request in requests)
        job = EngineJob(state, requests, frames, self.set.block_names(requests[0]))
        self.assembler.add(state)
        self.set.submit(job)
        return job

    def where(self, name: str) -> int:
        """Return the replica on which a request runs."""
        (found,) = [number for number, process in self.current.items() if name in process.added]
        return found


def play(count: int, scene: Callable[[Front], Awaitable[None]], **settings: Any) -> None:
    async def run() -> None:
        front = Front(count, **settings)
        await front.set.ready()
        front.set.listen(front)
        try:
            await scene(front)
        finally:
            await front.set.close()

    asyncio.run(run())


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_requests_go_where_their_prefix_is_cached_or_about_to_be() -> None:
    async def scene(front: Front) -> None:
        first, second = list(range(100, 228)), list(range(500, 628))
        front.submit("a", [*first, 1])
        front.submit("b", [*second, 1])
        assert front.where("a") != front.where("b"), "nothing is known, so load decides"
        front.submit("c", [*first, 2])  # its prefix is being computed
        assert front.where("c") == front.where("a")
        at = front.where("b")
        names = b"".join(front.set.block_names(EngineRequest("", [*second, 1], SamplingParams())))
        assert len(names) == 8 * SHORT_BYTES
        front.current[at].say(EngineOutput("b", [7], "length"), names=NameChanges(names))
        front.current[1 - at].finish("a", "c")
        await settle()
        front.submit("d", [*second, 3])
        assert front.where("d") == at
        front.current[at].say(EngineOutput("d", [7], "length"), names=NameChanges(b"", names))
        await settle()
        for number, name in enumerate("ef"):  # evicted, and the other one has had fewer requests
            front.submit(name, [*second, 4 + number])
        assert front.where("e") == front.where("f")

    play(2, scene)


@pytest.mark.parametrize("count", (1, 2))
def test_a_server_that_sheds_knows_how_much_of_a_prompt_is_cached(count: int) -> None:
    prompt = list(range(100, 229))

    async def scene(front: Front) -> None:
        names = front.set.block_names(EngineRequest("", prompt, SamplingParams()))
        assert len(names) == 8 and front.set.cached_tokens(names) == 0
        front.submit("a", prompt)
        assert front.set.cached_tokens(names) == 128, "it is being computed"
        at = front.where("a")
        front.current[at].finish("a")
        await settle()
        assert front.set.cached_tokens(names) == 0
        front.current[at].say(names=NameChanges(b"".join(names[:5])))
        await settle()
        assert front.set.cached_tokens(names) == 80
        scored = SamplingParams(prompt_logprobs=0)
        assert front.set.cached_tokens(front.set.block_names(EngineRequest("", prompt, scored))) == 0
        front.set.replicas[at].info.state_bytes = 8
        front.set.replicas[0].info.state_bytes = 8
        assert front.set.cached_tokens(names) == 0, "snapshots are not known"

    play(count, scene, sheds=True)


def test_a_burst_of_equal_prompts_counts_once() -> None:
    prompt = list(range(100, 229))

    async def scene(front: Front) -> None:
        for name in ("x", "y"):
            first = front.submit(name, n=2 * SLOTS, client="busy")
        early = EngineJob(first.state, [EngineRequest("", prompt, SamplingParams())], b"")
        early.names = front.set.block_names(early.requests[0])
        assert front.set.cached_tokens(early.names) == 0
        front.submit("a", prompt, client="busy")  # no replica has room, so it waits for its turn
        assert all("a" not in process.added for process in front.processes)
        early.expect_cached(front.set.cached_tokens(early.names))
        assert early.requests[0].likely_cached == 128 and early.frames
        front.set.abort(["a"])
        assert front.set.cached_tokens(early.names) == 0, "nobody computes it any more"

    play(2, scene, sheds=True)


def test_a_popular_prefix_spreads_when_its_replica_is_busy() -> None:
    async def scene(front: Front) -> None:
        prompt = list(range(1000))
        for number in range(2 * SLOTS):
            front.submit(f"r{number}", prompt)
        found = Counter(front.where(f"r{number}") for number in range(2 * SLOTS))
        assert sorted(found.values()) == [SLOTS - 1, SLOTS + 1], (
            "one has its slots and a refill, the other the rest"
        )

    play(2, scene)


def test_salts_keep_prefixes_apart() -> None:
    async def scene(front: Front) -> None:
        request = EngineRequest("", list(range(40)), SamplingParams())
        salted = EngineRequest("", list(range(40)), SamplingParams(), cache_salt="anna")
        assert not set(front.set.block_names(request)) & set(front.set.block_names(salted))
        scored = EngineRequest("", list(range(40)), SamplingParams(prompt_logprobs=1))
        assert front.set.block_names(scored) == []

    play(2, scene)


@pytest.mark.parametrize("routing", ["load", "round-robin"])
def test_other_routers_spread_requests_evenly(routing: str) -> None:
    async def scene(front: Front) -> None:
        for number in range(6):
            front.submit(f"r{number}", list(range(100)))
        assert [len(front.current[number].added) for number in range(3)] == [2, 2, 2]

    play(3, scene, routing=routing)


def test_answers_of_a_prompt_stay_together() -> None:
    async def scene(front: Front) -> None:
        front.submit("a", n=3)
        front.submit("b", n=2)
        assert sorted(map(len, (p.added for p in front.processes))) == [2, 3]

    play(2, scene)


def test_what_finds_no_room_waits_and_is_sent_in_turn() -> None:
    async def scene(front: Front) -> None:
        for number in range(14):
            front.submit(f"r{number}")
        room = 2 * (SLOTS + 1)
        assert front.set.num_held == 14 - room
        assert front.set.load.received == 0 and front.set.slots == 2 * SLOTS
        for process in front.processes:
            process.say()
        await settle()
        assert front.set.load.received == room
        front.set.abort(["r11"])  # one that waits here
        assert front.outputs == [EngineOutput("r11", [], "abort")] and front.set.num_held == 3
        at = front.where("r0")
        front.current[at].finish("r0")
        await settle()
        assert front.where("r10") == at
        front.set.abort(["r10", "r12"])
        assert front.current[at].aborted == ["r10"]

    play(2, scene)


def test_one_replica_gets_everything_at_once() -> None:
    async def scene(front: Front) -> None:
        for number in range(100):
            front.submit(f"r{number}", list(range(40)))
        assert len(front.processes[0].added) == 100 and front.set.num_held == 0

    play(1, scene)


def test_a_client_with_less_than_its_share_never_waits_here() -> None:
    async def scene(front: Front) -> None:
        for number in range(40):
            front.submit(f"flood{number}", client="flood")
        front.submit("other", client="other")
        assert front.where("other") in (0, 1)

    play(2, scene)


def test_clients_share_all_replicas_by_weight() -> None:
    """The flood prefers one replica, and still all clients finish requests in proportion to their weights."""
    weights = {"anna": 1.0, "bert": 1.0, "cleo": 2.0}
    random_source = random.Random(5)

    async def scene(front: Front) -> None:
        prompt = list(range(200))
        for number in range(300):
            for client, weight in weights.items():
                own = prompt if client == "anna" else [number] * 200
                front.submit(f"{client}-{number}", own, client=client, weight=weight)
        for _ in range(60):
            for process in front.processes:
                ended = {output.id for output in front.outputs}
                left = [name for name in process.added if name not in ended]
                process.finish(*random_source.sample(left, min(3, len(left))))
            await settle()
        done = Counter(output.id.split("-")[0] for output in front.outputs)
        share = {client: count / weights[client] for client, count in done.items()}
        assert max(share.values()) < 1.25 * min(share.values()), done

    play(2, scene)


def test_priorities_hold_over_all_replicas() -> None:
    async def scene(front: Front) -> None:
        for number in range(20):
            front.submit(f"low{number}", priority=5)
        front.submit("high", priority=-1)
        assert front.where("high") in (0, 1), "what goes behind it takes no room from it"
        front.submit("middle", priority=1)
        for name in ("high", "middle"):
            front.current[front.where(name)].finish(name)

    play(2, scene, scheduling_policy="priority")


def test_without_the_policy_priorities_have_no_effect() -> None:
    async def scene(front: Front) -> None:
        for number in range(20):
            front.submit(f"low{number}", priority=5)
        front.submit("high", priority=-1)
        assert front.set.num_held == 21 - 2 * (SLOTS + 1)

    play(2, scene)


def test_a_dead_replica_is_replaced_and_its_requests_are_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_set, "_FIRST_DELAY_S", 0.01)

    async def scene(front: Front) -> None:
        for number in range(6):
            front.submit(f"r{number}", n=2 if number == 0 else 1)
        at = front.where("r0#0")
        begun = next(name for name in front.current[at].added if "#" not in name)
        front.current[at].say(EngineOutput(begun, [5]))
        fresh = [name for name in front.current[at].added if name != begun]
        await settle()
        dead = front.current[at]
        dead.die()
        await settle()
        (lost,) = [output for output in front.outputs if output.error is not None]
        assert lost.id == begun and lost.error is not None and lost.error.internal
        assert "exit code -9" in lost.error.message and "its answer had begun" in lost.error.message
        assert lost.error.code == "replica_failed"
        other = front.current[1 - at]
        assert set(fresh) <= set(other.added) | {r.id for r in waiting(front)}
        assert front.cause is None and dead.closed
        for _ in range(200):
            if front.set.replicas[at].status == "serving":
                break
            await asyncio.sleep(0.01)
        replica = front.set.replicas[at]
        assert replica.restarts == 1 and replica.num_open == len(front.current[at].added)
        assert front.current[at] is not dead and front.set.num_held == 0
        front.submit("later", list(range(90)))
        assert front.where("later") == at
        # A request that ends two engines is not tried a third time.
        again = next(name for name in fresh if name in other.added)
        other.die("boom")
        await settle()
        assert [o.id for o in front.outputs if o.error and "a retry" in o.error.message].count(again) == 1

    play(2, scene)


def test_what_its_client_has_left_is_not_retried() -> None:
    async def scene(front: Front) -> None:
        front.submit("a")
        at = front.where("a")
        front.set.abort(["a"])
        front.current[at].die()
        await settle()
        assert front.outputs == [EngineOutput("a", [], "abort")]
        assert front.current[1 - at].added == [] and front.set.num_held == 0

    play(2, scene)


def test_delays_grow_while_starts_fail_and_shrink_after_long_service() -> None:
    replicas = ReplicaSet(EngineConfig(), start=lambda number, secret: FakeProcess())  # type: ignore[arg-type, return-value]
    (replica,) = replicas.replicas
    delays = []
    for served_s in (500.0, 0.0, 3.0, 0.0, 0.0, 0.0, 0.0, 0.0, 200.0):
        replica.served_s = served_s
        delays.append(replicas._delay_s(replica))
    assert delays == [1, 2, 4, 8, 16, 32, 60, 60, 1]


def waiting(front: Front) -> list[EngineRequest]:
    return [request for job in front.set._turns._waiting.values() for request in job.requests]


def test_the_last_replica_takes_the_server_along() -> None:
    async def scene(front: Front) -> None:
        front.submit("a")
        front.submit("b")
        for process in front.processes:
            process.die("it broke")
        await settle()
        assert front.cause is not None and "it broke" in front.cause

    play(2, scene)


def test_a_replica_that_does_not_start_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_set, "_FIRST_DELAY_S", 0.01)
    tries: list[int] = []

    async def scene(front: Front) -> None:
        start = front._start

        def fails_once(number: int) -> FakeProcess:
            process = start(number)
            tries.append(number)
            if len(tries) == 1:

                async def fail() -> Any:
                    raise MemoryError("no memory")

                process.ready = fail  # type: ignore[method-assign]
            return process

        front.set.replicas[0]._start = lambda: fails_once(0)  # type: ignore[assignment, return-value]
        front.current[0].die()
        for _ in range(300):
            if front.set.replicas[0].restarts == 2 and front.set.replicas[0].status == "serving":
                break
            await asyncio.sleep(0.01)
        assert tries == [0, 0] and front.set.replicas[0].status == "serving"

    play(2, scene)


def test_a_replica_that_hangs_is_killed_while_another_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_set, "_CHECK_S", 0.01)

    async def scene(front: Front) -> None:
        front.submit("a")
        at = front.where("a")
        dead = front.current[at]
        front.set.replicas[at].heartbeat.overdue_s = lambda: 9.0  # type: ignore[method-assign]
        assert front.set.replicas[at].health == "stalled" and front.set.silent_s() == 0
        for _ in range(100):
            if dead.closed:
                break
            await asyncio.sleep(0.01)
        assert front.current[1 - at].added == ["a"] and "it was killed" in (
            front.set.replicas[at].cause or ""
        )

    play(2, scene)


# -------------------------------------------------------------------------------------------- sums


def stats(running: int, generated: int, **served: int) -> EngineStats:
    totals = {"generated_tokens": generated, "accepted_at": [generated], "evictions": 1}
    return EngineStats(
        EngineLoad(3, running, 1, 10), EngineLoad(), None, 10, 6, 2, 16, totals, {"step": 1}, served
    )


def test_statistics_are_sums_also_over_a_replica_that_was_replaced() -> None:
    async def scene(front: Front) -> None:
        asked = asyncio.ensure_future(front.set.stats("anna"))
        await settle()
        for number, process in enumerate(front.processes):
            assert process.asked[-1] == msg.AskStats("anna")
            process.answers.put_nowait(msg.Stats(stats(number, 5, anna=2)))
        found = await asked
        assert (found.load.running, found.load.received, found.blocks, found.free_blocks) == (1, 6, 20, 12)
        assert found.totals["generated_tokens"] == 10 and found.served_tokens == {"anna": 4}

    play(2, scene)


def test_counters_go_on_after_a_restart() -> None:
    one = Totals(generated_tokens=3, accepted_at=[2, 1])
    assert add_totals(one, Totals(generated_tokens=4, accepted_at=[1])).accepted_at == [3, 1]
    both = sum_figures([Figures(time_s=1, free_blocks=3, totals=one), Figures()], [8, 8])
    assert both.free_blocks == 11 and both.totals == one


def step(number: int, time_s: float, running: int = 1) -> LiveStep:
    return LiveStep(number, time_s, 0, 1, 0, running, 0, 5, 0, 0, None, 0.1, 0, 0, 0, 0)


def live(owner: str, cells: Sequence[int], steps: list[LiveStep]) -> EngineLive:
    request = LiveRequest(owner, "", "decode", 0, 1.0, 3, 0, 3, 1, 5, 1, 0)
    blocks = b"".join(cell.to_bytes(2, "little") for cell in cells)
    totals = {"generated_tokens": 1, "accepted_at": [], "evictions": 0}
    found = EngineStats(EngineLoad(), EngineLoad(), None, 4, 4, 0, 16, totals, {}, {})
    return EngineLive(found, steps, [request], [], blocks, 1, 0)


def test_the_live_view_shows_replicas_side_by_side() -> None:
    cursor = LiveCursor(2)
    cursor.resume(-1)
    found = cursor.combine([(0, 0, [step(0, 1.0), step(1, 3.0)]), (1, 0, [step(0, 2.0, running=4)])])
    assert [(s.step, s.time_s, s.running) for s in found] == [(0, 1.0, 1), (1, 2.0, 5), (2, 3.0, 5)]
    cursor.resume(2)
    assert (cursor.since(0, 0), cursor.since(1, 0)) == (1, 0)
    assert cursor.since(1, 1) == -1, "its process was replaced after one step"
    (more,) = cursor.combine([(1, 1, [step(0, 4.0)])])
    assert more.step == 3
    both = sum_live([live("a", [4, 2], []), live("b", [0, 4], [])], found)
    assert [r.id for r in both.running] == ["a", "b"] and both.steps == found
    assert memoryview(both.blocks).cast("H").tolist() == [4, 2, 0, 5]


def test_the_live_view_of_one_replica_is_its_own() -> None:
    cursor = LiveCursor(1)
    cursor.resume(41)
    assert cursor.since(0, 0) == 41
    assert [s.step for s in cursor.combine([(0, 0, [step(600, 1.0), step(601, 2.0)])])] == [600, 601]


def test_a_journal_tells_each_change_once_and_few_at_a_time() -> None:
    journal, names = NameJournal(limit=3), [bytes([n]) * 16 for n in range(6)]
    known: set[bytes] = set()
    source = random.Random(1)
    truth: set[bytes] = set()
    for _ in range(500):
        name = source.choice(names)
        if name in truth:
            truth.remove(name)
            journal.remove(name)
        else:
            truth.add(name)
            journal.add(name)
        if source.random() < 0.3:
            changes = journal.take()
            assert len(changes.added + changes.removed) <= 3 * SHORT_BYTES
            known |= set(split_names(changes.added))
            known -= set(split_names(changes.removed))
    while (changes := journal.take()) != NameChanges():
        known |= set(split_names(changes.added))
        known -= set(split_names(changes.removed))
    assert known == {name[:SHORT_BYTES] for name in truth}


def test_each_replica_has_its_own_gpus() -> None:
    config = EngineConfig(data_parallel_size=2, tensor_parallel_size=2)
    assert replica_config(config, 0) is config
    assert replica_config(config, 1).device == "auto:2"
    on = EngineConfig(device="cuda:4", tensor_parallel_size=2, data_parallel_size=2)
    assert [replica_config(on, n).device for n in range(2)] == ["cuda:4", "cuda:6"]
    assert replica_config(EngineConfig(device="cpu", data_parallel_size=2), 1).device == "cpu"
