"""Start-up: its timed phases, the state that it leaves, and that the rehearsal changes no answer."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.start import start_engine, wake_gpu
from quire.worker.memory.sizing import KVSize
from quire.worker.runner import Runner
from quire.worker.worker import Worker, run_step

SMALL: dict[str, Any] = {"device": "cpu", "kv_cache_memory": 1 << 24, "max_num_seqs": 4}
PROMPTS = ["Once upon a time", "The cat sat", "One day " * 20]


def test_phases_are_timed_and_shown() -> None:
    engine, info = start_engine(EngineConfig(**SMALL))
    engine.close()
    assert list(info.phases_s) == ["import", "config", "device", "weights", "warm_up", "kv_cache"]
    assert all(seconds >= 0 for seconds in info.phases_s.values())
    assert info.start_up().startswith(f"{sum(info.phases_s.values()):.2f} s (import ")


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_left_as_it_was(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    try:
        start_engine(EngineConfig(**SMALL))[0].close()
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


@pytest.mark.parametrize("device", ["cpu", "auto", "cuda:x", "cuda:99", "cuda:-1", "", "tpu"])
def test_waking_a_gpu_that_is_not_there_is_no_error(device: str) -> None:
    wake_gpu(device)


def answers(**settings: Any) -> list[list[int]]:
    with LLM("demo", **SMALL, **settings) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture
def warmed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make every worker run its largest step and rehearse in blocks full of NaN. Return their max_model_len."""
    done: list[int] = []
    allocate = Worker.allocate

    def warm(self: Worker, size: KVSize, exports: object) -> Runner:
        scratch = self.scratch_size()
        run_step(self.make_runner(scratch, self.make_blocks(scratch), graphs=False), *self.largest_step())
        runner = allocate(self, size, exports)
        edges = [blocks[end] for pair in self.blocks for blocks in pair for end in (0, -1)]
        for block in edges:
            block.fill_(float("nan"))
        self.rehearse(runner, size)
        assert not any(block.isnan().any() for block in edges)
        done.append(size.max_model_len)
        return runner

    monkeypatch.setattr(Worker, "allocate", warm)
    return done


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"kv_layout": "contiguous"},
        {"kv_layout": "none"},
        {"block_size": 5},
        {"max_num_batched_tokens": 3},
    ],
)
def test_warming_up_leaves_no_trace(settings: dict[str, Any], request: pytest.FixtureRequest) -> None:
    expected = answers(**settings)
    warmed = request.getfixturevalue("warmed")
    assert answers(**settings) == expected
    assert len(warmed) == 1


def test_warming_up_fits_into_a_narrow_context(warmed: list[int]) -> None:
    for length in (2, 3):
        start_engine(EngineConfig(**SMALL, max_model_len=length))[0].close()
    assert warmed == [2, 3]


def test_tables_and_columns_are_made_for_the_context_that_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """That context is an explicit one or one lowered to fit into memory, never the model's longest."""
    made: list[tuple[int, int]] = []
    allocate = Worker.allocate

    def noted(self: Worker, size: KVSize, exports: object) -> Runner:
        runner = allocate(self, size, exports)
        made.append((len(self.model.ropes[0].table), runner.state.max_len))
        return runner

    monkeypatch.setattr(Worker, "allocate", noted)
    small = {**SMALL, "dtype": "bfloat16"}  # which says how large a block is
    start_engine(EngineConfig(**small, max_model_len=100))[0].close()
    start_engine(EngineConfig(**small))[0].close()
    lowered = EngineConfig(**{**small, "kv_cache_memory": 20 * 57344})
    start_engine(lowered)[0].close()
    assert made == [(100, 100), (2048, 2048), (320, 320)]
