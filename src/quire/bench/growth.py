"""The measurements of `quire bench growth`: how time grows with batch size, context and prompt length.

A point of a decode curve is the median time of steps in which every row decodes one token at about the same context. A
point of the prompt curve is the time to the first token of one prompt on an idle engine. Each has the least time that
the machine's limits allow (bench/cost.py).
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from quire.bench.cost import Cost, Machine
from quire.bench.drive import Bench
from quire.bench.load.workloads import MAX_RANDOM_ID, Workload
from quire.bench.run import Run
from quire.core.steplog import StepRecord
from quire.types import EngineInfo

_SETTLE = 8  # decode steps of a run that do not count: the batch is still filling, and graphs are captured
_TIMED = 24  # decode steps of a run that count
_ROUNDS = 2  # runs per prompt length; the best one counts
_GREEDY = {"temperature": 0.0}


@dataclass(frozen=True, slots=True)
class GrowthPoint:
    """One point of a curve. Times in seconds."""

    curve: str  # batch, context or prompt
    batch_size: int
    context: int  # tokens before the step; for a prompt its length
    time_s: float  # of a decode step; for a prompt to its first token
    floor_s: float
    bound_by: str  # which limit makes up most of the floor: bandwidth or matrix rate
    conditions: dict[str, float | None]  # power and clock of a GPU while the load ran
    host_s: float = 0.0  # of a step: scheduling, launch and retirement, without waiting for the device

    @property
    def share_of_limit(self) -> float:
        """Return how much of the time the machine's limits explain."""
        return self.floor_s / self.time_s

    def as_dict(self) -> dict[str, Any]:
        """Return the point for a JSON file."""
        return {**asdict(self), "share_of_limit": self.share_of_limit}


@dataclass(frozen=True, slots=True)
class GrowthPlan:
    """The points to measure. A decode curve over the context is measured for each of `context_batches`."""

    batch_sizes: Sequence[int]
    base_context: int  # of the curve over the batch size
    contexts: Sequence[int]
    context_batches: Sequence[int]
    prompt_lens: Sequence[int]

    def fitted(self, info: EngineInfo) -> tuple[GrowthPlan, list[str]]:
        """Return the plan without the points that do not fit the engine, and a line for each kind left out."""
        skipped = []
        room = info.max_model_len - _SETTLE - _TIMED
        requests = info.num_blocks // info.request_blocks(min(self.base_context, room) + _SETTLE + _TIMED)

        def keep(name: str, values: Sequence[int], most: int, what: str) -> list[int]:
            kept = [value for value in values if value <= most]
            if len(kept) < len(values):
                skipped.append(f"{name} above {most} left out: {what}")
            return kept

        base = min(self.base_context, room)
        limit = f"max_model_len is {info.max_model_len}"
        rows = min(info.max_num_seqs, requests)
        cause = f"max_num_seqs is {info.max_num_seqs}, and the KV cache holds {requests} requests"
        plan = GrowthPlan(
            keep("batch sizes", self.batch_sizes, rows, cause),
            base,
            keep("contexts", self.contexts, room, limit),
            keep("batch sizes of contexts", self.context_batches, info.max_num_seqs, cause),
            keep("prompts", self.prompt_lens, info.max_model_len - 1, limit),
        )
        return plan, skipped


def measure_growth(bench: Bench, plan: GrowthPlan) -> Iterator[GrowthPoint]:
    """Measure the points of a fitted plan one after the other."""
    for batch in plan.batch_sizes:
        yield _decode_point(bench, "batch", batch, plan.base_context)
    for batch in plan.context_batches:
        for context in plan.contexts:
            if batch * bench.info.request_blocks(context + _SETTLE + _TIMED) <= bench.info.num_blocks:
                yield _decode_point(bench, "context", batch, context)
    for length in plan.prompt_lens:
        yield _prompt_point(bench, length)


def _decode_point(bench: Bench, curve: str, batch: int, context: int) -> GrowthPoint:
    work = _prompts(bench, batch, context, _SETTLE + _TIMED, seed=context << 16 | batch)
    run = bench.run(work, _GREEDY)
    steps = decode_steps(run, batch)[-_TIMED:]
    middle = sorted(steps, key=lambda record: record.took_s)[len(steps) // 2]
    cost = bench.costs.step(middle.rows)
    floor_s, name = cost.floor_s(bench.machine), bound_by(cost, bench.machine)
    conditions = run.energy.conditions()
    return GrowthPoint(curve, batch, context, middle.took_s, floor_s, name, conditions, host_time(steps))


def host_time(steps: Sequence[StepRecord]) -> float:
    """Return the median host time of steps, in seconds."""
    return statistics.median(record.schedule_s + record.launch_s + record.retire_s for record in steps)


def decode_steps(run: Run, batch: int) -> list[StepRecord]:
    """Return the steps in which exactly `batch` rows decoded one token each."""
    return [
        record
        for record in run.steps
        if len(record.rows) == batch and record.prompt_tokens == 0 and record.took_s > 0
    ]


def _prompt_point(bench: Bench, length: int) -> GrowthPoint:
    runs = []
    for round_ in range(_ROUNDS):
        runs.append(bench.run(_prompts(bench, 1, length, 1, seed=length << 8 | round_), _GREEDY))
    run = min(runs, key=lambda one: one.served[0].ttft_s)
    costs = [bench.costs.step(record.rows) for record in run.steps if record.prompt_tokens]
    floor_s = sum(cost.floor_s(bench.machine) for cost in costs)
    cost = Cost.total(costs)
    return GrowthPoint(
        "prompt",
        1,
        length,
        run.served[0].ttft_s,
        floor_s,
        bound_by(cost, bench.machine),
        run.energy.conditions(),
        host_time([record for record in run.steps if record.prompt_tokens]),
    )


def bound_by(cost: Cost, machine: Machine) -> str:
    """Return which limit makes up most of the least time of `cost`."""
    parts = (
        (cost.matrix_bytes, cost.matrix_flops),
        (cost.attention_bytes, cost.attention_flops),
    )
    by_bytes = sum(
        machine.least_s(b, f) for b, f in parts if b / machine.bytes_per_s >= f / machine.flops_per_s
    )
    whole = sum(machine.least_s(b, f) for b, f in parts)
    return "bandwidth" if 2 * by_bytes >= whole else "matrix rate"


def _prompts(bench: Bench, count: int, length: int, output_len: int, seed: int) -> Workload:
    """Return prompts that are new to the prefix cache, made quickly for long contexts."""
    r = random.Random(seed)
    vocab = min(bench.info.vocab_size, MAX_RANDOM_ID)
    return [(r.choices(range(vocab), k=length), output_len) for _ in range(count)]


def medians(points: Sequence[GrowthPoint]) -> dict[str, float]:
    """Return the median share of the limit of each curve."""
    curves = dict.fromkeys(point.curve for point in points)
    return {
        curve: statistics.median(point.share_of_limit for point in points if point.curve == curve)
        for curve in curves
    }
