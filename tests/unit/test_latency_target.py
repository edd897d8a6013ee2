"""Step times are learnt, chunks keep a latency target, and a simulation says which rate is sustained."""

from __future__ import annotations

import math
import random
from array import array
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quire.bench.capacity import CapacityPlanner, LatencyTargets, busy_seconds, engines_for
from quire.bench.learned_steps import LearnedSteps, UnevenSteps
from quire.bench.metrics import latencies_ms, percentile
from quire.bench.run import Run
from quire.bench.simulate import SimulatedClock, _engine, simulate
from quire.bench.step_padding import NoPadding
from quire.cli.plan import _targets
from quire.config import EngineConfig
from quire.core.prompt_budget import LatencyBudget
from quire.core.step_time import StepLoad, StepTimeModel, load_of
from quire.core.steplog import AdmissionRecord, RecordedRows, StepRecord
from quire.serve.settings import PREFILL_SLOWDOWN, served_config
from quire.types import (
    ConfigError,
    EngineInfo,
    EngineRequest,
    Request,
    RequestOrder,
    RequestTargets,
    SamplingParams,
    Totals,
)


class Device:
    """A device whose steps take a known time, with noise of a few percent."""

    def __init__(self, noise: float = 0.02, seed: int = 0) -> None:
        self._r, self._noise = random.Random(seed), noise

    def launch_s(self, load: StepLoad) -> float:
        return 0.0

    def predict(self, load: StepLoad) -> float:
        exact = 2e-3 + 2e-5 * load.rows + 1e-5 * load.context
        if load.prompt_tokens:
            exact += 1e-3 + 3e-5 * load.prompt_tokens + 2e-5 * load.prompt_context
        return exact * (1 + self._noise * abs(self._r.gauss(0, 1)))

    def ratios(self, load: StepLoad) -> np.ndarray:
        return np.ones(1)


INFO = EngineInfo(
    model="m", family="f", vocab_size=1000, max_model_len=4096, eos_ids=[], device="cpu", dtype="float32",
    attention="none", max_num_seqs=64, max_num_batched_tokens=2048, num_blocks=8192, block_size=16, block_bytes=1,
    weight_bytes=1, num_parameters=1,
)  # fmt: skip


def request(length: int = 8, due_s: float = math.inf, **targets: float) -> Request:
    """A request with targets in seconds, of which nothing is computed yet."""
    source = EngineRequest("r", [1] * length, SamplingParams(), targets=RequestTargets(**targets))
    order = RequestOrder(0, due_s, 0)
    return Request(
        "r",
        length,
        array("i", source.prompt),
        source.params,
        order,
        99_999,
        frozenset(),
        frozenset(),
        0,
        source,
    )


def learnt(budget: LatencyBudget, device: Device, rows: int = 32) -> LatencyBudget:
    """Let a budget see steps of `device` with `rows` decoding rows, with prompts and without."""
    for step in range(400):
        tokens = 500 + 37 * (step % 40) if step % 2 else 0
        done = [(f"{row}", 100 + step, 1) for row in range(rows)] + [("p", 0, tokens)] * bool(tokens)
        record = StepRecord(step, 0.0, RecordedRows.of(done), [], [], rows, 0, None, 9, prompt_tokens=tokens)
        record.took_s = device.predict(load_of(record))
        budget.end_step(record)
    return budget


def load(count: int, rate: float, seed: int = 0) -> tuple[list[tuple[list[int], int]], list[float]]:
    """Short requests that stream, and long prompts that would stop them."""
    r, at, work, times = random.Random(seed), 0.0, [], []
    for index in range(count):
        length, answer = (2000, 16) if index % 4 == 0 else (64, 150)
        work.append(([r.randrange(1000) for _ in range(length)], answer))
        at += r.expovariate(rate)
        times.append(at)
    return work, times


