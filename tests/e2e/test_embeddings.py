"""Embeddings equal those of transformers, also beside other requests."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams
from quire.frontend.generation_config import default_pooling
from quire.frontend.normalize import embedding
from quire.types import RequestError
from tiny import write_tiny

transformers = pytest.importorskip("transformers", reason="transformers makes the reference")
LENGTHS = [1, 2, 7, 16, 17, 33, 64, 160]
PROMPTS = [[(7 * i + 3 * n) % 256 for i in range(n)] for n in LENGTHS]
PROMPTS.append(PROMPTS[-1][:64] + [1, 2, 3])  # begins like another one
SETTINGS: list[dict[str, Any]] = [
    {},
    {"overlap": False},
    {"max_num_batched_tokens": 24, "max_num_seqs": 3, "mixed_prefill_tokens": 8},
    {"prefix_caching": False, "batching": "static"},
    {"kv_layout": "contiguous", "max_model_len": 160},  # the longest prompt fills the context
    {"kv_layout": "none", "chunked_prefill": False, "max_model_len": 160},
    {"kv_cache_memory": 11 * 16 * 512, "max_num_batched_tokens": 32, "max_model_len": 160},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def states(folder: Path) -> list[np.ndarray]:
    """Return the hidden states of each prompt by transformers, float32 [tokens, hidden]."""
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        return [model(torch.tensor([ids])).last_hidden_state[0].numpy() for ids in PROMPTS]


def expected(states: list[np.ndarray], pooling: str) -> np.ndarray:
    found = np.stack([s[-1] if pooling == "last" else s.mean(0) for s in states])
    return found / np.linalg.norm(found, axis=1, keepdims=True)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_as_transformers_has_them(folder: Path, states: list[np.ndarray], settings: dict[str, Any]) -> None:
    with LLM(str(folder), device="cpu", dtype="float32", check_invariants=True, **settings) as llm:
        for pooling in ("mean", "last", "mean"):  # the second time the beginnings are cached
            found = np.array(llm.embed(PROMPTS, pooling, use_tqdm=False))  # type: ignore[arg-type]
            np.testing.assert_allclose(found, expected(states, pooling), atol=2e-5)
        raw = np.array(llm.embed(PROMPTS[2], normalize=False, use_tqdm=False))
        np.testing.assert_allclose(raw[0], states[2].mean(0), atol=1e-4)


@pytest.mark.parametrize("blocks", [200, 20])
def test_beside_others(folder: Path, states: list[np.ndarray], blocks: int) -> None:
    """Requests for tokens and for embeddings in the same steps: each gets what it gets alone, and so do those whose
    beginning is given up for want of blocks."""
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    settings = {"max_num_batched_tokens": 5, "kv_cache_memory": blocks * 16 * 512, "max_model_len": 160}
    with LLM(str(folder), device="cpu", dtype="float32", **settings) as llm:
        alone = [out.outputs[0].token_ids for out in llm.generate(PROMPTS[:3], params, use_tqdm=False)]
        wanted = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
        talking = llm._submit(PROMPTS[:3], [params] * 3, None)
        pooled = [
            llm._submit(PROMPTS[::-1], [wanted] * len(PROMPTS), None, pooling) for pooling in ("mean", "last")
        ]
        llm._finish([*itertools.chain(talking, *pooled)], use_tqdm=False)
        assert [state.answers[0].token_ids for state in talking] == alone
        for found, pooling in zip(pooled, ("mean", "last")):
            vectors = np.stack([embedding(state.pooled or b"") for state in found[::-1]])
            np.testing.assert_allclose(vectors, expected(states, pooling), atol=2e-5)
        preempted = {name for record in llm.client.engine.log for name in record.preempted}
        ours = {state.request_id for state in pooled[0]}
        assert bool(ours & preempted) == (blocks == 20)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    """Against the CPU, in chunks and beside requests whose steps are graphs."""
    texts = [f"Rosa bought {n} oranges at the old pond. " * (1 + n % 9) for n in range(40)]
    vectors = []
    for settings in ({"device": "cpu"}, {"device": "cuda", "max_num_batched_tokens": 128}):
        with LLM("demo", dtype="float32", **settings) as llm:
            llm.generate(texts[:4], SamplingParams(max_tokens=20), use_tqdm=False)
            vectors.append([llm.embed(texts, pooling, use_tqdm=False) for pooling in ("mean", "last")])  # type: ignore[arg-type]
    np.testing.assert_allclose(vectors[1], vectors[0], atol=2e-3)


def test_which_pooling_and_how_it_is_cut(tmp_path: Path) -> None:
    assert default_pooling(tmp_path) == "mean"
    (tmp_path / "1_Pooling").mkdir()
    for config, pooling in (
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}, "mean"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "lasttoken"}, "last"),
    ):
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(config))
        assert default_pooling(tmp_path) == pooling
    pooled = np.array([3, 4, 12], "<f4").tobytes()
    np.testing.assert_allclose(embedding(pooled), np.array([3, 4, 12]) / 13)
    np.testing.assert_allclose(embedding(pooled, 2), [0.6, 0.8], rtol=1e-6)
    assert embedding(pooled, None, False).tolist() == [3, 4, 12]
    assert embedding(bytes(8)).tolist() == [0, 0]
    with pytest.raises(ValueError, match="at most 3, got 4"):
        embedding(pooled, 4)


def test_in_another_process(folder: Path, states: list[np.ndarray]) -> None:
    with LLM(str(folder), device="cpu", dtype="float32", engine_process=True) as llm:
        found = np.array(llm.embed(PROMPTS, "mean", use_tqdm=False))
        np.testing.assert_allclose(found, expected(states, "mean"), atol=2e-5)
        with pytest.raises(RequestError, match="mean or last"):
            llm.embed("Hi", "middle")  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="prompt 1"):
            llm.embed(["Hi", ""])
