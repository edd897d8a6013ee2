"""Step times are learnt, chunks keep a latency target, and a simulation says which rate is sustained."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest

from quire.bench.capacity import CapacityPlanner, LatencyTargets, engines_for
from quire.bench.metrics import latencies_ms, percentile
from quire.bench.run import Run
from quire.bench.simulate import simulate
from quire.cli.plan import _targets
from quire.config import EngineConfig
from quire.core.prompt_budget import LatencyBudget
from quire.core.step_time import StepLoad, StepTimeModel, load_of
from quire.core.steplog import StepRecord
from quire.types import ConfigError, EngineInfo


class Device:
    """A device whose steps take a known time, with noise of a few percent."""

    def __init__(self, noise: float = 0.02, seed: int = 0) -> None:
        self._r, self._noise = random.Random(seed), noise

    def predict(self, load: StepLoad) -> float:
        exact = 2e-3 + 2e-5 * load.rows + 1e-5 * load.context
        if load.prompt_tokens:
            exact += 1e-3 + 3e-5 * load.prompt_tokens + 2e-5 * load.prompt_context
        return exact * (1 + self._noise * abs(self._r.gauss(0, 1)))


INFO = EngineInfo(
    model="m", family="f", vocab_size=1000, max_model_len=4096, eos_ids=[], device="cpu", dtype="float32",
    attention="none", max_num_seqs=64, max_num_batched_tokens=2048, num_blocks=8192, block_size=16, block_bytes=1,
    weight_bytes=1, num_parameters=1,
)  # fmt: skip


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


def test_the_load_of_a_step() -> None:
    record = StepRecord(0, 0.0, [("a", 99, 1), ("b", 0, 4)], [], [], 2, 0, None, 9, prompt_tokens=4)
    assert load_of(record) == StepLoad(1, 0.1, 4, 0.008)
    record = StepRecord(0, 0.0, [("a", 96, 4)], [], [], 1, 0, None, 9, drafts=3)
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
    budget = LatencyBudget(1.0, 8192)
    assert budget.tokens([5], 0) == 64, "nothing is known yet"
    for step in range(40):
        tokens = 64 + step % 3
        rows = [("a", 9, 1), ("b", 0, tokens)]
        budget.end_step(StepRecord(step, 0.0, rows, [], [], 2, 0, None, 9, prompt_tokens=tokens, took_s=1e-3))
    assert 64 < budget.tokens([10], 0) <= 99, "a second has room for more, but no such chunk has been timed"


def planner(**targets: float) -> CapacityPlanner:
    work, times = load(48, 10.0)
    bench = SimpleNamespace(
        info=INFO, config=EngineConfig(model="m", max_num_seqs=64, max_num_batched_tokens=2048)
    )
    return CapacityPlanner(bench, Device(), work, times, LatencyTargets(**targets))  # type: ignore[arg-type]


def test_the_capacity_is_the_rate_at_which_a_target_is_just_met() -> None:
    plan = planner(ttft_ms=1000.0, itl_ms=30.0)
    found = plan.capacity({"mixed_prefill_tokens": 512})
    assert found is not None and found.ttft_ms <= 1000 and found.itl_ms <= 30
    speed = found.requests_per_s / plan.recorded_rate
    config = EngineConfig(model="m", max_num_seqs=64, max_num_batched_tokens=2048, mixed_prefill_tokens=512)
    assert plan.meets(plan.run_at(config, speed)) and not plan.meets(plan.run_at(config, 1.3 * speed))
    assert engines_for(2.5 * found.requests_per_s, found) == 3
    assert planner(itl_ms=1.0).capacity({}) is None, "even an idle engine takes longer"
    assert (
        {} in plan.alternatives()
        and {"target_itl": 30.0, "mixed_prefill_tokens": None} in plan.alternatives()
    )


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
        ({"target_itl": 9.0, "chunked_prefill": False}, "needs chunked_prefill on"),
        ({"target_itl": 9.0, "mixed_prefill_tokens": 9}, "give one of them"),
    ):
        with pytest.raises(ConfigError, match=message):
            EngineConfig(model="m", **settings)  # type: ignore[arg-type]
