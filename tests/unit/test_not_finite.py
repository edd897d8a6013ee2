"""A request whose numbers are not finite ends with an error, and changes nothing for any other request."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from quire.config import EngineConfig
from quire.core.engine import Engine
from quire.host import build_engine
from quire.types import EngineOutput, EngineRequest, SamplingParams
from tiny import write_tiny

SICK = 11  # the token whose embedding is NaN
SHARED = [20 + i % 7 for i in range(19)]
BACK_ENDS: dict[str, dict[str, Any]] = {
    "kernels": {},
    "kernels-one-by-one": {"cpu_replay": False},
    "reference": {"cpu_kernels": False},
}


def tiny_with(folder: Path, value: float) -> Path:
    """A tiny model in which the embedding of SICK holds `value`, and nothing else is changed."""
    write_tiny(folder)
    tensors = load_file(folder / "model.safetensors")
    name = "model.embed_tokens.weight"
    tensors["lm_head.weight"] = tensors[name].clone()  # the head stays finite
    tensors[name][SICK] = value
    save_file(tensors, folder / "model.safetensors")
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(
        config.replace('"tie_word_embeddings": true', '"tie_word_embeddings": false')
    )
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_with(tmp_path_factory.mktemp("sick"), float("nan"))


def engine_of(
    model: Path, device: str = "cpu", dtype: str = "float32", blocks: int = 40, **settings: Any
) -> Engine:
    block_size = settings.get("block_size", 4)
    base = {"block_size": block_size, "max_model_len": 64, "max_num_seqs": 4, "skip_tokenizer_init": True}
    token_bytes = 2 * 2 * 2 * 16 * (4 if dtype == "float32" else 2)  # layers, k and v, heads, dim
    config = EngineConfig(
        model=str(model), device=device, dtype=dtype, check_invariants=True,
        kv_cache_memory=blocks * block_size * token_bytes, **{**base, **settings},
    )  # fmt: skip
    return build_engine(config)[0]


def request_of(name: str, prompt: list[int], **params: Any) -> EngineRequest:
    given = SamplingParams(**{"temperature": 0.0, "max_tokens": 12, **params})
    return EngineRequest(name, prompt, given, seed=len(name))


def run(engine: Engine, requests: list[EngineRequest], rng: random.Random) -> dict[str, list[EngineOutput]]:
    """All outputs by request, which arrive at random times."""
    todo, got = requests[::-1], {request.id: [] for request in requests}
    while todo or engine.has_work:
        while todo and (rng.random() < 0.3 or not engine.has_work):
            engine.add(todo.pop())
        for output in engine.step():
            got[output.id].append(output)
    engine.check()
    return got


def tokens(outputs: list[EngineOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def healthy() -> list[EngineRequest]:
    """Requests that share a beginning, of several lengths, one of them scored."""
    return [
        request_of("a", SHARED + [1, 2, 3]),
        request_of("b", SHARED[:9], temperature=1.0, top_p=0.9, max_tokens=20),
        request_of("c", SHARED + [4] * 20, prompt_logprobs=0),
        request_of("d", [5, 6], max_tokens=30),
        request_of("e", SHARED, temperature=1.0, logprobs=1),
    ]


def culprits() -> list[EngineRequest]:
    return [
        request_of("x", SHARED + [1, SICK, 3]),
        request_of("y", [SICK, *SHARED], temperature=1.0, top_k=5, logprobs=2),
        request_of("z", SHARED + [4] * 9 + [SICK] + [4] * 10, prompt_logprobs=1),
    ]


def expected(model: Path, settings: dict[str, Any]) -> dict[str, list[EngineOutput]]:
    alone: dict[str, list[EngineOutput]] = {}
    engine = engine_of(model, prefix_caching=False, max_num_seqs=1, **settings)
    for request in healthy():
        alone |= run(engine, [request], random.Random(0))
    return alone


def check_isolation(
    model: Path, settings: dict[str, Any], more: dict[str, Any], seed: int, exact: bool = True
) -> None:
    """`exact`: tokens are those of a request that runs alone, which a GPU promises in float32 only."""
    want, rng = expected(model, settings), random.Random(seed)
    engine = engine_of(model, **{**settings, **more})
    failures = 0
    for turn in range(3):  # before, beside and behind the culprits
        batch = healthy() + (culprits() if turn < 2 else [])
        rng.shuffle(batch)
        got = run(engine, batch, rng)
        for name, alone in want.items():
            assert got[name][-1].finish_reason == "length" and len(tokens(got[name])) == len(tokens(alone))
            assert not exact or tokens(got[name]) == tokens(alone), f"{name} changed"
        scores = [
            [e.ids for o in x["c"] if o.prompt_logprobs for e in o.prompt_logprobs] for x in (got, want)
        ]
        assert (scores[0] == scores[1] or not exact) and len(scores[0]) == len(SHARED) + 19
        for name in {"x", "y", "z"} & got.keys():
            last = got[name][-1]
            assert (last.finish_reason, last.error.internal, tokens(got[name])) == ("error", True, [])
            assert "not finite (NaN or infinity)" in last.error.message
            failures += 1
        assert engine.log.totals.not_finite == failures
    assert failures == 6 and engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks


MIXES: dict[str, dict[str, Any]] = {
    "default": {},
    "chunks": {"max_num_batched_tokens": 7, "overlap": False},
    "tight": {"blocks": 17, "max_num_batched_tokens": 16},
    "large blocks": {"block_size": 64, "blocks": 4, "prefix_caching": False},
}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_others_are_not_changed(model: Path, back_end: str, mix: str) -> None:
    check_isolation(model, BACK_ENDS[back_end], MIXES[mix], seed=len(mix))


def test_what_a_culprit_computed_is_not_found_again(model: Path) -> None:
    engine, rng = engine_of(model), random.Random(0)
    run(engine, [request_of("a", SHARED)], rng)
    cached = engine.scheduler.pool.num_cached
    assert cached >= len(SHARED) // 4
    got = run(engine, [request_of("x", [*SHARED, 1, SICK, *[3] * 20])], rng)["x"]
    assert got[-1].finish_reason == "error" and got[-1].num_cached_tokens == len(SHARED) // 4 * 4
    assert engine.scheduler.pool.num_cached == cached  # what was there before it still is
    again = run(engine, [request_of("a2", SHARED)], rng)["a2"]
    assert again[-1].num_cached_tokens == (len(SHARED) - 1) // 4 * 4


def test_a_culprit_that_was_preempted_is_not_found_again(model: Path) -> None:
    """Its blocks are free, but cached, when its step is retired."""
    engine = engine_of(model)
    engine.add(request_of("x", [1] * 9 + [SICK] * 9))
    while not engine.scheduler.running:
        engine.step()
    scheduler = engine.scheduler
    victim = scheduler.running[0]
    scheduler.blocks.publish([victim], [min(victim.computed, victim.known)])
    scheduler.preempt(victim)
    assert scheduler.pool.num_cached == 4
    outputs = [output for _ in range(3) for output in engine.step()]
    assert [output.finish_reason for output in outputs] == ["error"] and scheduler.pool.num_cached == 0
    engine.check()


def test_a_vector_that_is_not_finite_is_an_error(model: Path) -> None:
    engine, rng = engine_of(model), random.Random(0)

    def pooled(name: str, prompt: list[int], pooling: str) -> EngineRequest:
        return replace(request_of(name, prompt, max_tokens=1), pooling=pooling)

    fine = [pooled("m", [1, 2, 3], "mean"), pooled("l", [4, 5], "last")]
    want = {r.id: run(engine, [r], rng)[r.id][-1].pooled for r in fine}
    sick = [pooled("x", [1, SICK, 3], "mean"), pooled("y", [SICK], "last")]
    for _ in range(2):  # the slots' sums are used again
        got = run(engine, [sick[0], fine[0], sick[1], fine[1]], rng)
        assert {name: got[name][-1].pooled for name in want} == want
        assert [got[name][-1].finish_reason for name in "xy"] == ["error", "error"]


def test_overflow_in_float16(tmp_path: Path) -> None:
    """Numbers that bfloat16 and float32 hold."""
    model = tiny_with(tmp_path / "large", 1e5)
    check_isolation(model, {"cpu_kernels": False, "dtype": "float16"}, {}, seed=1)
    fine = run(engine_of(model), culprits(), random.Random(0))
    assert {outputs[-1].finish_reason for outputs in fine.values()} == {"length"}


def test_a_request_that_may_sample_nothing_is_an_error(model: Path) -> None:
    engine = engine_of(model)
    stuck = request_of("s", [1, 2], allowed_token_ids=[9], min_tokens=3, temperature=1.0)
    stuck.stop_ids = [9]
    got = run(engine, [stuck, request_of("a", SHARED)], random.Random(0))
    last = got["s"][-1]
    assert (last.finish_reason, last.error.internal, tokens(got["s"])) == ("error", False, [])
    assert "every token is excluded" in last.error.message
    assert len(tokens(got["a"])) == 12 and engine.log.totals.not_finite == 0


@pytest.mark.gpu
@pytest.mark.parametrize("sick", [SICK, 0])  # 0 is what padding reads
@pytest.mark.parametrize(
    ("value", "dtype"), [(float("nan"), "float32"), (float("nan"), "bfloat16"), (1e5, "float16")]
)
@pytest.mark.parametrize("graphs", [True, False])
def test_others_are_not_changed_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sick: int, value: float, dtype: str, graphs: bool
) -> None:
    monkeypatch.setattr(f"{__name__}.SICK", sick)
    model = tiny_with(tmp_path / "model", value)
    settings = {"device": "cuda", "dtype": dtype, "cuda_graphs": graphs}
    for mix in ("default", "chunks", "tight"):
        check_isolation(model, settings, MIXES[mix], seed=4, exact=dtype == "float32")
