"""A dry run honours every setting of the scheduler, and its answers do not depend on them."""

from __future__ import annotations

from typing import Any

import pytest

from quire.config import EngineConfig
from quire.core import policy
from quire.core.block_pool import FIFO, LRU
from quire.core.engine import Engine
from quire.dry_run import build_dry_run
from quire.types import EngineRequest, SamplingParams


def build(**settings: Any) -> Engine:
    return build_dry_run(EngineConfig(model="demo", check_invariants=True, **settings), 0.0)[0]


def test_settings_of_the_scheduler_take_effect() -> None:
    default = build()
    assert (default.depth, default.scheduler.limits.mixed_prefill_tokens) == (2, 256)
    assert isinstance(default.scheduler.pool.evictor, LRU)
    assert isinstance(build(eviction="fifo").scheduler.pool.evictor, FIFO)
    assert build(batching="static").scheduler.policy.admits is policy.static
    assert build(chunked_prefill=False).scheduler.policy.chunk is policy.whole
    assert build(mixed_prefill_tokens=64).scheduler.limits.mixed_prefill_tokens == 64
    assert not build(kv_layout="none").scheduler.limits.keeps_kv
    synchronous = build(overlap=False)
    assert synchronous.depth == 1 and not synchronous.scheduler.limits.lookahead


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"overlap": False, "eviction": "fifo"},
        {"batching": "static", "max_num_seqs": 2},
        {"chunked_prefill": False, "scheduling_policy": "priority"},
        {"max_num_batched_tokens": 16, "mixed_prefill_tokens": 4, "block_size": 4},
        {"kv_layout": "contiguous"},
        {"kv_layout": "none"},
    ],
    ids=str,
)
def test_answers_are_the_prompts(settings: dict[str, Any]) -> None:
    engine = build(**settings)
    prompts = {str(i): list(range(10 + i, 40 + 3 * i)) for i in range(5)}
    for name, prompt in prompts.items():
        engine.add(EngineRequest(name, prompt, SamplingParams(max_tokens=len(prompt))))
    answers: dict[str, list[int]] = {name: [] for name in prompts}
    while engine.has_work:
        for output in engine.step():
            answers[output.id] += output.token_ids
    assert answers == prompts