def run(rate: float = 20.0, **settings: Any) -> tuple[Run, float, float]:
    config = EngineConfig(model="m", max_num_seqs=64, max_num_batched_tokens=2048, **settings)
    done = simulate(config, INFO, Device(), *load(160, rate))  # type: ignore[arg-type]
    found = latencies_ms(done)
    return done, percentile(found["itl"], 99), percentile(found["ttft"], 50)


def test_the_fit_predicts_steps_that_it_has_not_seen() -> None:
    device, model, r = Device(noise=0.0), StepTimeModel(), random.Random(3)

    def some(prompt: bool) -> StepLoad:
        rows, tokens = r.randrange(1, 60), r.randrange(2, 2000) if prompt else 0
        return StepLoad(rows, rows * r.random(), tokens, tokens * r.random())

    assert model.predict(some(True)) is None and not model.is_ready
    for index in range(600):
        one = some(index % 2 == 0)
        # Some steps take a hundred times as long: they compiled a kernel.
        model.observe(one, device.predict(one) * (100 if index % 40 == 7 else 1))
    assert model.is_ready
    for prompt in (False, True) * 20:
        one = some(prompt)
        assert model.predict(one) == pytest.approx(device.predict(one), rel=0.03)
    rows = StepLoad(10, 3.0, 0, 0.0)
    tokens = model.prompt_tokens_within(rows, 20e-3, context=0.5)
    assert tokens is not None
    step = StepLoad(10, 3.0, round(tokens), tokens * (0.5 + tokens / 2e3))
    assert device.predict(step) == pytest.approx(20e-3, rel=0.05)
    assert model.prompt_tokens_within(rows, 1e-3, context=0.5) < 0  # type: ignore[operator]


def test_the_prediction_is_the_mean_of_uneven_steps() -> None:
    model, load, r = StepTimeModel(), StepLoad(0, 0.0, 64, 2.0), random.Random(5)
    times = [r.choice((4e-3, 16e-3)) for _ in range(200)]
    for one in times:
        model.observe(load, one)
    assert model.predict(load) == pytest.approx(sum(times) / len(times), rel=0.03)


def test_the_rate_of_prompts_is_that_of_the_contexts_that_were_seen() -> None:
    device, budget = Device(noise=0.0), LatencyBudget(512, RequestTargets(ttft_s=1.0))
    took_s = 0.0
    for step in range(64):  # prompts of 16 chunks
        start = 512 * (step % 16)
        record = StepRecord(
            step, 0.0, RecordedRows.of([("a", start, 512)]), [], [], 1, 0, None, 9, prompt_tokens=512
        )
        record.took_s = device.predict(load_of(record)) + 1e-6 * start
        took_s += record.took_s
        budget.end_step(record)
    assert budget.rate == pytest.approx(64 * 512 / took_s, rel=0.1)


def test_the_load_of_a_step() -> None:
    record = StepRecord(
        0, 0.0, RecordedRows.of([("a", 99, 1), ("b", 0, 4)]), [], [], 2, 0, None, 9, prompt_tokens=4
    )
    assert load_of(record) == StepLoad(1, 0.1, 4, 0.008)
    record = StepRecord(0, 0.0, RecordedRows.of([("a", 96, 4)]), [], [], 1, 0, None, 9, drafts=3)
    assert load_of(record) == StepLoad(4, 0.1, 0, 0.0), "drafts are no prompt"


def test_a_target_is_kept_at_a_higher_rate_than_small_chunks_allow() -> None:
    _, free_itl, _ = run(mixed_prefill_tokens=2048)
    assert free_itl > 40, "a whole prompt in a step would miss the target"
    for target in (8.0, 16.0, 30.0):
        done, itl, ttft = run(target_itl=target)
        assert itl <= target
        _, small_itl, small_ttft = run(mixed_prefill_tokens=32)
        assert small_itl <= target and ttft < small_ttft, "larger chunks start prompts sooner"
        predicted = [abs(one.predicted_s / one.took_s - 1) for one in done.steps if one.predicted_s]
        assert percentile(predicted, 50) < 0.05
        # The target is used: the steps with prompts are not much shorter.
        mixed = [one.took_s * 1e3 for one in done.steps if one.prompt_tokens and len(one.rows) > 4]
        assert percentile(mixed, 90) > 0.75 * target


