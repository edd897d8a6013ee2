"""The switch matrix: no switch, and no mix of switches, changes a token.

Every request of a fixed set (greedy and seeded, with shared beginnings) is decoded alone, then in random
company under every pair of switch values and a few hundred random full combinations, with block pools so
small that requests are preempted, random arrivals and aborts. Compared in float32.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import torch
from switches import (
    GPU_SWITCHES,
    SWITCHES,
    WITH_DRAFTS,
    Bench,
    defaults,
    legal,
    make_requests,
    random_settings,
)
from test_speculation import draft_answers, with_drafts

from quire.worker.memory.states import StateMemory
from tiny import write_hybrid

PAIRS = sorted(
    {
        tuple(sorted({**defaults(), a: x, b: y}.items(), key=str))
        for a, b in itertools.combinations(SWITCHES, 2)
        for x in SWITCHES[a]
        for y in SWITCHES[b]
        if legal({**defaults(), a: x, b: y})
    },
    key=str,
)
CHUNK = 24
RANDOM_RUNS = 300


@pytest.fixture(scope="module")
def bench() -> Bench:
    """The smaller of the built-in models, whose steps take half the time."""
    torch.set_num_threads(1)
    return Bench("demo-draft")


@pytest.mark.parametrize("first", range(0, len(PAIRS), CHUNK))
def test_every_pair_of_switches(bench: Bench, first: int) -> None:
    for index, pair in enumerate(PAIRS[first : first + CHUNK], first):
        bench.run(dict(pair), seed=index)


@pytest.mark.parametrize("first", range(0, RANDOM_RUNS, CHUNK))
def test_random_combinations(bench: Bench, first: int) -> None:
    preempted = cached = fetched = drafted = accepted = 0
    for seed in range(first, first + CHUNK):
        totals = bench.run(random_settings(random.Random(seed)), seed=seed).log.totals
        preempted += totals.preemptions
        cached += totals.cached_tokens
        fetched += sum(totals.fetched_tokens.values())
        drafted += totals.draft_tokens
        accepted += totals.accepted_tokens
    assert preempted and cached, "the load exercised no preemption or no prefix cache"
    assert 0 < accepted < drafted, "the load exercised no accepted or no rejected drafts"
    assert fetched or first, "the load exercised no host memory"


WINDOWS = (9, None, 9, None)  # of the layers of demo-draft, shorter than most prompts


@pytest.fixture(scope="module")
def windowed() -> Bench:
    return Bench("demo-draft", windows=WINDOWS)


def test_random_combinations_with_windows(windowed: Bench) -> None:
    """Layers are in groups wherever blocks are pages, and their blocks are released behind the windows."""
    cached = trimmed = 0
    for seed in range(CHUNK):
        engine = windowed.run(random_settings(random.Random(seed)), seed=seed)
        cached += engine.log.totals.cached_tokens
        trimmed += len(engine.scheduler.blocks.groups) > 1
    assert cached and trimmed > CHUNK // 2


@pytest.mark.parametrize(("kv_cache_dtype", "windows"), [("int8", None), ("fp8", WINDOWS)])
def test_random_combinations_with_codes_in_the_cache(
    kv_cache_dtype: str, windows: tuple[int | None, ...] | None
) -> None:
    torch.set_num_threads(1)
    bench = Bench("demo-draft", windows=windows, kv_cache_dtype=kv_cache_dtype)
    # Without latency limits: with them it would depend on the machine's speed whether blocks run out.
    crowded = {"kv_layout": "paged", "blocks": "tight", "max_num_seqs": 8, "prefix_caching": None}
    crowded |= {"target_itl": None, "prefill_slowdown": None}
    totals = [
        bench.run(random_settings(random.Random(seed)) | crowded, seed).log.totals
        for seed in range(CHUNK // 6)
    ]
    assert sum(t.preemptions for t in totals) and sum(t.cached_tokens for t in totals)


STATE_SWITCHES = {
    **WITH_DRAFTS,
    "state_snapshots": (None, 1, 3),
    "state_snapshot_interval": (4096, 0, 16),
    "state_snapshot_answers": (64, 0, 5),
}


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A model of convolutions and attention, whose layers keep states."""
    torch.set_num_threads(1)
    folder = write_hybrid(tmp_path_factory.mktemp("hybrid"))
    return Bench(str(folder), requests=make_requests(random.Random(7))[:12])


def test_random_combinations_with_states(hybrid: Bench) -> None:
    cached = preempted = 0
    for seed in range(CHUNK // 2):
        engine = hybrid.run(random_settings(random.Random(seed), STATE_SWITCHES), seed=seed)
        cached += engine.log.totals.cached_tokens
        preempted += engine.log.totals.preemptions
    assert cached and preempted


def test_drafts_with_states(hybrid: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The states behind rejected drafts are dropped."""
    draft_answers(hybrid, monkeypatch)
    rng = random.Random(4)
    for seed in range(5):
        settings = random_settings(rng, STATE_SWITCHES)
        while settings["kv_layout"] == "none":
            settings = random_settings(rng, STATE_SWITCHES)
        totals = hybrid.run(with_drafts(settings), seed).log.totals
        assert 0 < totals.accepted_tokens < totals.draft_tokens
    monkeypatch.setattr(StateMemory, "accept", lambda self, slots, verifies, tokens: None)
    with pytest.raises(AssertionError, match="differ"):
        hybrid.run(with_drafts(defaults()), 0)


def test_expectation_does_not_hold_for_other_weights(bench: Bench) -> None:
    """The comparison can fail: a disturbed KV entry shows."""
    engine = bench.engine(defaults())
    request = next(r for r in bench.requests if len(bench.expected[r.id]) > 20)
    engine.add(request)
    engine.step()
    runner = engine.executor.runner
    for keys, _ in runner.batcher.parts.kv:
        keys += 1.0
    tokens: list[int] = []
    while engine.has_work:
        for output in engine.step():
            tokens += output.token_ids
    assert tokens != bench.expected[request.id]


PARTS = pytest.mark.parametrize("part", range(4))  # so that processes share the seeds


@pytest.mark.gpu
@PARTS
def test_switches_on_the_gpu(part: int) -> None:
    bench = Bench("demo", device="cuda")
    for seed in range(part, 60, 4):
        bench.run(random_settings(random.Random(seed), GPU_SWITCHES), seed=seed)


@pytest.mark.gpu
@PARTS
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_switches_with_codes_in_the_cache_on_the_gpu(kv_cache_dtype: str, part: int) -> None:
    bench = Bench("demo", device="cuda", kv_cache_dtype=kv_cache_dtype)
    for seed in range(part, 40, 4):
        bench.run(random_settings(random.Random(seed), GPU_SWITCHES), seed=seed)


@pytest.mark.gpu
@PARTS
def test_switches_with_windows_on_the_gpu(part: int) -> None:
    bench = Bench("demo-draft", device="cuda", windows=WINDOWS)
    for seed in range(part, 40, 4):
        bench.run(random_settings(random.Random(seed), GPU_SWITCHES), seed=seed)


@pytest.mark.gpu
def test_drafts_with_states_on_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = make_requests(random.Random(7))[:12]
    bench = Bench(str(write_hybrid(tmp_path, heads=2)), device="cuda", requests=requests)
    draft_answers(bench, monkeypatch)
    switches = STATE_SWITCHES | {"kv_layout": ("paged",), "cuda_graphs": (True, True, False)}
    for seed in range(8):
        totals = bench.run(with_drafts(random_settings(random.Random(seed), switches)), seed).log.totals
        assert 0 < totals.accepted_tokens < totals.draft_tokens
