"""Steps on several threads: no order of rows within a step, and no number of threads, changes a token."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from fuzz_threads import fuzz, related_requests
from switches import Bench, drain

import quire.rank
from quire.attention.base import AttentionLayer, ForwardBatch
from quire.attention.reference import ReferenceAttention
from quire.config import EngineConfig
from quire.core.engine import Engine
from quire.host import build_engine
from quire.types import EngineRequest, SamplingParams


class LastRowFirst(ReferenceAttention):
    """Writes and attends row by row, the last row first, as threads may."""

    def plan(self, batch: ForwardBatch) -> list[tuple[slice, ForwardBatch]]:
        assert batch.num_tokens is not None
        rows, end = [], 0
        for row, count in enumerate(batch.num_tokens.tolist()):
            begin, end, only = end, end + count, slice(row, row + 1)
            one = replace(
                batch,
                positions=batch.positions[begin:end],
                kv_slots=batch.kv_slots[begin:end],
                seq_lens=batch.seq_lens[only],
                slots=batch.slots[only],
                num_tokens=batch.num_tokens[only],
                seq_bounds=batch.seq_bounds[only],
            )
            one.attn = super().plan(one)
            rows.append((slice(begin, end), one))
        return rows[::-1]

    def forward(
        self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        outs = [super(LastRowFirst, self).forward(layer, q[at], k[at], v[at], one) for at, one in batch.attn]
        return torch.cat(outs[::-1])


@pytest.fixture(scope="module")
def bench() -> Bench:
    torch.set_num_threads(1)
    return Bench("demo", requests=related_requests(random.Random(0), 12))


def small_engine(**settings) -> Engine:
    config = EngineConfig(
        model="demo", device="cpu", dtype="float32", max_model_len=128, kv_cache_memory=1 << 24, **settings
    )
    return build_engine(config)[0]


@pytest.mark.parametrize("overlap", [True, False])
def test_rows_of_a_step_run_in_any_order(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of two blocks whose last token is a step of its own, and in that step another that begins so."""
    rng = random.Random(1)
    prompt = [rng.randrange(300, 1500) for _ in range(34)]
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    requests = [EngineRequest(f"r{n}", prompt[:n], params) for n in (32, 33, 34)]
    alone = small_engine(max_num_seqs=1, prefix_caching=False)
    for request in requests:
        alone.add(request)
    expected = drain(alone)
    monkeypatch.setattr(quire.rank, "pick_attention_parts", lambda *_: LastRowFirst())
    engine = small_engine(max_num_batched_tokens=31, overlap=overlap, cpu_kernels=False)
    engine.add(requests[0])
    outputs = engine.step()
    for request in requests[1:]:
        engine.add(request)
    got = drain(engine)
    for output in outputs:
        got[output.id] = output.token_ids + got[output.id]
    assert got == expected
    assert engine.log.totals.cached_tokens, "nothing was shared"


@pytest.mark.parametrize("threads", [2, 8])
def test_random_loads_on_several_threads(bench: Bench, threads: int) -> None:
    """At least two loads, and as many as it takes to draw settings that share prompts."""
    counts = fuzz(bench, threads, seed=threads)
    for seed in range(threads + 1, threads + 10):
        counts += fuzz(bench, threads, seed)
        if counts["cached_tokens"]:
            break
    assert counts["tokens"] and counts["cached_tokens"]
