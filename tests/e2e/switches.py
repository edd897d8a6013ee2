"""The switch matrix's machinery: a fixed set of requests, engines under any settings, random loads.

Requests are the same in every run, so each is decoded alone once (the expectation) and then under every
mix of switches, arrivals and block pools. Used by the tests on the CPU and on a GPU.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import quire.host
import quire.rank
from quire.config import EngineConfig
from quire.core.engine import Engine
from quire.host import build_engine
from quire.models.config.load import load_spec
from quire.models.spec import ModelSpec
from quire.types import EngineRequest, SamplingParams

MAX_LEN = 128
# What is varied, each with its values; the first is the default.
SWITCHES: dict[str, tuple[Any, ...]] = {
    "batching": ("continuous", "static"),
    "kv_layout": ("paged", "contiguous", "none"),
    "block_size": (16, 1, 5),
    "chunked_prefill": (None, True, False),
    "max_num_batched_tokens": (None, 8, 48),
    "mixed_prefill_tokens": (None, 6),
    "target_itl": (None, 2.0),
    "prefill_slowdown": (None, 1.5),
    "prefix_caching": (None, True, False),
    "eviction": ("lru", "fifo"),
    "scheduling_policy": ("fcfs", "priority"),
    "overlap": (True, False),
    "max_num_seqs": (8, 1, 3),
    "cpu_kernels": (True, False),
    "cpu_replay": (True, False),
    "blocks": ("plenty", "tight"),  # not a field: how much kv_cache_memory there is
}
# Methods that need no checkpoint; test_draft_methods.py has the others.
WITH_DRAFTS = SWITCHES | {"spec_method": ("off", "ngram", "suffix"), "spec_adaptive": (True, False)}
GPU_SWITCHES = WITH_DRAFTS | {
    "cuda_graphs": (True, False),
    "capture_at_start": (False, True),
    "shared_prefix": (True, False),
}
_ALONE = {"overlap": False, "max_num_seqs": 1, "kv_layout": "contiguous", "prefix_caching": False}
_ALONE |= {"cpu_kernels": False, "cpu_replay": False}


def legal(settings: dict[str, Any]) -> bool:
    """Return whether the combination is one that the engine accepts (the refusals have tests of their own)."""
    none = settings["kv_layout"] == "none"
    if none and (
        settings["chunked_prefill"]
        or settings["prefix_caching"]
        or settings.get("spec_method", "off") != "off"
    ):
        return False
    whole = settings["chunked_prefill"] is False or none
    if settings["target_itl"] and (whole or settings["mixed_prefill_tokens"]):
        return False
    if settings["prefill_slowdown"] and whole:
        return False
    return not (whole and (settings["max_num_batched_tokens"] or settings["mixed_prefill_tokens"]))


def defaults() -> dict[str, Any]:
    return {name: values[0] for name, values in SWITCHES.items()}


def random_settings(rng: random.Random, switches: dict[str, tuple[Any, ...]] = WITH_DRAFTS) -> dict[str, Any]:
    """A legal full combination; small block pools and paging are drawn more often than the rest."""
    while True:
        settings = {name: rng.choice(values) for name, values in switches.items()}
        settings["blocks"] = rng.choice(("tight", "tight", "plenty"))
        settings["kv_layout"] = rng.choice(("paged", settings["kv_layout"]))
        if settings["prefix_caching"] is not False and settings["kv_layout"] != "none":
            settings["kv_host_memory"] = rng.choice((None, 0.002, 0.02))
        if legal(settings):
            return settings


class Bench:
    """One model, with kernels of a CPU and without, shared by the engines of all settings."""

    def __init__(
        self,
        model: str,
        device: str = "cpu",
        dtype: str = "float32",
        requests: list[EngineRequest] | None = None,
        windows: tuple[int | None, ...] | None = None,
        **always: Any,
    ) -> None:
        """`windows` replaces the attention windows of the model's layers; `always` are settings of all engines."""
        self._windows = windows
        self.device = device
        self._base = {"model": model, "device": device, "dtype": dtype, "max_model_len": MAX_LEN, **always}
        # Codes turn the last bit of a key into a whole step of rounding, which may decide a near tie of two tokens.
        self.tolerated = 1 if "kv_cache_dtype" in always else 0  # requests per run
        self._loaded: dict[bool, Any] = {}
        self._original = quire.rank.load_model
        self.expect(requests or make_requests(random.Random(7)))
        assert any(len(tokens) > 20 for tokens in self.expected.values())

    def expect(self, requests: list[EngineRequest]) -> None:
        """Decode each of the requests alone, and run these from now on."""
        engine = self.engine({**defaults(), **_ALONE, "cuda_graphs": False})
        self.token_bytes = self.info.block_bytes // self.info.block_size
        self.requests, self.expected = requests, dict[str, list[int]]()
        for request in requests:
            engine.add(request)
            self.expected[request.id] = drain(engine)[request.id]

    def engine(self, settings: dict[str, Any]) -> Engine:
        settings = dict(settings)
        blocks = settings.pop("blocks", "plenty")
        if blocks == "tight":  # room for one longest request, and a little more: preemption is forced
            layers = 1 if settings["kv_layout"] != "none" else self.num_layers
            settings["kv_cache_memory"] = (MAX_LEN + settings["block_size"]) * self.token_bytes // layers
        else:
            settings["kv_cache_memory"] = 64 << 20
        quire.rank.load_model = self._load  # type: ignore[assignment]
        quire.host.load_spec = self._load_spec
        try:
            engine, self.info = build_engine(EngineConfig(**self._base, **settings, check_invariants=True))
        finally:
            quire.rank.load_model, quire.host.load_spec = self._original, load_spec
        return engine

    def _load_spec(self, path: Path) -> ModelSpec:
        spec = load_spec(path)
        return spec if self._windows is None else replace(spec, windows=self._windows)

    def _load(self, config: EngineConfig, *args: Any, **kwargs: Any) -> Any:
        if config.cpu_kernels not in self._loaded:
            self._loaded[config.cpu_kernels] = loaded = self._original(config, *args, **kwargs)
            self.num_layers = len(loaded[0].attention_layers)
        return self._loaded[config.cpu_kernels]

    def run(self, settings: dict[str, Any], seed: int) -> Engine:
        """Random arrivals and aborts under `settings`; raises AssertionError on any difference."""
        rng = random.Random(seed)
        engine = self.engine(settings)
        todo = rng.sample(self.requests, rng.randrange(3, 12))
        got: dict[str, list[int]] = {}
        aborted: set[str] = set()
        ended: set[str] = set()
        while todo or engine.has_work:
            while todo and (rng.random() < 0.4 or not engine.has_work):
                got[todo[-1].id] = []
                engine.add(todo.pop())
            if rng.random() < 0.02 and (live := sorted(set(got) - ended)):
                aborted.add(rng.choice(live))
                engine.abort(next(iter(aborted - ended)))
            for output in engine.step():
                got[output.id] += output.token_ids
                if output.finish_reason:
                    assert output.id not in ended
                    ended.add(output.id)
        assert ended == set(got)
        differing: list[str] = []
        for name, tokens in got.items():
            want = self.expected[name]
            want = want[: len(tokens)] if name in aborted else want
            if tokens != want:
                differing.append(name)
        found = f"{', '.join(differing)} differ under {settings} (load {seed})"
        assert len(differing) <= self.tolerated, found
        engine.check()
        return engine


