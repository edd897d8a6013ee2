"""`quire plan`: the rate that a deployment sustains within latency targets, by simulation.

The time of a step is fitted to steps that this machine has run under a load like the trace. The search then replays the
trace in simulated time, faster and faster.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from quire.bench.drive import Bench
from quire.bench.learned_steps import LearnedSteps, UnevenSteps
from quire.bench.load.arrivals import arrival_times
from quire.bench.load.workloads import Workload, shifted
from quire.bench.metrics import latencies_ms, percentile
from quire.bench.run import Run
from quire.bench.simulate import simulate
from quire.bench.step_padding import padding_of
from quire.config import EngineConfig
from quire.core.prompt_budget import FixedBudget
from quire.core.step_time import load_of
from quire.core.steplog import StepRecord
from quire.types import ConfigError

_LEARNED_REQUESTS = 64  # of the load, to fit step times
_CHUNK_REQUESTS = 16  # of the load, for each size of chunks
_OPEN_SHARE = 0.7  # of the highest rate that was seen, for requests at random times
_DOUBLINGS, _BISECTIONS = 24, 7
_CHUNKS = (64, 128, 256, 512, 1024, 2048, 4096)  # tried for mixed_prefill_tokens
_MOST_CHUNKS = 4


@dataclass(frozen=True, slots=True)
class LatencyTargets:
    """Limits on percentiles of latencies, in ms; infinite where there is none."""

    ttft_ms: float = math.inf
    itl_ms: float = math.inf
    percentile: float = 99.0


@dataclass(frozen=True, slots=True)
class Capacity:
    """The highest rate at which settings meet the targets, and the latencies there. Rates are per engine."""

    settings: dict[str, Any]
    requests_per_s: float
    output_tokens_per_s: float
    ttft_ms: float
    itl_ms: float

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for a JSON file."""
        return asdict(self)