def test_prompts_go_on_if_the_target_cannot_be_met() -> None:
    done, itl, _ = run(target_itl=0.5)
    assert itl > 0.5 and all(one.output_len in (16, 150) for one in done.served)


def test_chunks_grow_only_as_far_as_the_fit_has_seen() -> None:
    budget, streams, prompt = LatencyBudget(8192, RequestTargets(1.0)), [request()], request(length=10_000)
    assert budget.tokens(np.array([5]), streams, prompt, 0, 0.0) == 64, "nothing is known yet"
    for step in range(40):
        tokens = 64 + step % 3
        rows = RecordedRows.of([("a", 9, 1), ("b", 0, tokens)])
        budget.end_step(StepRecord(step, 0.0, rows, [], [], 2, 0, None, 9, prompt_tokens=tokens, took_s=1e-3))
    assert 64 < budget.tokens(np.array([10]), streams, prompt, 0, 0.0) <= 132, (
        "a second has room for more, but no such chunk has been timed"
    )


@pytest.mark.parametrize("factor", [0.02, 50.0])
def test_one_step_of_another_time_does_not_bend_the_fit(factor: float) -> None:
    """Its host was busy: it noticed the end late, and that of the next step at once."""
    device, model, r = Device(noise=0.0), StepTimeModel(), random.Random(9)
    for index in range(200):
        rows, tokens = r.randrange(1, 100), r.randrange(16, 1500)
        one = StepLoad(rows, rows * 0.9, tokens, tokens * r.random())
        model.observe(one, device.predict(one) * (factor if index == 150 else 1.0))
    fit = StepLoad(50, 45.0, 1000, 300.0)
    assert model.predict(fit) == pytest.approx(device.predict(fit), rel=0.02)


def test_a_chunk_of_several_prompts_is_longer_than_one_of_one_prompt() -> None:
    """A token reads the tokens in front of it in its own prompt only."""
    device, model, r = Device(noise=0.0), StepTimeModel(), random.Random(7)
    for _ in range(200):
        tokens = r.randrange(64, 2000)
        model.observe(one := StepLoad(8, 1.0, tokens, tokens * r.random()), device.predict(one))
    rows = StepLoad(8, 1.0, 0, 0.0)
    whole = model.prompt_tokens_within(rows, 60e-3, context=0.0)
    short = model.prompt_tokens_within(rows, 60e-3, context=0.0, length=200, reach=0.1)
    assert whole is not None and short is not None and short > 1.2 * whole
    assert device.predict(StepLoad(8, 1.0, round(whole), whole * whole / 2e3)) == pytest.approx(
        60e-3, rel=0.03
    )
    assert device.predict(StepLoad(8, 1.0, round(short), short * 0.1)) == pytest.approx(60e-3, rel=0.03)
    tail = model.prompt_tokens_within(rows, 60e-3, context=0.5, length=10, reach=0.3)
    assert tail is not None and whole < tail < short
    assert model.prompt_tokens_within(rows, 60e-3, context=0.0, length=5000) == whole


def test_a_new_number_of_rows_shows_once_how_long_it_takes_alone() -> None:
    device, prompt = Device(noise=0.0), request(length=4000)
    budget = LatencyBudget(8192, RequestTargets(), slowdown=4.0)

    def ran(rows: int, tokens: int) -> None:
        done = [(f"{row}", 100, 1) for row in range(rows)] + [("p", 0, tokens)] * bool(tokens)
        record = StepRecord(0, 0.0, RecordedRows.of(done), [], [], rows, 0, None, 9, prompt_tokens=tokens)
        record.took_s = device.predict(load_of(record))
        budget.end_step(record)

    def asked(rows: int) -> int:
        return budget.tokens(np.full(rows, 100), [request()] * rows, prompt, 0, 0.0)

    assert asked(12) > 0, "prompts come first"
    ran(0, 4000)
    assert asked(12) == 0, "one prompt has shown how fast they are"
    assert asked(12) > 0, "once, also before that step has ended"
    ran(12, 0)
    assert asked(12) > 0 and asked(15) > 0
    assert asked(40) == 0, "another power of two"
    assert asked(40) > 0
    fixed = learnt(LatencyBudget(8192, RequestTargets(0.04)), device)
    assert fixed.tokens(np.full(5, 9), [request()] * 5, prompt, 0, 0.0) > 0, "a target needs no probes"


