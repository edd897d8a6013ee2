"""The switch matrix over ranks: tensor, pipeline, expert and data parallelism, with any other switch, change no token.

Each case is a kind of ranks, a kind of model and a value of every switch. The cases cover all pairs of values; replicas,
which do not know of each other, are paired with every value of the switches. Ranks and engine processes are threads
(thread_engine.py, thread_replicas.py), so a case takes a second. Compared in float32 with one rank that runs a request
at a time, without any of the switches.
"""

from __future__ import annotations

import itertools
import os
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_models import CONFIGS, loud_weights, write_model  # noqa: F401
from test_speculation import AnswerDrafter

import quire.rank
from quire import EngineConfig
from quire.core.engine import Engine
from quire.speculation.drafter import Speculation
from quire.types import EngineRequest, SamplingParams, StructuredOutputsParams, Totals
from thread_engine import thread_engine
from thread_replicas import ReplicatedEngine, thread_replicas

RANKS: dict[str, dict[str, Any]] = {
    "TP 2": {"tensor_parallel_size": 2},
    "TP 4": {"tensor_parallel_size": 4},
    "PP 2": {"pipeline_parallel_size": 2},
    "PP 4": {"pipeline_parallel_size": 4},
    "PP 2 x TP 2": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
    "EP 2": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "EP 2, exchanged": {
        "tensor_parallel_size": 2, "enable_expert_parallel": True, "expert_exchange": "all-to-all",
    },
}  # fmt: skip
REPLICAS: dict[str, dict[str, Any]] = {"DP 2": {"data_parallel_size": 2}}
KINDS = RANKS | REPLICAS
IN_EVERY_RUN = {"PP 2"}  # tensor and expert parallelism have shorter tests in test_ranks.py
WITH_EXPERTS = {"moe", "hybrid", "latent"}
MAX_LEN, BLOCK = 128, 16
# The values of each switch; the first is the default.
FACTORS: dict[str, tuple[Any, ...]] = {
    "ranks": tuple(RANKS),
    "model": ("demo", *CONFIGS),
    "step_tokens": (256, 24),
    "prefix_caching": (True, False),
    "overlap": (True, False),
    "blocks": ("plenty", "tight"),
    "drafts": ("off", "ngram", "answers", "draft"),
    "quantization": ("auto", "int4"),
    "kv_cache_dtype": ("auto", "int8"),
    "host_memory": (False, True),
}
Case = dict[str, Any]


def legal(case: Case) -> bool:
    """Return whether the engine accepts a case."""
    if case["ranks"].startswith("EP") and case["model"] not in WITH_EXPERTS:
        return False
    if case["drafts"] == "draft" and case["model"] != "demo":  # the only one with a draft model
        return False
    if case["model"] == "latent" and case["kv_cache_dtype"] != "auto":  # its entries are small already
        return False
    return case["prefix_caching"] or not case["host_memory"]


def pairs_of(case: Case) -> set[Any]:
    return set(itertools.combinations(case.items(), 2))


def all_pairs(factors: dict[str, tuple[Any, ...]]) -> set[Any]:
    """Return every pair of values of two factors."""
    found: set[Any] = set()
    for (a, xs), (b, ys) in itertools.combinations(factors.items(), 2):
        found |= {((a, x), (b, y)) for x in xs for y in ys}
    return found


def pairs_with(kind: str) -> set[Any]:
    """Return every pair of a kind of ranks and a value of a switch."""
    return {pair for pair in all_pairs(FACTORS | {"ranks": (kind,)}) if ("ranks", kind) in pair}


def cover(missing: set[Any], rng: random.Random) -> list[Case]:
    """Return cases that contain every legal pair of `missing`, chosen greedily among random ones."""
    missing = set(missing)
    cases: list[Case] = []
    for pair in sorted(missing, key=str):
        if pair not in missing:
            continue
        drawn = [{name: rng.choice(values) for name, values in FACTORS.items()} for _ in range(100)]
        drawn = [case for case in ({**one, **dict(pair)} for one in drawn) if legal(case)]
        if drawn:  # else the pair itself is not legal
            found = max(drawn, key=lambda case: len(pairs_of(case) & missing))
            missing -= pairs_of(found)
            cases.append(found)
    return cases


CASES = cover(all_pairs(FACTORS), random.Random(1)) + cover(pairs_with("DP 2"), random.Random(2))


