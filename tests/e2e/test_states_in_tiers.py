"""Snapshots of states in host memory and on a disk: evicted prefixes of hybrid models come back with their states."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_models import loud_weights, write_model  # noqa: F401

from quire import EngineConfig
from quire.types import EngineRequest, SamplingParams, Totals
from thread_engine import thread_engine

TOKENS, PROMPTS = 90, 5
BLOCK_BYTES = 16 * 2 * 2 * 2 * 8 * 4  # tokens, layers with attention, tensors, heads, dimensions, bytes
DEVICE_BLOCKS = 10  # for little more than one request of the longest context
LARGE = PROMPTS * 20 * BLOCK_BYTES / 1e9  # GB of host memory for all prompts


def answer_twice(model: Path, **settings: Any) -> tuple[list[list[list[int]]], Totals]:
    """Return the answers to each prompt in two turns, and the engine's counters."""
    base: dict[str, Any] = {
        "model": str(model), "device": "cpu", "dtype": "float32", "cpu_threads": 1, "max_model_len": 128,
        "max_num_seqs": 2, "kv_cache_memory": DEVICE_BLOCKS * BLOCK_BYTES, "load_format": "dummy",
        "skip_tokenizer_init": True, "check_invariants": True, "rank_timeout": 30.0,
    }  # fmt: skip
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 250) for _ in range(TOKENS)] for _ in range(PROMPTS)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with thread_engine(EngineConfig(**base | settings)) as (engine, _):
        answers: list[list[list[int]]] = [[], []]
        for turn in range(2):
            for number, prompt in enumerate(prompts):
                engine.add(EngineRequest(f"{turn}-{number}", prompt, params))
                tokens: list[int] = []
                while engine.has_work:
                    tokens += [token for output in engine.step() for token in output.token_ids]
                answers[turn].append(tokens)
        return answers, engine.log.totals


@pytest.fixture
def model(tmp_path: Path, loud_weights: None) -> Path:  # noqa: F811
    torch.set_num_threads(1)
    return write_model("states", tmp_path / "model")


@pytest.mark.parametrize(
    "settings",
    [{}, {"state_snapshots": 1}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 3}],
    ids=["one rank", "one row for snapshots", "TP 2", "PP 3, one stage without states"],
)
def test_host_memory_serves_evicted_prefixes(model: Path, settings: dict[str, Any]) -> None:
    expected, _ = answer_twice(model, prefix_caching=False)
    layers = {"pipeline_layer_split": "2,1,3"} if "pipeline_parallel_size" in settings else {}
    found, totals = answer_twice(model, kv_host_memory=LARGE * 4, **settings, **layers)
    assert found == expected
    assert totals.cached_tokens == totals.fetched_tokens["host"] == PROMPTS * (TOKENS // 16 * 16)


def test_a_disk_serves_them_after_a_restart(model: Path, tmp_path: Path) -> None:
    tiers = {"kv_host_memory": 12 * BLOCK_BYTES / 1e9, "kv_disk": str(tmp_path / "disk")}
    expected, _ = answer_twice(model, prefix_caching=False)
    first, before = answer_twice(model, **tiers)
    again, after = answer_twice(model, **tiers)
    assert first == again == expected
    assert before.fetched_tokens["disk"] and after.fetched_tokens["disk"] > PROMPTS * (TOKENS // 16 * 16)


def test_damaged_pages_cost_their_hits_only(model: Path, tmp_path: Path) -> None:
    tiers = {"kv_host_memory": 12 * BLOCK_BYTES / 1e9, "kv_disk": str(tmp_path / "disk")}
    expected, _ = answer_twice(model, **tiers)
    pages = list((tmp_path / "disk").glob("*/1-*.kv"))  # group 0 has the blocks of attention
    assert pages
    for page in pages:
        content = bytearray(page.read_bytes())
        content[len(content) // 2] ^= 1
        page.write_bytes(content)
    found, totals = answer_twice(model, **tiers)
    assert found == expected
    assert totals.cached_tokens == PROMPTS * (TOKENS // 16 * 16), "the first turn finds nothing"