def test_the_first_chunks_follow_from_one_prompt_and_one_step_without() -> None:
    """A burst on a new server begins with chunks that are near the limit, not with the shortest ones."""
    device, prompt = Device(noise=0.0), request(length=40_000)
    budget = LatencyBudget(8192, RequestTargets(), slowdown=4.0)
    lengths, streams = np.full(12, 100), [request()] * 12
    assert budget.tokens(lengths, streams, prompt, 0, 0.0) == 64
    plain = StepLoad(12, 1.2, 0, 0.0)
    for load in (StepLoad(0, 0.0, 4000, 1000.0), plain):
        done = [(f"{row}", 99, 1) for row in range(load.rows)] + [("p", 0, 4000)] * (not load.rows)
        record = StepRecord(
            0, 0.0, RecordedRows.of(done), [], [], 12, 0, None, 9, prompt_tokens=load.prompt_tokens
        )
        record.took_s = device.predict(load)
        budget.end_step(record)
    tokens = budget.tokens(lengths, streams, prompt, 200, 0.0)
    took_s, limit_s = device.predict(StepLoad(12, 1.2, tokens, tokens**2 / 2e3)), 4 * device.predict(plain)
    assert tokens > 64 and 0.5 * limit_s < took_s < limit_s


def test_a_burst_is_limited_by_the_steps_to_come() -> None:
    """While nearly all tokens are still to come, their steps decide which latency is even."""

    class Slower(Device):
        def predict(self, load: StepLoad) -> float:
            return super().predict(load) + 1e-4 * load.rows

    def chunk(coming: int, length: int = 400, finished: int = 0) -> int:
        totals = Totals(finished=finished, generated_tokens=20 * finished)
        budget, device = LatencyBudget(8192, RequestTargets(), 4.0, totals=totals), Slower(noise=0.0)
        for rows in (8, 16, 32):
            for tokens in (0, 200, 500, 1000):
                done = [(f"{row}", 100, 1) for row in range(rows)] + [("p", 0, tokens)] * bool(tokens)
                record = StepRecord(
                    0, 0.0, RecordedRows.of(done), [], [], rows, 0, None, 9, prompt_tokens=tokens
                )
                record.took_s = device.predict(load_of(record))
                budget.end_step(record)
        return budget.tokens(np.full(32, 100), [request()] * 32, request(length=length), coming, 0.0)

    alone, burst = chunk(0), chunk(200)
    took_s = Slower(noise=0.0).predict(StepLoad(232, 23.2, 0, 0.0))
    assert burst > 2 * alone
    assert Slower(noise=0.0).predict(StepLoad(32, 3.2, burst, burst * 0.2)) < 4.2 * took_s
    assert chunk(200, finished=100, length=40_000) == chunk(0, length=40_000), (
        "their answers are short: few decode at once"
    )
    assert alone < chunk(200, finished=100) < burst


def test_the_default_keeps_a_burst_even_for_little_of_its_throughput() -> None:
    class Large(Device):
        def predict(self, load: StepLoad) -> float:
            return super().predict(load) + 6e-3 + 5e-5 * load.rows

    work, found = [([1 + index] * 400, 200) for index in range(64)], []
    for slowdown in (None, PREFILL_SLOWDOWN):
        config = EngineConfig(
            model="m", max_num_seqs=64, max_num_batched_tokens=4096, prefill_slowdown=slowdown
        )
        info = replace(INFO, device="cuda", max_num_batched_tokens=4096)
        done = simulate(config, info, Large(), work, [0.0] * 64)  # type: ignore[arg-type]
        itl = latencies_ms(done)["itl"]
        found.append((done.duration_s, percentile(itl, 99) / percentile(itl, 50)))
    (free_s, uneven), (even_s, even) = found
    assert uneven > 8
    assert even < 4
    assert even_s < 1.09 * free_s  # 1.11 if the limit followed the rows of the moment