def drain(engine: Engine) -> dict[str, list[int]]:
    got: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            got.setdefault(output.id, []).extend(output.token_ids)
    return got


def make_requests(rng: random.Random) -> list[EngineRequest]:
    """Greedy and seeded requests; some share beginnings, some are n answers to one prompt."""
    shared = [rng.randrange(300, 1500) for _ in range(40)]
    out = []
    for i in range(20):
        prompt = shared[: rng.choice([5, 16, 33, 40])] if i % 2 else []
        prompt = prompt + [rng.randrange(300, 1500) for _ in range(rng.choice([1, 3, 12, 25]))]
        greedy = i % 3 == 0
        params = SamplingParams(
            temperature=0.0 if greedy else rng.choice([0.7, 1.0]),
            top_p=rng.choice([1.0, 0.9]),
            top_k=rng.choice([0, 20]),
            min_p=rng.choice([0.0, 0.0, 0.05]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
            frequency_penalty=rng.choice([0.0, 0.0, 0.5]),
            max_tokens=rng.choice([1, 9, 30, 56, 56]),
            min_tokens=rng.choice([0, 1]),
            logprobs=rng.choice([None, None, 2]),
        )
        stops = [0, 1, 2, 3] if i % 5 == 0 else []
        out.append(
            EngineRequest(f"r{i}", prompt, params, stops, stops, seed=rng.randrange(1 << 40), priority=i % 3)
        )
    for j in range(3):  # n = 3
        params = SamplingParams(temperature=0.8, max_tokens=12)
        out.append(EngineRequest(f"n{j}", shared[:33], params, seed=1000 + j))
    return out