def learn_step_times(bench: Bench, work: Workload) -> LearnedSteps:
    """Run a part of the load at several levels of concurrency and then at random times, and fit the times of the steps.

    Requests that begin together fill steps with prompts; those that come one by one add short chunks to decoding rows. A
    limit would cut prompts into shorter ones, so some requests run with each of several sizes.

    Raises:
        ConfigError: if the load has too few steps of some kind.
    """
    learned = LearnedSteps(padding_of(bench.info, bench.config.cuda_graphs))
    part, rate = work[:_LEARNED_REQUESTS], 0.0
    compiling = bench.run(shifted(part[:4], bench.info.vocab_size, 1), {"temperature": 0.0})
    learned.follow(map(load_of, compiling.steps))
    levels = [1 << level for level in range(bench.info.max_num_seqs.bit_length())]
    for round_, concurrency in enumerate(levels):
        share = part[: max(4, 2 * concurrency)]
        run = bench.run(
            shifted(share, bench.info.vocab_size, 2 + round_),
            {"temperature": 0.0},
            max_concurrency=concurrency,
        )
        _learn(learned, run)
        rate = max(rate, len(share) / run.duration_s)
    for size in _CHUNKS:
        if size < bench.info.max_num_batched_tokens:
            few = shifted(part[:_CHUNK_REQUESTS], bench.info.vocab_size, 2 + len(levels) + size)
            with fixed_chunks(bench, size):
                _learn(learned, bench.run(few, {"temperature": 0.0}, max_concurrency=_CHUNK_REQUESTS // 2))
    times = arrival_times(len(part), _OPEN_SHARE * rate, 1.0, 0)
    _learn(
        learned, bench.run(shifted(part, bench.info.vocab_size, 2 + len(levels)), {"temperature": 0.0}, times)
    )
    if not learned.model.is_ready:
        raise ConfigError(
            "the load is too short to learn step times from: give more requests or longer answers"
        )
    return learned


@contextmanager
def fixed_chunks(bench: Bench, size: int) -> Iterator[None]:
    """Let steps that also decode have `size` prompt tokens, instead of as many as the engine's settings allow."""
    scheduler = bench.client.engine.scheduler
    usual, scheduler.prompts = scheduler.prompts, FixedBudget(size)
    try:
        yield
    finally:
        scheduler.prompts = usual


def _learn(learned: LearnedSteps, run: Run) -> None:
    learned.observe(zip(map(load_of, run.steps), busy_seconds(run.steps)))


def busy_seconds(steps: Sequence[StepRecord]) -> list[float]:
    """Return the time of each step in seconds, with what the host does between it and the previous step.

    Time without requests does not count: all requests of the step are then new.
    """
    found, ended_s = list[float](), math.nan
    for step in steps:
        begin_s = step.time_s if math.isnan(ended_s) else max(step.time_s, ended_s)
        is_first = math.isnan(ended_s) or len(step.admitted) >= step.running
        before_s, ended_s = begin_s if is_first else ended_s, begin_s + step.took_s
        found.append(ended_s - before_s)
    return found


def figures(run: Run, targets: LatencyTargets) -> tuple[float, float]:
    """Return the percentiles of time to first token and inter-token latency in ms."""
    found = latencies_ms(run)
    itl = percentile(found["itl"], targets.percentile) if found["itl"] else 0.0
    return percentile(found["ttft"], targets.percentile), itl


@dataclass(slots=True)
class CapacityPlanner:
    """A search for the highest rate, over one engine's sizes and step times."""

    bench: Bench
    learned: LearnedSteps
    work: Workload
    arrivals_s: Sequence[float]  # as recorded
    targets: LatencyTargets

    def run_at(self, config: EngineConfig, speed: float) -> Run:
        """Simulate the load at `speed` times its recorded rate."""
        times = [at / speed for at in self.arrivals_s]
        return simulate(config, self.bench.info, UnevenSteps(self.learned), self.work, times)

    @property
    def recorded_rate(self) -> float:
        """Return the requests per second of the load as recorded."""
        return len(self.work) / max(self.arrivals_s[-1], 1e-9)

    def meets(self, run: Run) -> bool:
        """Return whether a run meets the targets."""
        ttft, itl = figures(run, self.targets)
        return ttft <= self.targets.ttft_ms and itl <= self.targets.itl_ms

    def capacity(self, settings: dict[str, Any]) -> Capacity | None:
        """Return the highest rate of the engine with other `settings`; None if even an idle engine misses a target."""
        config = replace(self.bench.config, **settings)
        low = 1e-3 / self.recorded_rate  # one request in a thousand seconds
        best = self.run_at(config, low)
        if not self.meets(best):
            return None
        high = 0.25
        for _ in range(_DOUBLINGS):
            run = self.run_at(config, high)
            if not self.meets(run):
                break
            low, best, high = high, run, 2 * high
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            run = self.run_at(config, middle)
            if self.meets(run):
                low, best = middle, run
            else:
                high = middle
        tokens = sum(count for _, count in self.work) / len(self.work)
        rate = low * self.recorded_rate
        return Capacity(settings, rate, rate * tokens, *figures(best, self.targets))

    def alternatives(self) -> list[dict[str, Any]]:
        """Return the settings to compare: the engine's own, sizes of chunks, and chunks by the target."""
        info, found = self.bench.info, [dict[str, Any]()]
        if self.bench.config.target_itl is None and self.bench.config.chunked_prefill is not False:
            sizes = [size for size in _CHUNKS if size <= info.max_num_batched_tokens][-_MOST_CHUNKS:]
            # As in `quire serve`, a size and a target replace the limit relative to decoding.
            found += [{"mixed_prefill_tokens": size, "prefill_slowdown": None} for size in sizes]
            if math.isfinite(self.targets.itl_ms):
                target = {"target_itl": self.targets.itl_ms}
                found.append({**target, "mixed_prefill_tokens": None, "prefill_slowdown": None})
        return found


def engines_for(recorded_rate: float, capacity: Capacity) -> int:
    """Return how many engines serve the recorded rate, requests spread evenly."""
    return max(1, math.ceil(recorded_rate / capacity.requests_per_s))