def test_chunks_fill_steps_of_common_sizes() -> None:
    budget = LatencyBudget(8192, RequestTargets(), sizes=(64, 128, 256, 512, 1024))
    for rows, tokens, filling in (
        (20, 500, 492),  # 520 tokens fill 512
        (20, 492, 492),
        (20, 700, 492),  # less than a third is left out
        (20, 900, 900),  # more would be
        (400, 115, 112),
        (400, 300, 300),  # 512 leaves out two thirds
        (20, 40, 40),  # below the smallest size
        (20, 3000, 3000),  # beyond the largest one nothing is padded
    ):
        assert budget.filling(rows, tokens) == filling, (rows, tokens)
    assert LatencyBudget(8192, RequestTargets()).filling(20, 500) == 500, "nothing is padded"


def test_captures_do_not_shorten_chunks() -> None:
    device, model = Device(), StepTimeModel()
    for index in range(250):
        load = StepLoad(8, 1.0, 300 + 7 * (index % 40), 100.0)
        model.observe(load, device.predict(load) * (3.0 if index % 40 == 11 else 1.0))
    tokens = model.prompt_tokens_within(StepLoad(8, 1.0, 0, 0.0), 20e-3, context=0.0)
    assert tokens is not None
    longest_s = device.predict(StepLoad(8, 1.0, round(tokens), 0.0))
    assert 0.7 * 20e-3 < longest_s < 20e-3


def test_a_slowdown_is_relative_to_decoding_and_yields_to_a_first_token_that_is_due() -> None:
    device = Device(noise=0.0)
    budget, streams = learnt(LatencyBudget(8192, RequestTargets(), slowdown=4.0), device), [request()] * 32
    lengths = np.full(32, 200)
    plain_s = device.predict(StepLoad(32, 6.4, 0, 0.0))
    tokens = budget.tokens(lengths, streams, request(length=4000), 0, 0.0)
    took_s = device.predict(StepLoad(32, 6.4, tokens, tokens**2 / 2e3))
    assert took_s == pytest.approx(4 * plain_s, rel=0.1)
    patient = request(length=4000, due_s=10.0, ttft_s=10.0)
    assert budget.tokens(lengths, streams, patient, 0, 0.0) == tokens, "it is not urgent"
    assert budget.tokens(lengths, streams, patient, 0, 9.99) == 8192, "it would miss its target"
    assert budget.tokens(lengths, streams, None, 0, 0.0) == 8192
    plain = request(length=4000, due_s=10.0)
    assert budget.tokens(lengths, streams, plain, 0, 9.99) == tokens, "it has no target"
    budget = learnt(LatencyBudget(8192, RequestTargets(ttft_s=10.0), slowdown=4.0), device)
    assert budget.tokens(lengths, streams, plain, 0, 0.0) == tokens
    assert budget.tokens(lengths, streams, plain, 0, 9.99) == 8192, "the engine's target is its own"


