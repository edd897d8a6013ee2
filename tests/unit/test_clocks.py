"""The time of requests by phase: exact figures on a fake clock, and sums under random loads."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from test_scheduler import make_engine, random_requests

from quire.core.block_pool import LRU, BlockPool
from quire.core.blocks import Blocks
from quire.core.engine import Engine
from quire.core.grammar_interface import NoGrammar
from quire.core.policy import Policy
from quire.core.prefix_cache import HashPrefixCache
from quire.core.request_limits import SchedulerLimits
from quire.core.scheduler import Scheduler
from quire.core.stats import figures_of
from quire.core.steplog import StepLog
from quire.types import DeviceTimes, EngineRequest, SamplingParams, StepPlan, StepResult, Timing

DECODE_S, TOKEN_S = 1.0, 0.125  # duration of a decoding step, and of each prompt token


@dataclass
class Clock:
    now_s: float = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@dataclass
class Device:
    """An executor that takes DECODE_S for a step with decoding rows, and TOKEN_S for each token of a longer row."""

    clock: Clock
    plans: dict[int, StepPlan] = field(default_factory=dict)
    free_s: float = 0.0

    def forward(self, plan: StepPlan) -> None:
        self.plans[plan.step] = plan

    def sample(self, step: int, masks: object) -> Device.Handle:
        plan = self.plans.pop(step)
        longer = [n for n in plan.num_tokens.tolist() if n > 1]
        plain = DECODE_S if len(longer) < len(plan.slots) else 0.0
        begin_s = max(self.clock.now_s, self.free_s)
        self.free_s = begin_s + plain + TOKEN_S * sum(longer)
        return Device.Handle(
            self.clock, self.free_s, StepResult(step, np.full((int(plan.samples.sum()), 1), 7, np.int32))
        )

    def drafts(self) -> None:
        raise AssertionError("no step has drafts")

    def warm_up(self) -> bool:
        return False

    def close(self) -> None:
        pass

    @dataclass
    class Handle:
        is_timed = False
        clock: Clock
        ready_s: float
        result: StepResult

        def ready(self) -> bool:
            return self.clock.now_s >= self.ready_s

        def wait(self) -> StepResult:
            self.clock.now_s = max(self.clock.now_s, self.ready_s)
            return self.result


@pytest.fixture
def clock() -> Clock:
    return Clock()


def engine_on(clock: Clock, rows: int = 8, blocks: int = 100, depth: int = 1, budget: int = 64) -> Engine:
    pool, log = BlockPool(blocks, LRU()), StepLog(now=clock.monotonic)
    limits = SchedulerLimits(rows, budget, 100, 4)
    scheduler = Scheduler(Blocks(pool, HashPrefixCache(pool, 4), 4), Policy(), limits, log)
    return Engine(scheduler, Device(clock), NoGrammar(), depth, log, check_invariants=True)


def run(engine: Engine, steps: int = 1000) -> dict[str, Timing]:
    """Run at most `steps` steps. Return the timing of each request that ends."""
    found = {}
    for _ in range(steps):
        if not engine.has_work:
            break
        for output in engine.step():
            if output.finish_reason and output.timing:
                found[output.id] = output.timing
    return found


def ask(name: str, prompt: list[int], max_tokens: int) -> EngineRequest:
    return EngineRequest(name, prompt, SamplingParams(max_tokens=max_tokens))


def terms_s(timing: Timing) -> float:
    parts = (timing.prefill_s, timing.decode_s, timing.lost_s, timing.preempted_s, timing.recompute_s)
    return sum(timing.waited_s.values()) + sum(parts)


def test_a_request_alone(clock: Clock) -> None:
    engine = engine_on(clock)
    engine.add(ask("a", [1] * 16, 5))
    timing = run(engine)["a"]
    assert timing.prefill_s == 16 * TOKEN_S and timing.decode_s == 4 * DECODE_S
    assert timing.lost_s == timing.preempted_s == timing.recompute_s == 0 and not any(
        timing.waited_s.values()
    )
    assert timing.until_s - timing.arrival_s == terms_s(timing)
    assert (timing.cached_tokens, timing.prefix_end) == (0, "new")
    assert timing.first_token_s == timing.arrival_s + 16 * TOKEN_S


def test_a_step_that_ended_while_it_was_launched_takes_no_less_than_no_time(clock: Clock) -> None:
    """A launch that captures a graph outlasts its step, and the one in front is only asked for afterwards."""
    engine = engine_on(clock, depth=2)
    device = engine.executor
    assert isinstance(device, Device)
    sample = device.sample

    class LateHandle(Device.Handle):
        def wait(self) -> StepResult:
            self.clock.now_s += 1.0
            return super().wait()

    def slow(step: int, masks: object) -> Device.Handle:
        handle = sample(step, masks)
        clock.now_s += 50.0 * (step == 3)
        return LateHandle(handle.clock, handle.ready_s, handle.result)

    device.sample = slow  # type: ignore[method-assign]
    engine.add(ask("a", [1] * 16, 8))
    timing = run(engine)["a"]
    took_s = [record.took_s for record in engine.log.ended_since(0)]
    assert min(took_s) >= 0 and sum(took_s) == pytest.approx(clock.now_s - 1000.0)
    assert timing.until_s - timing.arrival_s == pytest.approx(terms_s(timing), abs=1e-9)


@pytest.mark.parametrize("depth", [1, 2])
def test_decoding_loses_time_to_the_prompts_of_others(clock: Clock, depth: int) -> None:
    engine = engine_on(clock, depth=depth)
    engine.add(ask("a", [1] * 16, 10))
    found = run(engine, 5)
    engine.add(ask("b", [2] * 32, 2))
    found |= run(engine)
    assert found["a"].lost_s == 32 * TOKEN_S and found["a"].decode_s == 9 * DECODE_S
    assert found["b"].lost_s == 0
    assert found["b"].prefill_s == 32 * TOKEN_S + DECODE_S  # the step also decoded
    for timing in found.values():
        assert timing.until_s - timing.arrival_s == pytest.approx(terms_s(timing), abs=1e-9)


def test_prompts_share_the_steps_they_are_in(clock: Clock) -> None:
    engine = engine_on(clock)
    engine.add(ask("a", [1] * 16, 1))
    engine.add(ask("b", [2] * 48, 1))
    found = run(engine)
    assert found["a"].prefill_s == 16 * TOKEN_S and found["a"].lost_s == 48 * TOKEN_S
    assert found["b"].prefill_s == 48 * TOKEN_S and found["b"].lost_s == 16 * TOKEN_S


def test_waiting_is_booked_by_cause(clock: Clock) -> None:
    engine = engine_on(clock, rows=1)
    engine.add(ask("a", [1] * 8, 5))
    engine.add(ask("b", [2] * 8, 2))
    found = run(engine)
    assert found["b"].waited_s == {"slots": 8 * TOKEN_S + 4 * DECODE_S}
    assert found["b"].prefill_s == 8 * TOKEN_S and found["b"].decode_s == DECODE_S
    tight = engine_on(clock, blocks=5)
    tight.add(ask("a", [1] * 16, 4))
    tight.add(ask("b", [2] * 16, 2))
    found = run(tight)
    assert found["b"].waited_s == {"blocks": 16 * TOKEN_S + 3 * DECODE_S}
    assert tight.log.totals.pressure == 1 and not tight.log.totals.preemptions


def test_a_request_that_a_step_in_flight_keeps_waiting(clock: Clock) -> None:
    engine = engine_on(clock, depth=2)
    engine.add(ask("a", [1] * 8, 9))
    run(engine, 4)
    engine.add(ask("b", [2] * 8, 1))  # while a decoding step of `a` is in flight
    timing = run(engine)["b"]
    assert timing.waited_s == {"step": DECODE_S} and timing.lost_s == 0


def test_preemption(clock: Clock) -> None:
    engine = engine_on(clock, blocks=8, depth=2)
    engine.add(ask("a", [1] * 12, 16))
    engine.add(ask("b", [2] * 12, 16))
    found = run(engine)
    a, b = found["a"], found["b"]
    assert (a.preemptions, b.preemptions) == (0, 1) and engine.log.totals.pressure >= 1
    assert b.preempted_s > 0 and b.recompute_s > 0 and 12 < b.recomputed_tokens + 12 <= 28
    for timing in (a, b):
        assert timing.until_s - timing.arrival_s == pytest.approx(terms_s(timing), abs=1e-9)
    assert a.preempted_s == a.recompute_s == 0


def test_why_the_prefix_ended(clock: Clock) -> None:
    engine = engine_on(clock, blocks=10)
    ends = {}
    for name, prompt in {
        "first": [1] * 17, "same": [1] * 17, "longer": [1] * 12 + [2] * 5, "filler": [3] * 37, "again": [1] * 17,
    }.items():  # fmt: skip
        engine.add(ask(name, prompt, 1))
        timing = run(engine)[name]
        ends[name] = timing.cached_tokens, timing.prefix_end
    assert ends["first"] == (0, "new") and ends["same"] == (16, "end")
    assert ends["longer"] == (12, "new") and ends["filler"] == (0, "new")
    assert ends["again"][0] < 16 and ends["again"][1] == "evicted"
    scored = ask("scored", [1] * 17, 1)
    scored.params.prompt_logprobs = 0
    pooled = ask("pooled", [1] * 17, 1)
    pooled.pooling = "mean"
    for request, reason in ((scored, "prompt_logprobs"), (pooled, "pooling")):
        engine.add(request)
        timing = run(engine)[request.id]
        assert (timing.cached_tokens, timing.prefix_end) == (0, reason)


def test_terms_add_up_under_random_loads() -> None:
    preempted = 0
    for seed in range(150):
        rng = random.Random(seed)
        engine, max_len = make_engine(rng)
        todo, reported, steps = random_requests(rng, max_len), 0, 0
        while todo or engine.has_work:
            if todo and rng.random() < 0.5:
                engine.add(todo.pop())
            for output in engine.step():
                if output.timing is None:
                    assert not output.finish_reason
                    continue
                timing = output.timing
                assert timing.until_s - timing.arrival_s == pytest.approx(terms_s(timing), abs=1e-6)
                assert all(value >= 0 for value in timing.waited_s.values()), timing
                assert min(timing.prefill_s, timing.decode_s, timing.lost_s, timing.recompute_s) >= 0, timing
                preempted += bool(output.finish_reason and timing.recompute_s)
            figures = figures_of(engine, reported)
            reported, steps = engine.log.ended, steps + len(figures.steps)
        assert steps == engine.log.totals.steps and engine.scheduler.clocks.held == 0
    assert preempted


@dataclass
class HostDevice(Device):
    """An executor that computes while it launches, as on a CPU."""

    def sample(self, step: int, masks: object) -> Device.Handle:
        handle = super().sample(step, masks)
        self.clock.now_s = handle.ready_s
        return handle


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_that_ends_while_it_is_launched_has_its_own_duration(clock: Clock, depth: int) -> None:
    """With overlap it is retired after the launch of the next one, whose duration is not its own."""
    engine = engine_on(clock, depth=depth)
    engine.executor = HostDevice(clock)
    engine.add(ask("a", [1] * 16, 5))
    run(engine)
    took_s = [record.took_s for record in engine.log]
    assert took_s[:5] == [16 * TOKEN_S, *[DECODE_S] * 4]


@dataclass
class TimedDevice(Device):
    """An executor with a clock of its own, whose step 3 is launched so slowly that nobody asks for step 2 meanwhile."""

    LAUNCH_S = 20.0

    def sample(self, step: int, masks: object) -> Device.Handle:
        queued_s, last_s = self.clock.now_s, self.free_s
        handle = super().sample(step, masks)
        if step == 3:
            self.clock.now_s += self.LAUNCH_S
            handle.ready_s = self.free_s = handle.ready_s + self.LAUNCH_S
        times = DeviceTimes(handle.ready_s - max(queued_s, last_s), handle.ready_s - last_s)
        handle.result.times = times
        return handle


def test_a_device_with_a_clock_says_how_long_its_steps_took(clock: Clock) -> None:
    """A step that is asked for late has its own duration, and idle time between two requests belongs to no step."""
    engine = engine_on(clock, depth=2)
    engine.executor = TimedDevice(clock)
    engine.add(ask("a", [1] * 16, 5))
    timing = run(engine)["a"]
    clock.now_s += 100.0
    engine.add(ask("b", [2] * 16, 2))
    run(engine)
    took_s = [record.took_s for record in engine.log.ended_since(0)]
    wanted_s = [16 * TOKEN_S, DECODE_S, DECODE_S, TimedDevice.LAUNCH_S + DECODE_S, DECODE_S]
    assert took_s[:5] == pytest.approx(wanted_s, abs=0.05)  # scheduling counts, in true time
    assert max(took_s[5:]) == pytest.approx(16 * TOKEN_S, abs=0.05)
    assert timing.until_s - timing.arrival_s == pytest.approx(terms_s(timing), abs=1e-9)
