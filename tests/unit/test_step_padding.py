"""Simulations follow the padding of captured steps, and learn times without the transients of captures."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from quire.bench.learned_steps import LearnedSteps, UnevenSteps
from quire.bench.metrics import percentile
from quire.bench.simulate import simulate
from quire.bench.step_padding import GraphPadding, NoPadding, padding_of
from quire.config import EngineConfig
from quire.core.step_time import StepLoad
from unit.test_latency_target import INFO

STEP = StepLoad(30, 30.0, 1000, 500.0)  # 1,030 tokens: 1,536 before it is captured, 1,152 afterwards
CAPTURE_S = 50e-3


def took_s(run: StepLoad) -> float:
    return 3e-3 + 20e-6 * (run.rows + run.prompt_tokens) + 1e-6 * run.context


class Replayed:
    """A device with the padding of CUDA graphs whose captures keep the host busy."""

    def __init__(self) -> None:
        self._padding, self._run = GraphPadding(1024, 8192), STEP

    def launch_s(self, load: StepLoad) -> float:
        self._run, captures = self._padding.run(load)
        return CAPTURE_S * captures

    def predict(self, load: StepLoad) -> float:
        return took_s(self._run)


def test_a_step_is_padded_more_until_it_is_captured() -> None:
    padding, found = GraphPadding(1024, 8192), []
    for _ in range(20):
        run, captures = padding.run(STEP)
        found.append((run.rows + run.prompt_tokens, captures))
    first = found.index((1536, True))
    assert found == [(1536, False)] * first + [(1536, True)] + [(1152, False)] * (19 - first)
    assert 3 < first < 15
    other = padding.copy()
    assert other.run(STEP) == padding.run(STEP)
    wide = STEP._replace(rows=60)
    while not other.run(wide)[1]:
        pass
    assert padding.run(wide)[0].prompt_tokens == 1536 - 60, "the copy captured it, not the original"


def test_decoding_and_long_steps_are_not_padded() -> None:
    padding = GraphPadding(1024, 8192)
    for load in (StepLoad(33, 9.0, 0, 0.0), StepLoad(33, 9.0, 4000, 2.0)):
        assert padding.run(load) == (load, False)
    assert padding.run(StepLoad(33, 9.0, 512 - 33, 2.0)) == (StepLoad(33, 9.0, 512 - 33, 2.0), False)
    assert isinstance(padding_of(INFO), NoPadding)
    on_gpu = replace(INFO, device="cuda:0")
    assert isinstance(padding_of(on_gpu), GraphPadding) and isinstance(padding_of(on_gpu, False), NoPadding)


def test_times_are_those_after_the_captures() -> None:
    steps, seen = Replayed(), []
    decode = StepLoad(30, 30.0, 0, 0.0)
    for index in range(40):
        launch_s, seconds = steps.launch_s(STEP), steps.predict(STEP)
        # The host sees the end of the step before it late, and that of the captured one at once.
        seen += [(decode, launch_s or 4e-3), (STEP, 1e-3 if launch_s else seconds)]
        small = StepLoad(30, 30.0, 30 + 17 * (index % 9), 2.0)
        seen.append((small, steps.launch_s(small) * 0 + steps.predict(small)))
    learned = LearnedSteps(GraphPadding(1024, 8192))
    learned.observe(seen)
    uneven = UnevenSteps(learned)
    assert uneven.launch_s(STEP) == 0
    assert uneven.predict(STEP) == pytest.approx(took_s(StepLoad(30, 30.0, 1122, 500.0)), rel=0.03)
    assert learned.capture_s == pytest.approx(CAPTURE_S, rel=0.1)


def test_chunks_fill_captured_steps_so_few_are_captured_later() -> None:
    info = replace(INFO, device="cuda:0", max_num_seqs=256, max_num_batched_tokens=8192, num_blocks=1 << 15)
    work = [([1 + index % 7] * 1000, 120) for index in range(120)]
    config = EngineConfig(model="m", max_num_seqs=256, prefix_caching=False, prefill_slowdown=4.0)

    def padding_share(config: EngineConfig) -> float:
        run = simulate(config, info, Replayed(), work, [0.05 * index for index in range(120)])
        steps, wasted, tokens = Replayed(), 0, 0
        for step in run.steps:
            load = StepLoad(step.num_tokens - step.prompt_tokens, 0.0, step.prompt_tokens, 0.0)
            steps.launch_s(load)
            wasted += steps._run.prompt_tokens - load.prompt_tokens
            tokens += load.prompt_tokens
        return wasted / tokens

    assert padding_share(config) < 0.75 * padding_share(replace(config, cuda_graphs=False))


def test_a_burst_into_a_fresh_engine_decodes_evenly() -> None:
    info = replace(INFO, max_num_seqs=128, max_num_batched_tokens=8192)
    work = [([1 + index % 7] * 500, 150) for index in range(128)]

    class Steps:
        def launch_s(self, load: StepLoad) -> float:
            return 0.0

        def predict(self, load: StepLoad) -> float:
            return 4e-3 + 2e-5 * load.rows + 2.1e-5 * load.prompt_tokens

    found = {}
    for slowdown in (4.0, math.inf):
        config = EngineConfig(
            model="m", max_num_seqs=128, max_num_batched_tokens=8192, mixed_prefill_tokens=8192
        )
        config = replace(config, prefill_slowdown=slowdown, prefix_caching=False)
        run = simulate(config, info, Steps(), work, [0.0] * 128)
        gaps = [gap for one in run.completed for gap in one.itls_s]
        end_s = max(one.token_times_s[-1] for one in run.completed)
        found[slowdown] = percentile(gaps, 99) / percentile(gaps, 50), end_s
    assert found[math.inf][0] > 10, "the burst is one"
    assert found[4.0][0] < 4
    assert found[4.0][1] < 1.25 * found[math.inf][1], "prompts are more than half of this load"
