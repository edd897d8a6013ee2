"""Models with windows against transformers, in an engine that releases the blocks behind them.

Prompts and answers are several windows long. The block pool is so small that requests are preempted, prompts come in
chunks, and half of them begin alike.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from test_families import CASES, VOCAB, make_reference, reference_greedy

from quire.config import EngineConfig
from quire.core.engine import Engine
from quire.host import build_engine
from quire.types import EngineInfo, EngineRequest, SamplingParams

WINDOW, MAX_LEN, ANSWER = 18, 150, 40
GEMMA = {"num_hidden_layers": 7, "sliding_window_pattern": 3}
MODELS = {
    "gemma3": GEMMA,
    "mistral-window": {},
    "qwen2-window": {"num_hidden_layers": 5, "max_window_layers": 2},
}


def engine_of(folder: Path, kv_cache_memory: int, **settings: Any) -> tuple[Engine, EngineInfo]:
    return build_engine(
        EngineConfig(
            model=str(folder), device="cpu", dtype="float32", max_model_len=MAX_LEN, block_size=4, max_num_seqs=4,
            kv_cache_memory=kv_cache_memory, skip_tokenizer_init=True, check_invariants=True, **settings,
        )
    )  # fmt: skip


def requests() -> list[EngineRequest]:
    rng = random.Random(3)
    shared = [rng.randrange(3, VOCAB) for _ in range(3 * WINDOW)]
    prompts = [shared[: rng.choice([0, 3 * WINDOW])] for _ in range(8)]
    prompts = [prompt + [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 50))] for prompt in prompts]
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
    return [EngineRequest(f"r{i}", prompt, params) for i, prompt in enumerate(prompts)]


def run(engine: Engine, wanted: list[EngineRequest]) -> dict[str, list[int]]:
    got: dict[str, list[int]] = {request.id: [] for request in wanted}
    for request in wanted:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            got[output.id] += output.token_ids
    return got


@pytest.mark.parametrize("case", MODELS)
def test_tokens_across_the_edge_of_the_window(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, settings = CASES[case]
    longer = {**settings, **MODELS[case], "sliding_window": WINDOW, "max_position_embeddings": 256}
    monkeypatch.setitem(CASES, case, (name, longer))
    reference = make_reference(case, tmp_path)
    wanted = requests()
    expected = {r.id: reference_greedy(reference, list(r.prompt), ANSWER) for r in wanted}
    _, info = engine_of(tmp_path, 1 << 24)
    assert any(window == WINDOW for _, window in info.kv_groups)
    tight = info.block_bytes * sum(
        -(-min(MAX_LEN, (window or MAX_LEN) + 40) // 4) + 1 for _, window in info.kv_groups
    )
    for kernels in (True, False):
        engine, _ = engine_of(tmp_path, tight, cpu_kernels=kernels, max_num_batched_tokens=31)
        assert run(engine, wanted) == expected
        totals = engine.log.totals
        assert totals.pressure and totals.cached_tokens, "neither preempted nor cached"
        again = [EngineRequest(f"again {r.id}", r.prompt, r.params) for r in wanted[:2]]
        assert list(run(engine, again).values()) == [expected[r.id] for r in wanted[:2]]
        assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks
