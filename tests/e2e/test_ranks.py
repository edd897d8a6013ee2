"""Engines over several processes: the tokens are those of one rank, and a failed rank leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from quire import LLM, EngineConfig, SamplingParams
from quire.core.engine import Engine
from quire.host import build_engine
from quire.types import ConfigError, EngineDead, EngineRequest, ModelError, StructuredOutputsParams
from tiny import CONFIG, write_hybrid, write_tiny

BASE: dict[str, Any] = {"device": "cpu", "dtype": "float32", "cpu_threads": 1}
pytestmark = pytest.mark.usefixtures("no_process_is_left")
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
PROMPT = list(range(300, 420))


def demo(**settings: Any) -> LLM:
    """Return an engine with room for little more than one longest request, so that requests are preempted."""
    return LLM(
        "demo", **BASE, max_model_len=256, max_num_seqs=4, max_num_batched_tokens=64, check_invariants=True, **settings
    )  # fmt: skip


@pytest.fixture(scope="module")
def one() -> Iterator[LLM]:
    with demo(kv_cache_memory=BLOCKS * BLOCK_BYTES) as llm:
        yield llm


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def two(disk: Path) -> Iterator[LLM]:
    """Two ranks, each with its part of evicted blocks in its host memory and its files."""
    llm = demo(
        kv_cache_memory=BLOCKS * BLOCK_BYTES // 2,
        tensor_parallel_size=2,
        kv_host_memory=2 * BLOCKS * BLOCK_BYTES / 1e9,
        kv_disk=str(disk),
    )
    yield llm
    llm.client.close()


BLOCKS = 20
BLOCK_BYTES = 16 * 2 * 7 * 2 * 64 * 4  # tokens, tensors, layers, K/V heads, dimensions, bytes


def answers(llm: LLM, prompts: list[Any], params: list[SamplingParams]) -> list[Any]:
    """Return what the engine generates: tokens, and log-probabilities rounded to what rounding errors leave."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    found: list[Any] = []
    for output in outputs:
        for choice in output.outputs:
            entries = [*(choice.logprobs or ()), *(p for p in output.prompt_logprobs or () if p)]
            values = [[(t, round(entry.logprob, 3), entry.rank) for t, entry in e.items()] for e in entries]
            found.append((choice.token_ids, choice.finish_reason, values))
    return found


def test_two_ranks_answer_as_one(one: LLM, two: LLM) -> None:
    """Greedy and seeded requests together, with preemption, and again with their prefixes cached."""
    assert two.info.num_blocks == one.info.num_blocks == BLOCKS
    assert [{"import", "load", "allocate"} <= spans.keys() for spans in two.info.rank_phases_s] == [
        True,
        True,
    ]
    prompts = [PROMPT[: 40 + 9 * i] for i in range(8)]
    params = [
        SamplingParams(max_tokens=48, temperature=0.9 * (i % 2), top_p=0.9, seed=i, ignore_eos=True)
        for i in range(8)
    ]
    for _ in range(2):
        assert answers(two, prompts, params) == answers(one, prompts, params)


def test_each_rank_keeps_its_part_of_evicted_blocks(one: LLM, two: LLM, disk: Path) -> None:
    prompts = [[(7 * i + j) % 400 for j in range(150)] for i in range(5)]
    params = [SamplingParams(max_tokens=8, temperature=0.0)] * 5
    for _ in range(2):
        assert answers(two, prompts, params) == answers(one, prompts, params)
    again = two.generate(prompts, params, use_tqdm=False)
    assert sum(output.num_cached_tokens or 0 for output in again) > BLOCKS * 16, "more than the device holds"
    assert len([folder for folder in disk.iterdir() if list(folder.glob("*.kv"))]) == 2