def test_the_target_of_one_request_leaves_prompts_half_of_the_time() -> None:
    device = Device(noise=0.0)
    budget, prompt = learnt(LatencyBudget(8192, RequestTargets(0.040)), device), request(length=4000)
    lengths, others = np.full(32, 200), [request()] * 31
    plain_s = device.predict(StepLoad(32, 6.4, 0, 0.0))

    def took_s(**targets: float) -> float:
        tokens = budget.tokens(lengths, [*others, request(**targets)], prompt, 0, 0.0)
        return device.predict(StepLoad(32, 6.4, tokens, tokens**2 / 2e3))

    assert took_s() == pytest.approx(0.040, rel=0.1)
    assert took_s(itl_s=0.020) == pytest.approx(0.020, rel=0.1)
    assert took_s(itl_s=1e-4) == pytest.approx(2 * plain_s, rel=0.1), "others' prompts go on"
    assert took_s(itl_s=1.0) == pytest.approx(0.040, rel=0.1), "the other rows have the engine's target"
    alone = budget.tokens(np.array([200]), [request(itl_s=1.0)], prompt, 0, 0.0)
    assert alone > budget.tokens(np.array([200]), [request()], prompt, 0, 0.0), (
        "a longer target of its own counts instead"
    )


def test_no_more_requests_run_than_decode_within_the_target() -> None:
    class Slow(Device):
        def predict(self, load: StepLoad) -> float:
            return super().predict(load) + 1e-3 * load.rows

    for target, most in ((12.0, 9), (30.0, 27)):
        config = EngineConfig(model="m", max_num_seqs=64, max_num_batched_tokens=2048, target_itl=target)
        work = [([1 + index % 7] * 20, 100) for index in range(60)]
        done = simulate(config, INFO, Slow(noise=0.0), work, [0.02 * index for index in range(60)])  # type: ignore[arg-type]
        late = [step for step in done.steps if step.step > 100]
        assert max(step.running for step in late) <= most + 1
        assert max(step.running for step in late) >= most - 3, "the target is used"
        assert any(step.wait_reason == "latency" for step in late)
        assert all(one.output_len == 100 for one in done.served)


def test_requests_are_admitted_in_the_order_in_which_they_are_due() -> None:
    clock = SimulatedClock()
    config = EngineConfig(model="m", max_num_seqs=1, max_num_batched_tokens=64, target_ttft=1000.0)
    engine = _engine(config, replace(INFO, max_num_seqs=1), Device(), clock)  # type: ignore[arg-type]
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    wanted = (("first", math.inf), ("second", math.inf), ("patient", 30.0), ("urgent", 0.1), ("endless", 1e9))
    for name, ttft_s in wanted:
        engine.add(EngineRequest(name, [1] * 8, params, targets=RequestTargets(ttft_s=ttft_s)))
        clock.now_s += 0.01
    for index in range(40):  # due later than a minute after `endless` came
        clock.now_s += 2.0
        engine.add(EngineRequest(f"{index}", [1] * 8, params, targets=RequestTargets(ttft_s=30.0)))
    ended: list[str] = []
    while engine.has_work:
        ended += [output.id for output in engine.step() if output.finish_reason]
    assert ended[:4] == ["urgent", "first", "second", "patient"]
    assert ended.index("endless") < len(ended) - 15, "no request waits for ever"


def test_servers_limit_chunks_unless_told_otherwise() -> None:
    def slowdown(**settings: Any) -> float | None:
        return served_config(EngineConfig(model="m", **settings)).prefill_slowdown

    assert slowdown() == PREFILL_SLOWDOWN and EngineConfig(model="m").prefill_slowdown is None
    assert slowdown(prefill_slowdown=math.inf) == math.inf and slowdown(prefill_slowdown=2.0) == 2.0
    for other in (
        {"target_itl": 9.0},
        {"mixed_prefill_tokens": 64},
        {"chunked_prefill": False},
        {"kv_layout": "none"},
    ):
        assert slowdown(**other) is None


def test_where_nearly_all_steps_have_prompts_chunks_are_not_limited() -> None:
    # Each answer is short, so the time is that of prompts, and short chunks would spend more of it on the constant.
    work = [([index % 7] * 1200, 6) for index in range(240)]

    def served(slowdown: float) -> Run:
        config = EngineConfig(
            model="m",
            max_num_seqs=64,
            max_num_batched_tokens=2048,
            mixed_prefill_tokens=2048,
            prefix_caching=False,
        )
        config = replace(config, prefill_slowdown=slowdown)
        return simulate(config, INFO, Device(), work, [0.0] * len(work), 32)  # type: ignore[arg-type]

    free, even = served(math.inf), served(PREFILL_SLOWDOWN)
    chunks = [step.prompt_tokens for step in even.steps if step.prompt_tokens]
    assert percentile(chunks[100:400], 50) < 200, "at first it may be a burst"
    assert percentile(chunks[-50:], 50) > 500
    ends = [max(one.token_times_s[-1] for one in done.served) for done in (free, even)]
    assert ends[1] < 1.15 * ends[0]