def make_requests(model: str) -> list[EngineRequest]:
    """Return greedy and seeded requests, some with a common beginning; the demo model also gets a schema."""
    rng = random.Random(5)
    low, high = (300, 1500) if model == "demo" else (3, 250)
    shared = [rng.randrange(low, high) for _ in range(50)]
    requests = []
    for i in range(6):
        prompt = shared[: 20 + 10 * (i % 4)] if i % 2 else []
        prompt = prompt + [rng.randrange(low, high) for _ in range(3 + 7 * i)]
        params = SamplingParams(
            temperature=0.8 * (i % 3 == 2), max_tokens=(9, 24, 16)[i % 3], ignore_eos=True
        )
        requests.append(EngineRequest(f"r{i}", prompt, params, seed=i))
    if model == "demo":
        schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
        params = SamplingParams(
            temperature=0, max_tokens=14, structured_outputs=StructuredOutputsParams(json=schema)
        )
        requests.append(EngineRequest("schema", [400, 500, 600], params, stop_ids=[2], eos_ids=[2]))
    return requests


def serve(
    engine: Engine | ReplicatedEngine, requests: list[EngineRequest], rng: random.Random
) -> dict[str, list[int]]:
    """Run requests that arrive at random, and return their tokens."""
    todo = rng.sample(requests, len(requests))
    got: dict[str, list[int]] = {}
    while todo or engine.has_work:
        while todo and (rng.random() < 0.5 or not engine.has_work):
            engine.add(todo.pop())
        for output in engine.step():
            assert output.finish_reason != "error", output
            got.setdefault(output.id, []).extend(output.token_ids)
    return got


@contextmanager
def open_engine(config: EngineConfig) -> Iterator[Engine | ReplicatedEngine]:
    """Build the engine or the replicas of a configuration out of threads, and close them at the end."""
    if config.data_parallel_size > 1:
        with thread_replicas(config) as replicas:
            yield replicas
    else:
        with thread_engine(config) as (engine, _):
            yield engine


