"""Pipelines of four stages, also of several ranks each: tokens of one rank, or a refusal with the sizes."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_models import loud_weights, write_model  # noqa: F401

from quire import EngineConfig
from quire.types import ConfigError, EngineRequest, ModelError, SamplingParams
from thread_engine import thread_engine


def answers(model: Path, **settings: Any) -> dict[str, list[int]]:
    """Return the tokens of requests of several lengths, and again with their prefixes cached."""
    base: dict[str, Any] = {
        "model": str(model), "device": "cpu", "dtype": "float32", "cpu_threads": 1, "max_model_len": 96,
        "max_num_seqs": 5, "max_num_batched_tokens": 40, "kv_cache_memory": 1 << 22, "load_format": "dummy",
        "skip_tokenizer_init": True, "check_invariants": True, "rank_timeout": 60.0,
    }  # fmt: skip
    found: dict[str, list[int]] = {}
    with thread_engine(EngineConfig(**base | settings)) as (engine, _):
        for turn in range(2):
            for i in range(5):
                params = SamplingParams(temperature=0.8 * (i % 2), max_tokens=6, ignore_eos=True)
                prompt = [(5 + 7 * i + 3 * n) % 250 for n in range(4 + 13 * i)]
                engine.add(EngineRequest(f"{turn}-{i}", prompt, params, seed=i))
            while engine.has_work:
                for output in engine.step():
                    assert output.finish_reason != "error", output
                    found.setdefault(output.id, []).extend(output.token_ids)
        assert engine.log.totals.cached_tokens
    return found


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.usefixtures("loud_weights")
@pytest.mark.parametrize(
    ("model", "stages", "ranks"), [("states", 4, 1), ("windows", 4, 1), ("moe", 2, 4), ("windows", 4, 2)]
)
def test_tokens_are_those_of_one_rank(tmp_path: Path, model: str, stages: int, ranks: int) -> None:
    folder = write_model(model, tmp_path / model)
    one = answers(folder)
    assert answers(folder, pipeline_parallel_size=stages, tensor_parallel_size=ranks) == one
    assert len({token for tokens in one.values() for token in tokens}) > 12, "answers are too alike"


@pytest.mark.parametrize(
    ("stages", "ranks", "words"),
    [
        (7, 1, "pipeline_parallel_size 7 needs a layer for each stage, but .* has 6 layers"),
        (2, 3, "over 3 ranks: heads 4, intermediate size 64, K/V heads 2 must be multiples of 3"),
        (4, 8, "over 8 ranks: heads 4 must be multiples of 8"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(tmp_path: Path, stages: int, ranks: int, words: str) -> None:
    folder, before = write_model("windows", tmp_path / "model"), threading.active_count()
    with pytest.raises((ConfigError, ModelError), match=words):
        answers(folder, pipeline_parallel_size=stages, tensor_parallel_size=ranks)
    assert threading.active_count() <= before, "a rank is left"
