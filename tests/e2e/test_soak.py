"""Hundreds of requests through one engine on a GPU, with all that may go on at once: random arrivals, aborts,
preemption, drafts, a beginning that most requests share, sampled and greedy rows in one batch, steps of many shapes.
What comes out must be what plain torch attention makes of the same requests, operation by operation."""

from __future__ import annotations

import random
from typing import Any

import pytest
from switches import drain

from quire.config import EngineConfig
from quire.core.engine import Engine
from quire.host import build_engine
from quire.types import EngineRequest, SamplingParams

MAX_LEN, SHARED = 768, 400
PLAIN = {"attention": "reference", "cuda_graphs": False, "overlap": False, "kv_cache_memory": 1 << 30}


def make_engine(device: str, **settings: Any) -> Engine:
    model = "demo" if device == "cuda" else "demo-draft"  # steps take half the time
    config = EngineConfig(
        model=model, device=device, dtype="float32", max_model_len=MAX_LEN, max_num_seqs=48, **settings
    )
    return build_engine(config)[0]


def make_requests(rng: random.Random, count: int) -> list[EngineRequest]:
    shared = [rng.randrange(300, 1500) for _ in range(SHARED)]
    requests = []
    for i in range(count):
        prompt = shared[:] if rng.random() < 0.7 else []
        prompt += [rng.randrange(300, 1500) for _ in range(rng.choice([1, 7, 40, 200]))]
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.0, 0.8]),
            top_p=rng.choice([1.0, 0.9]),
            top_k=rng.choice([0, 20]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.1]),
            max_tokens=rng.choice([1, 20, 60, 120]),
            ignore_eos=True,
        )
        requests.append(EngineRequest(f"r{i}", prompt, params, seed=rng.randrange(1 << 40)))
    return requests


def soak(device: str, count: int, kv_cache_memory: int) -> Engine:
    rng = random.Random(5)
    requests = make_requests(rng, count)
    plain = make_engine(device, **PLAIN)
    for request in requests:
        plain.add(request)
    expected = drain(plain)
    plain.close()

    drafts: dict[str, Any] = {"spec_method": "suffix", "spec_tokens": 3, "spec_adaptive": False}
    engine = make_engine(device, kv_cache_memory=kv_cache_memory, check_invariants=True, **drafts)
    todo, live, aborted = list(requests), set[str](), set[str]()
    got: dict[str, list[int]] = {request.id: [] for request in requests}
    while todo or engine.has_work:
        while todo and rng.random() < 0.7:
            request = todo.pop()
            live.add(request.id)
            engine.add(request)
        if live and rng.random() < 0.02:
            aborted.add(victim := rng.choice(sorted(live)))
            engine.abort(victim)
        for output in engine.step():
            got[output.id] += output.token_ids
            if output.finish_reason:
                live.remove(output.id)
    engine.check()
    assert 0 < engine.log.totals.accepted_tokens < engine.log.totals.draft_tokens
    for name, tokens in got.items():
        wanted = expected[name]
        assert tokens == (wanted[: len(tokens)] if name in aborted else wanted), name
    return engine


@pytest.mark.gpu
def test_soak_on_the_gpu() -> None:
    engine = soak("cuda", count=600, kv_cache_memory=24 << 20)
    totals = engine.log.totals
    assert totals.preemptions and totals.cached_tokens and totals.aborted
    engine.close()


def test_soak_is_a_comparison() -> None:
    """The same on a CPU, shorter."""
    engine = soak("cpu", count=40, kv_cache_memory=7 << 19)
    assert engine.log.totals.preemptions
    engine.close()