class Matrix:
    """The models of all cases, and what one rank answers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._expected: dict[Any, dict[str, list[int]]] = {}
        self._block_bytes: dict[Any, tuple[int, int]] = {}
        self.covered = Counter[str]()

    def _base(self, case: Case) -> dict[str, Any]:
        base: dict[str, Any] = {
            "device": "cpu", "dtype": "float32", "cpu_threads": 1, "max_model_len": MAX_LEN, "max_num_seqs": 6,
            "check_invariants": True, "rank_timeout": 30.0, "kv_cache_memory": 1 << 24, "model": case["model"],
            "quantization": case["quantization"], "kv_cache_dtype": case["kv_cache_dtype"],
            "cpu_kernels": case["quantization"] == "auto",  # those for codes round their inputs to codes, too
        }  # fmt: skip
        if case["model"] != "demo":
            model = write_model(case["model"], self._folder / case["model"])
            base |= {"model": str(model), "load_format": "dummy", "skip_tokenizer_init": True}
        return base

    def expected(self, case: Case) -> dict[str, list[int]]:
        """Return the answers of one rank that runs one request at a time.

        Converted weights have scales for each rank's part of a row, so those answers are of as many ranks.
        """
        ranks = {} if case["quantization"] == "auto" else dict(KINDS[case["ranks"]])
        for whole in ("pipeline_parallel_size", "data_parallel_size"):
            ranks.pop(whole, None)
        key = case["model"], case["quantization"], case["kv_cache_dtype"], str(ranks)
        if key not in self._expected:
            found = self._expected[key] = {}
            plain = {"max_num_seqs": 1, "prefix_caching": False, "overlap": False}
            with thread_engine(EngineConfig(**self._base(case) | plain | ranks)) as (engine, _):
                for request in make_requests(case["model"]):
                    found |= serve(engine, [request], random.Random(0))
            assert len({token for tokens in found.values() for token in tokens}) > 12, "answers are too alike"
        return self._expected[key]

    def _tight(self, case: Case, settings: dict[str, Any]) -> int:
        """Return the kv_cache_memory of each rank that holds little more than one longest request."""
        key = case["model"], case["ranks"], case["kv_cache_dtype"], case["drafts"] == "draft"
        if key not in self._block_bytes:
            probe = settings | {"max_num_seqs": 512, "kv_host_memory": None, "data_parallel_size": 1}
            with thread_engine(EngineConfig(**probe)) as (_, info):
                self._block_bytes[key] = settings["kv_cache_memory"] // info.num_blocks, len(info.kv_groups)
        block_bytes, groups = self._block_bytes[key]
        return block_bytes * (MAX_LEN // BLOCK * groups + 1)

    def settings(self, case: Case) -> dict[str, Any]:
        """Return the settings of the engine of a case."""
        settings = self._base(case) | KINDS[case["ranks"]]
        settings |= {name: case[name] for name in ("prefix_caching", "overlap")}
        settings["max_num_batched_tokens"] = case["step_tokens"]
        if case["drafts"] == "draft":
            settings |= {"spec_method": "draft", "spec_model": "demo-draft", "spec_tokens": 3}
        elif case["drafts"] != "off":
            settings |= {"spec_method": "ngram", "spec_tokens": 3, "spec_adaptive": False}
        if case["host_memory"]:
            settings["kv_host_memory"] = 0.004
        if case["blocks"] == "tight":
            settings["kv_cache_memory"] = self._tight(case, settings)
        return settings

    def run(self, case: Case, seed: int) -> Totals:
        """Serve the requests twice with the settings of a case; raise AssertionError if any token differs."""
        expected, requests = self.expected(case), make_requests(case["model"])
        with pytest.MonkeyPatch.context() as patch:
            if case["drafts"] == "answers":
                answers = [list(request.prompt) + expected[request.id] for request in requests]
                drafts = Speculation(lambda context: AnswerDrafter(context, answers), 3)
                patch.setattr(quire.rank, "pick_speculation", lambda config, load: drafts)
            with open_engine(EngineConfig(**self.settings(case))) as engine:
                for turn in range(2):
                    got = serve(engine, requests, random.Random(seed + turn))
                    wrong = [name for name, tokens in got.items() if tokens != expected[name]]
                    # The last bit of a sum may turn a code of the KV cache, and that a near tie of two tokens.
                    tolerated = int(case["kv_cache_dtype"] != "auto")
                    assert len(wrong) <= tolerated, f"{wrong} differ under {case} in turn {turn}"
                return engine.log.totals


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    torch.set_num_threads(1)
    yield Matrix(tmp_path_factory.mktemp("models"))


def _ranks(name: str) -> Any:
    """Return a parameter that is skipped unless QUIRE_ALL_RANKS is 1, or the ranks are those of every run."""
    skip = name not in IN_EVERY_RUN and os.environ.get("QUIRE_ALL_RANKS") != "1"
    return pytest.param(
        name, marks=pytest.mark.skipif(skip, reason="`make test-ranks` runs all kinds of ranks")
    )


@pytest.mark.usefixtures("loud_weights")
@pytest.mark.timeout(900)  # kinds of four ranks take long on a busy machine
@pytest.mark.parametrize("ranks", [_ranks(name) for name in KINDS])
def test_every_pair_of_switches(matrix: Matrix, ranks: str) -> None:
    seen = Counter[str]()
    for seed, case in enumerate(CASES):
        if case["ranks"] != ranks:
            continue
        totals = matrix.run(case, seed)
        seen["cached"] += totals.cached_tokens
        seen["rejected"] += totals.draft_tokens - totals.accepted_tokens
        seen["accepted"] += totals.accepted_tokens
    assert all(seen[name] for name in ("cached", "rejected", "accepted")), seen


@pytest.mark.usefixtures("loud_weights")
@pytest.mark.parametrize("ranks", [_ranks("TP 2"), "PP 2"])
@pytest.mark.parametrize("model", ["demo", "windows", "states"])
def test_blocks_of_preempted_requests_come_back_from_host_memory(
    matrix: Matrix, ranks: str, model: str
) -> None:
    case = {name: values[0] for name, values in FACTORS.items()}
    case |= {"ranks": ranks, "model": model, "blocks": "tight", "host_memory": True}
    totals = matrix.run(case, 3)
    assert totals.moved_bytes["save"]
    assert totals.preemptions or model == "windows"
    # Few blocks with a snapshot at their end are evicted here; test_states_in_tiers.py evicts all of them.
    assert totals.fetched_tokens or model == "states"


def test_the_cases_contain_all_pairs() -> None:
    covered = set().union(*(pairs_of(case) for case in CASES))
    for ranks, model in itertools.product(KINDS, FACTORS["model"]):
        is_legal = not ranks.startswith("EP") or model in WITH_EXPERTS
        assert ((("ranks", ranks), ("model", model)) in covered) == is_legal
    assert len(CASES) < 80 and all(legal(case) for case in CASES)