def test_a_default_keeps_latency_even_for_little_throughput() -> None:
    free, free_itl, _ = run(rate=15.0, mixed_prefill_tokens=2048)
    even, _, _ = run(rate=15.0, mixed_prefill_tokens=2048, prefill_slowdown=PREFILL_SLOWDOWN)
    gaps_ms = [  # of each row that decodes, once decoding has been seen without prompts
        1e3 * step.took_s for step in even.steps[200:] for _, _, count in step.rows if count == 1
    ]
    median = percentile(gaps_ms, 50)
    assert free_itl > 6 * median and percentile(gaps_ms, 99) < 4 * median
    ends = [max(one.token_times_s[-1] for one in done.served) for done in (free, even)]
    assert ends[1] < 1.03 * ends[0]


def planner(**targets: float) -> CapacityPlanner:
    work, times = load(48, 10.0)
    bench = SimpleNamespace(
        info=INFO, config=EngineConfig(model="m", max_num_seqs=64, max_num_batched_tokens=2048)
    )
    return CapacityPlanner(bench, LearnedSteps(NoPadding(), Device()), work, times, LatencyTargets(**targets))  # type: ignore[arg-type]


def test_the_capacity_is_the_rate_at_which_a_target_is_just_met() -> None:
    plan = planner(ttft_ms=1000.0, itl_ms=30.0)
    found = plan.capacity({"mixed_prefill_tokens": 512})
    assert found is not None and found.ttft_ms <= 1000 and found.itl_ms <= 30
    speed = found.requests_per_s / plan.recorded_rate
    config = EngineConfig(model="m", max_num_seqs=64, max_num_batched_tokens=2048, mixed_prefill_tokens=512)
    assert plan.meets(plan.run_at(config, speed)) and not plan.meets(plan.run_at(config, 1.3 * speed))
    assert engines_for(2.5 * found.requests_per_s, found) == 3
    assert planner(itl_ms=1.0).capacity({}) is None, "even an idle engine takes longer"
    target = {"target_itl": 30.0, "mixed_prefill_tokens": None, "prefill_slowdown": None}
    assert {} in plan.alternatives() and target in plan.alternatives()


def test_decoding_that_was_never_seen_alone_is_predicted_from_steps_with_prompts() -> None:
    device, model = Device(noise=0.0), StepTimeModel()
    for index in range(60):
        model.observe(one := StepLoad(1, 0.1, 0, 0.0), device.predict(one))
        rows, tokens = 100 + 3 * (index % 50), 50 + 31 * (index % 29)
        model.observe(one := StepLoad(rows, rows * 0.3, tokens, tokens * 0.4), device.predict(one))
    wanted = StepLoad(200, 60.0, 0, 0.0)
    assert model.predict(wanted) == pytest.approx(
        device.predict(wanted) + 1e-3, rel=0.05
    )  # 1 ms of any prompt
    assert model.predict(StepLoad(1, 0.1, 0, 0.0)) == pytest.approx(2e-3, rel=0.1)


