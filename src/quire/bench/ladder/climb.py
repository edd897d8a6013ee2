"""The climb: each rung's load on the engine of the rung below and on its own, in turns, and what that showed."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from quire.bench.cost import Machine
from quire.bench.drive import Bench
from quire.bench.ladder.likeness import Likeness, NaiveAnswers, compare, naive_answers
from quire.bench.ladder.rungs import BATCH, RUNGS, LadderScale, Rung, settings_of
from quire.bench.load.workloads import MAX_RANDOM_ID
from quire.bench.metrics import serving
from quire.bench.run import Run
from quire.config import EngineConfig
from quire.frontend.location import locate_model
from quire.models.config.load import load_spec
from quire.types import ConfigError, ModelError

_REPEATS = 3
_GREEDY = {"temperature": 0.0}
_FIGURES = ("output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms")
_MAX_LEN = {False: 2048, True: 4096}  # longest context of the climb, quick and full


@dataclass(frozen=True, slots=True)
class RungResult:
    """What a rung showed. The figures are medians over the repeats."""

    name: str
    idea: str
    shown_by: str
    headline: str
    headline_label: str
    more_is_better: bool
    before: dict[str, float | None] | None  # on the engine of the rung below; None for the first
    after: dict[str, float | None]
    gain: float | None  # factor by which the headline improved; the median of the pairs
    gains: list[float]  # of each pair
    likeness: Likeness
    kv_bytes: int  # of the KV cache in use at the load's peak
    weight_bytes: int
    settings: dict[str, Any]
    files: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        """Return the result for a JSON file."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class SkippedRung:
    """A rung that this machine or model does not allow."""

    name: str
    idea: str
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """Return the rung for a JSON file."""
        return asdict(self)


class Ladder:
    """The rungs over one model. Two engines are alive at a time.

    Args:
        base: settings that the rungs do not choose.
        machine: its limits, which no figure of the ladder uses.
        is_full: real sizes instead of those for a small model on a CPU.
        on_gpu: whether the engines run on a GPU.
        repeats: pairs of runs per rung.
    """

    def __init__(
        self, base: EngineConfig, machine: Machine, is_full: bool, on_gpu: bool, repeats: int = _REPEATS
    ) -> None:
        spec = load_spec(locate_model(base.model, base.revision).path)
        longest = min(base.max_model_len or _MAX_LEN[is_full], spec.max_model_len)
        vocab, gpus = min(spec.vocab_size, MAX_RANDOM_ID), torch.cuda.device_count() if on_gpu else 0
        self.scale = LadderScale(base.model, longest, vocab, is_full, on_gpu, gpus)
        self._base = replace(base, max_model_len=longest, skip_tokenizer_init=True)
        self._machine, self._repeats = machine, repeats
        self._context_bytes: int | None = None  # of the KV cache; known from the first rung that has one

    def climb(self) -> Iterator[RungResult | SkippedRung]:
        """Measure the rungs from the bottom up."""
        naive: NaiveAnswers | None = None
        below: Bench | None = None
        for index, rung in enumerate(RUNGS):
            try:
                engine = self._open(index)
            except (
                ConfigError,
                ModelError,
            ) as error:  # such as a format that the model's weights cannot have
                yield SkippedRung(rung.name, rung.idea, str(error))
                continue
            if reason := rung.missing(self.scale, engine.info):
                engine.close()
                yield SkippedRung(rung.name, rung.idea, reason)
                continue
            naive = naive or naive_answers(engine)
            yield self._measure(rung, index, below, engine, naive)
            if below is not None:
                below.close()
            below = engine
        if below is not None:
            below.close()

    def _open(self, index: int) -> Bench:
        settings = settings_of(index, self.scale)
        if self._base.kv_cache_memory is None and self._context_bytes is not None:
            # The same memory on each rung: as much as the contiguous layout needs for its batch.
            settings["kv_cache_memory"] = BATCH * self._context_bytes
        engine = Bench(replace(self._base, **settings), self._machine)
        if settings["kv_layout"] == "contiguous":
            self._context_bytes = engine.info.block_bytes
        return engine

    def _measure(
        self, rung: Rung, index: int, below: Bench | None, engine: Bench, naive: NaiveAnswers
    ) -> RungResult:
        engines = [engine] if below is None else [below, engine]
        for one in engines:  # compiles kernels and captures graphs
            self._run(rung, one, seed=-1)
        runs: list[list[dict[str, float | None]]] = [[] for _ in engines]
        peak = 0
        for repeat in range(self._repeats):
            # In turns, so that whatever else the machine does meets both.
            order = range(len(engines)) if repeat % 2 == 0 else reversed(range(len(engines)))
            for place in order:
                run = self._run(rung, engines[place], seed=repeat)
                figures = serving(run)
                runs[place].append({name: figures[name] for name in _FIGURES})
                if engines[place] is engine:
                    peak = max(peak, kv_peak(run, engine))
        name = rung.headline.name
        gains = [
            ratio(before[name], after[name], rung.headline.more_is_better)
            for before, after in zip(runs[0], runs[-1])
        ]
        return RungResult(
            rung.name,
            rung.idea,
            rung.shown_by,
            name,
            rung.headline.label,
            rung.headline.more_is_better,
            None if below is None else medians(runs[0]),
            medians(runs[-1]),
            None if below is None else statistics.median(gains),
            [] if below is None else gains,
            compare(engine, naive),
            peak,
            engine.info.weight_bytes,
            settings_of(index, self.scale),
            rung.line_counts(),
        )

    def _run(self, rung: Rung, engine: Bench, seed: int) -> Run:
        load = rung.make_load(self.scale, random.Random(f"{rung.name} {seed}"))
        return engine.run(load.work, _GREEDY, load.arrivals_s, load.max_concurrency)


def kv_peak(run: Run, engine: Bench) -> int:
    """Return the bytes of the KV cache in use at the peak of a run."""
    free = min((record.free_blocks for record in run.steps), default=engine.info.num_blocks)
    return (engine.info.num_blocks - free) * engine.info.block_bytes


def medians(runs: Sequence[dict[str, float | None]]) -> dict[str, float | None]:
    """Return the median of each figure; None where a run has none."""
    found: dict[str, float | None] = {}
    for name in _FIGURES:
        values = [value for one in runs if (value := one[name]) is not None]
        found[name] = statistics.median(values) if values else None
    return found


def ratio(before: float | None, after: float | None, more_is_better: bool) -> float:
    """Return the factor by which a figure improved."""
    if not before or not after:
        return 1.0
    return after / before if more_is_better else before / after
