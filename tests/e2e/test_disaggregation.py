"""Prompts computed by another process: the tokens are those of one engine, whatever happens to that process."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from quire.assembly.transport import pick_transport
from quire.config import EngineConfig
from quire.core.engine import Engine
from quire.core.remote_prefill import RemotePrefill
from quire.host import build_engine
from quire.types import ConfigError, EngineOutput, EngineRequest, SamplingParams

BASE: dict[str, Any] = {
    "model": "demo", "dtype": "float32", "cpu_threads": 1, "capture_at_start": False, "max_model_len": 512, "max_num_seqs": 4,
    "kv_cache_memory": 1 << 23, "max_num_batched_tokens": 64, "skip_tokenizer_init": True, "check_invariants": True,
}  # fmt: skip


def requests(seed: int, count: int = 8) -> list[EngineRequest]:
    rng = random.Random(seed)
    shared = [rng.randrange(5, 400) for _ in range(96)]
    found = []
    for i in range(count):
        prompt = [
            *shared[: rng.choice([0, 96])],
            *(rng.randrange(5, 400) for _ in range(rng.randrange(20, 300))),
        ]
        params = SamplingParams(max_tokens=12, temperature=0.8 * (i % 2), logprobs=2 if i == 3 else None)
        found.append(EngineRequest(f"{seed}-{i}", prompt, params, seed=i, client=f"c{i % 2}"))
    return found


def drain(engine: Engine, seconds: float = 60.0) -> dict[str, list[int]]:
    got: dict[str, list[int]] = {}
    end_s = time.monotonic() + seconds
    while engine.scheduler.requests:
        assert time.monotonic() < end_s, "requests do not end"
        for output in engine.step():
            assert output.finish_reason != "error", output.error
            got.setdefault(output.id, []).extend(output.token_ids)
    return got


def run(engine: Engine, load: list[EngineRequest]) -> dict[str, list[int]]:
    for one in load:
        engine.add(one)
    return drain(engine)


NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_CUDA])])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def joint(device: str) -> Iterator[Engine]:
    engine, _ = build_engine(EngineConfig(**BASE, device=device, prefix_caching=False))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def split(device: str) -> Iterator[Engine]:
    engine, _ = build_engine(EngineConfig(**BASE, device=device, disaggregate="prefill:1 decode:1"))
    yield engine
    engine.close()


def prefills(engine: Engine) -> Any:
    connector = engine.scheduler.connector
    assert isinstance(connector, RemotePrefill)
    return connector._engines


def until(engine: Engine, condition: Any, seconds: float = 60.0) -> list[EngineOutput]:
    outputs, end_s = [], time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end_s, "it does not happen"
        outputs += engine.step()
        time.sleep(1e-3)
    return outputs


def test_the_tokens_are_those_of_one_engine(joint: Engine, split: Engine) -> None:
    for seed in range(3):
        assert run(split, requests(seed)) == run(joint, requests(seed))
    totals = split.log.totals
    assert totals.fetched_tokens["prefill"] > 1000 and totals.moved_bytes["pull"] > 0
    until(split, lambda: not split.scheduler.connector.busy)
    assert split.scheduler.pool.num_free == split.scheduler.pool.num_blocks
    assert not prefills(split).processes[0].open, "the prefill engine still keeps blocks"


def test_a_receipt_tells_prefill_and_transfer_apart(split: Engine) -> None:
    (one,) = requests(50, 1)
    one.prompt = [7 + i % 90 for i in range(300)]
    split.add(one)
    last = next(o for o in iter_outputs(split) if o.finish_reason)
    timing = last.timing
    assert timing is not None and timing.waited_s["prefill"] > 0 and "transfer" in timing.waited_s
    assert timing.fetched_tokens["prefill"] >= 16 * 17 and timing.cached_tokens == 288
    total = sum(timing.waited_s.values()) + timing.prefill_s + timing.decode_s + timing.lost_s
    assert total == pytest.approx(timing.until_s - timing.arrival_s, abs=1e-6)


def iter_outputs(engine: Engine) -> Iterator[EngineOutput]:
    while engine.scheduler.requests:
        yield from engine.step()


def test_an_abort_ends_the_prefill_too(split: Engine) -> None:
    (one,) = requests(60, 1)
    one.prompt = [11 + i % 70 for i in range(400)]
    split.add(one)
    until(split, lambda: bool(prefills(split).processes[0].open))
    split.abort(one.id)
    until(split, lambda: not split.scheduler.has_work)
    assert not prefills(split).processes[0].open
    assert split.scheduler.pool.num_free == split.scheduler.pool.num_blocks


def test_a_killed_prefill_process_is_replaced_and_nothing_is_lost(joint: Engine, split: Engine) -> None:
    load = requests(70)
    for one in load:
        split.add(one)
    process = prefills(split).processes[0]
    outputs = until(split, lambda: bool(process.open))
    os.kill(process.process.pid, signal.SIGKILL)
    got: dict[str, list[int]] = {one.id: [] for one in load}
    for output in outputs:
        got[output.id] += output.token_ids
    for name, tokens in drain(split).items():
        got[name] += tokens
    assert got == run(joint, requests(70))
    assert process.restarts == 1
    if process.info is None:
        assert "SIGKILL" in split.scheduler.connector.notes[0]
    until(split, lambda: process.info is not None)
    assert list(split.scheduler.connector.notes) == []
    before = split.log.totals.fetched_tokens.get("prefill", 0)
    assert run(split, requests(71)) == run(joint, requests(71))
    assert split.log.totals.fetched_tokens["prefill"] > before, "the new process computes no prompts"


@pytest.mark.parametrize(
    "settings,text",
    [
        ({"disaggregate": "prefill:1"}, "must look like"),
        ({"disaggregate": "prefill:3,decode:2"}, "multiple of 2"),
        ({"disaggregate": "prefill:1,decode:1", "prefix_caching": False}, "prefix_caching"),
        ({"disaggregate": "prefill:1,decode:1", "tensor_parallel_size": 2}, "one rank"),
        ({"disaggregate": "prefill:2,decode:2", "data_parallel_size": 3}, "data_parallel_size is 3"),
        (
            {"disaggregate": "prefill:1,decode:1", "kv_transport": "tcp"},
            "kv_transport must be one of auto, shared",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        EngineConfig(**settings)


def test_a_transport_must_suit_the_device() -> None:
    config = EngineConfig(**BASE, device="cpu", disaggregate="prefill:1,decode:1", kv_transport="cuda-ipc")
    with pytest.raises(
        ConfigError, match="kv_transport cuda-ipc does not suit device cpu; use shared-memory"
    ):
        build_engine(config)
    with pytest.raises(
        ConfigError, match="kv_transport shared-memory does not suit device cuda; use cuda-ipc"
    ):
        pick_transport(EngineConfig(kv_transport="shared-memory"), torch.device("cuda"))