@pytest.fixture(scope="module")
def staged() -> Iterator[LLM]:
    """Two stages, of which the second has less memory than one rank, in spite of the same settings."""
    llm = demo(kv_cache_memory=BLOCKS * BLOCK_BYTES * 4 // 7, pipeline_parallel_size=2)
    yield llm
    llm.client.close()


def test_two_stages_answer_as_one_rank(one: LLM, staged: LLM) -> None:
    """As above; several steps are in flight, and chunks of a prompt follow each other."""
    assert staged.info.num_blocks == BLOCKS
    prompts = [PROMPT[: 40 + 9 * i] for i in range(8)]
    params = [
        SamplingParams(max_tokens=32, temperature=0.9 * (i % 2), top_p=0.9, seed=i, ignore_eos=True)
        for i in range(8)
    ]
    for _ in range(2):
        assert answers(staged, prompts, params) == answers(one, prompts, params)


HOST_WORK: list[dict[str, Any]] = [
    {"logprobs": 3, "prompt_logprobs": 2},
    {"n": 2, "temperature": 1.0, "seed": 5, "repetition_penalty": 1.2},
    {"structured_outputs": StructuredOutputsParams(json=SCHEMA)},
]


def test_stages_with_what_the_host_takes_part_in(one: LLM, staged: LLM) -> None:
    params = [SamplingParams(**{"max_tokens": 12, "temperature": 0, **settings}) for settings in HOST_WORK]
    prompts = ["Once upon a time", "The sea was", "A house"]
    assert answers(staged, prompts, params) == answers(one, prompts, params)
    (a,), (b,) = one.embed(["The sea"]), staged.embed(["The sea"])
    assert a == pytest.approx(b, abs=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"tensor_parallel_size": 2, "overlap": False},
        {"spec_method": "ngram", "spec_tokens": 3},
        {"kv_layout": "none", "max_num_batched_tokens": 256},
    ],
)
def test_stages_combine_with(folder: Path, settings: dict[str, Any]) -> None:
    assert run(tiny(folder, pipeline_parallel_size=2, **settings)) == run(tiny(folder))


@pytest.mark.parametrize(
    "settings",
    [
        {"logprobs": 3, "prompt_logprobs": 2},
        {"n": 2, "temperature": 1.0, "seed": 5, "repetition_penalty": 1.2},
        {"structured_outputs": StructuredOutputsParams(json=SCHEMA)},
        {"min_tokens": 4, "logit_bias": {7: 3.0}, "bad_words": ["the"]},
    ],
)
def test_what_the_host_takes_part_in(one: LLM, two: LLM, settings: dict[str, Any]) -> None:
    params = [SamplingParams(**{"max_tokens": 12, "temperature": 0, **settings}) for _ in range(2)]
    prompts = ["Once upon a time", "The sea was"]
    assert answers(two, prompts, params) == answers(one, prompts, params)


def test_embeddings(one: LLM, two: LLM) -> None:
    for a, b in zip(one.embed(["The sea", "A hill"]), two.embed(["The sea", "A hill"])):
        assert a == pytest.approx(b, abs=1e-5)


def run(engine: Engine, count: int = 6) -> dict[str, list[int]]:
    for i in range(count):
        params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        engine.add(EngineRequest(f"r{i}", [(7 * i + 3 * n) % 250 for n in range(5 + 11 * i)], params))
    tokens: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            tokens.setdefault(output.id, []).extend(output.token_ids)
    return tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


def tiny(folder: Path, **settings: Any) -> Engine:
    """Return an engine, whose ranks end at the latest when the caller lets go of it."""
    base = {"kv_cache_memory": 1 << 19, "skip_tokenizer_init": True, "max_num_batched_tokens": 48}
    return build_engine(EngineConfig(**{"model": str(folder), **BASE, **base, **settings}))[0]


def test_ranks_cut_states(tmp_path: Path) -> None:
    """Channels of convolutions are cut, with prefixes from snapshots and drafts that are rejected."""
    write_hybrid(tmp_path)
    found, hits = [], []
    for ranks in (1, 2):
        engine = tiny(
            tmp_path, tensor_parallel_size=ranks, max_model_len=128, spec_method="ngram", spec_tokens=3
        )
        found.append([run(engine), run(engine)])
        hits.append(engine.log.totals.cached_tokens)
        assert engine.log.totals.draft_tokens > engine.log.totals.accepted_tokens
        engine.close()
    assert found[0] == found[1] and found[0][0] == found[0][1]
    assert hits[0] == hits[1] > 0


def children() -> list[psutil.Process]:
    return [p for p in psutil.Process().children(recursive=True) if "quire.rank_process" in p.cmdline()]


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive


def test_four_ranks_share_two_heads_and_end_with_the_engine(folder: Path) -> None:
    before = set(children())
    engine = tiny(folder, tensor_parallel_size=4)
    ranks = [p for p in children() if p not in before]
    assert len(ranks) == 3
    assert run(engine) == run(tiny(folder))
    engine.close()
    assert_gone(ranks)


@pytest.mark.parametrize(
    ("sign", "timeout_s", "words", "kind"),
    [
        (signal.SIGKILL, 60.0, "ended with signal SIGKILL", "tensor_parallel_size"),
        (signal.SIGSTOP, 1.5, "made no progress", "tensor_parallel_size"),
        (signal.SIGKILL, 60.0, "ended with signal SIGKILL", "pipeline_parallel_size"),
        (signal.SIGSTOP, 1.5, "made no progress", "pipeline_parallel_size"),
    ],
)
def test_a_failed_rank_ends_the_engine_with_its_name(
    folder: Path, sign: signal.Signals, timeout_s: float, words: str, kind: str
) -> None:
    before = set(children())
    engine = tiny(folder, rank_timeout=timeout_s, overlap=sign == signal.SIGKILL, **{kind: 2})
    (rank,) = (p for p in children() if p not in before)
    assert run(engine, 2)
    rank.send_signal(sign)
    with pytest.raises(EngineDead, match=rf"rank 1 \(process {rank.pid}\) {words}"):
        run(engine)
    assert_gone([rank])
    engine.close()


def test_a_killed_engine_takes_its_ranks_along(folder: Path) -> None:
    before = set(children())
    llm = LLM(folder, **BASE, kv_cache_memory=1 << 19, tensor_parallel_size=2)
    (rank,) = (p for p in children() if p not in before)
    os.kill(rank.ppid(), signal.SIGKILL)
    assert_gone([rank])
    with pytest.raises(EngineDead):
        llm.generate("Hi", use_tqdm=False)


def test_sizes_that_do_not_divide_are_refused_before_anything_starts(folder: Path) -> None:
    before = set(children())
    with pytest.raises(ModelError, match=r"over 3 ranks: heads 4, K/V heads 2 must be multiples of 3"):
        tiny(folder, tensor_parallel_size=3)
    with pytest.raises(ConfigError, match="tensor_parallel_size must be an integer of at least 1"):
        EngineConfig(tensor_parallel_size=0)
    assert set(children()) == before


@pytest.mark.parametrize("settings", [{"expert_exchange": "all-to-all"}, {"quantization": "int8"}])
def test_two_ranks_with_whole_experts_answer_as_one(tmp_path: Path, settings: dict[str, Any]) -> None:
    moe = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 5}
    moe |= {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    sizes = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 64}
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **moe, **sizes}))
    settings = {"load_format": "dummy", "skip_tokenizer_init": True, **settings}
    plain = {key: value for key, value in settings.items() if key != "expert_exchange"}
    spread = tiny(tmp_path, tensor_parallel_size=2, enable_expert_parallel=True, **settings)
    assert run(spread, 3) == run(tiny(tmp_path, **plain), 3)
    spread.close()


def test_experts_that_cannot_be_spread_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="needs a model with experts"):
        tiny(folder, tensor_parallel_size=2, enable_expert_parallel=True)
    with pytest.raises(ConfigError, match="all-to-all needs enable_expert_parallel"):
        EngineConfig(expert_exchange="all-to-all")


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_two_gpus_answer_as_one(cuda_graphs: bool) -> None:
    """Steps of one token and long prompts: own kernel, two-shot sums and NCCL, in graphs and eagerly."""
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    prompts = [[(7 * i + 3 * n) % 1500 + 300 for n in range(20 + 90 * i)] for i in range(12)]
    params = [
        SamplingParams(max_tokens=40, temperature=0.8 * (i % 2), seed=i, ignore_eos=True, logprobs=i % 3)
        for i in range(12)
    ]
    found = []
    for ranks in (1, 2):
        llm = LLM(
            "demo",
            dtype="float32",
            cuda_graphs=cuda_graphs,
            kv_cache_memory=1 << 28,
            tensor_parallel_size=ranks,
            engine_process=True,
        )
        found.append([o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)])
        llm.client.close()
    assert found[0] == found[1]