def test_the_host_time_between_steps_is_learnt() -> None:
    record = partial(
        StepRecord, rows=[], admitted=[], preempted=[], running=1, waiting=0, wait_reason=None, free_blocks=9
    )
    alternating = [record(0, 1.0, took_s=0.5), record(1, 1.7, took_s=0.5), record(2, 2.3, took_s=0.5)]
    assert busy_seconds(alternating) == pytest.approx([0.5, 0.7, 0.6])
    overlapped = [record(0, 1.0, took_s=0.5), record(1, 1.1, took_s=0.5), record(2, 1.6, took_s=0.5)]
    assert busy_seconds(overlapped) == pytest.approx([0.5, 0.5, 0.5])
    idle = [record(0, 1.0, took_s=0.5), record(1, 9.0, took_s=0.5)]
    idle[1].admitted.append(AdmissionRecord("r", 5, 0))
    assert busy_seconds(idle) == pytest.approx([0.5, 0.5])


def drawn_s(steps: UnevenSteps, load: StepLoad) -> float | None:
    """Return the seconds of the next step."""
    steps.launch_s(load)
    return steps.predict(load)


def test_simulated_steps_vary_as_the_steps_that_were_seen() -> None:
    model, r = StepTimeModel(), random.Random(1)
    for index in range(200):
        model.observe(StepLoad(8, 1.0, 0, 0.0), 2e-3 * (1.5 if index % 10 == 0 else 1.0) + 1e-6 * r.random())
    steps = UnevenSteps(LearnedSteps(NoPadding(), model))
    drawn = [drawn_s(steps, StepLoad(8, 1.0, 0, 0.0)) for _ in range(500)]
    assert percentile(drawn, 99) == pytest.approx(3e-3, rel=0.02)  # type: ignore[arg-type]
    assert sum(drawn) / 500 == pytest.approx(2.1e-3, rel=0.02)  # type: ignore[arg-type]
    assert drawn_s(steps, StepLoad(8, 1.0, 500, 0.0)) is None


def test_simulated_steps_take_as_long_as_steps_of_that_size_did() -> None:
    model, r = StepTimeModel(), random.Random(2)
    took_s = {100: 6e-3, 500: 12e-3, 1000: 23e-3, 1100: 36e-3, 8000: 180e-3}  # longer ones are not captured
    for index in range(250):
        tokens = list(took_s)[index % 5]
        stall = 2.0 if index % 61 == 7 else 1.0  # another step captured its graph
        model.observe(StepLoad(8, 1.0, tokens, tokens / 2), took_s[tokens] * stall * r.uniform(0.99, 1.01))
    steps, off = UnevenSteps(LearnedSteps(NoPadding(), model)), []
    for tokens, seconds in took_s.items():
        load = StepLoad(8, 1.0, tokens, tokens / 2)
        drawn = [drawn_s(steps, load) for _ in range(200)]
        assert sum(drawn) / 200 == pytest.approx(seconds, rel=0.05)  # type: ignore[arg-type]
        off.append(abs(model.predict(load) / seconds - 1))  # type: ignore[operator]
    assert max(off) > 0.15, "one line does not fit all sizes"


def test_targets_and_settings_are_checked() -> None:
    assert _targets("ttft=1s,itl=40ms", 99) == LatencyTargets(1000.0, 40.0, 99)
    assert _targets("itl=5ms", 50) == LatencyTargets(math.inf, 5.0, 50)
    for text in ("fast", "ttft=1", "tpot=1s", ""):
        with pytest.raises(ConfigError, match="target must be such as"):
            _targets(text, 99)
    with pytest.raises(ConfigError, match="percentile"):
        _targets("itl=5ms", 0)
    for settings, message in (
        ({"target_itl": 0.0}, "target_itl must be above 0 ms, got 0"),
        ({"target_ttft": -1.0}, "target_ttft must be above 0 ms, got -1"),
        ({"prefill_slowdown": 1.0}, "prefill_slowdown must be above 1, got 1"),
        ({"prefill_slowdown": 2.0, "kv_layout": "none"}, "needs chunked_prefill on"),
        ({"target_itl": 9.0, "chunked_prefill": False}, "needs chunked_prefill on"),
        ({"target_itl": 9.0, "mixed_prefill_tokens": 9}, "give one of them"),
    ):
        with pytest.raises(ConfigError, match=message):
            EngineConfig(model="m", **settings)  # type: ignore[arg-type]
