"""Profiles of selected steps under torch.profiler, and the times of the same steps without it.

There are three passes over the same load, each with other prompts: one to compile, capture and tune, one timed, and one
profiled. Each pass runs until the selected steps, waits for the device, and then runs these steps.
"""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from quire.bench.drive import Bench, answer_params, synchronize
from quire.bench.kernel_table import KernelRow, busy_and_span_us, events_of, tables
from quire.bench.load.workloads import Workload, shifted
from quire.bench.metrics import limits
from quire.core.steplog import StepRecord
from quire.kernels.cpu import compiled_kernels
from quire.types import ConfigError

SETTLING = 4  # decode steps before the first selected one

StartCondition = Callable[[list[StepRecord]], bool]


def after(steps: int) -> StartCondition:
    """Return a condition that starts the profile after `steps` steps."""
    return lambda records: len(records) >= steps


def decoding(rows: int) -> StartCondition:
    """Return a condition that starts the profile after some steps in which all `rows` requests decode."""

    def ready(records: list[StepRecord]) -> bool:
        last = records[-SETTLING:]
        return len(last) == SETTLING and all(
            len(r.rows) == rows and all(n == 1 for _, _, n in r.rows) for r in last
        )

    return ready


@dataclass(slots=True)
class Profile:
    """The result of a profile. The step times are those of the pass without the profiler."""

    on_gpu: bool  # whether the events are the device's; otherwise they are the CPU's operators
    timed: dict[str, Any]  # see bench/metrics.py:limits
    step_s: float
    busy_s: float  # of the device, per profiled step
    idle_share: float  # of the time from the first device event to the last
    parts: list[KernelRow]
    products: list[KernelRow]
    kernels: list[KernelRow]
    steps: int

    @property
    def total_us(self) -> float:
        """Return the duration of all events."""
        return sum(row.busy_us for row in self.parts)


def run_profile(
    bench: Bench, work: Workload, params: dict[str, Any], ready: StartCondition, steps: int, trace_file: Path
) -> Profile:
    """Profile up to `steps` steps of a load, and save the trace.

    Args:
        bench: the engine.
        work: the load, which is served three times with different prompts.
        params: sampling parameters of all requests.
        ready: says, from the records of the steps so far, whether to start the profile.
        steps: the most steps to profile.
        trace_file: where to save the trace, .json or .json.gz.

    Raises:
        ConfigError: if the load ends before `ready`.
    """
    vocab = bench.info.vocab_size
    _window(bench, work, params, ready, steps, nullcontext())
    records, seconds = _window(bench, shifted(work, vocab, 1), params, ready, steps, nullcontext())
    profiler = _profiler(bench.info.device, trace_file)
    profiled, _ = _window(bench, shifted(work, vocab, 2), params, ready, steps, profiler)
    events = events_of(_read(trace_file))
    rows = [record.rows for record in profiled]
    parts, products, kernels = tables(
        events,
        [bench.costs.step(r) for r in rows],
        [bench.costs.products(r) for r in rows],
        bench.machine,
    )
    busy, span = busy_and_span_us(events)
    return Profile(
        bench.info.device.startswith("cuda"),
        limits(records, seconds, bench.costs, bench.machine),
        seconds / len(records),
        busy / 1e6 / len(profiled),
        1 - busy / span,
        parts,
        products,
        kernels,
        len(profiled),
    )


def _window(
    bench: Bench,
    work: Workload,
    params: dict[str, Any],
    ready: StartCondition,
    steps: int,
    around: AbstractContextManager[Any],
) -> tuple[list[StepRecord], float]:
    """Serve `work` until `ready`, then run up to `steps` steps inside `around`. Return their records and seconds."""
    engine, device = bench.client.engine, bench.info.device
    names = [bench.add(ids, answer_params(params, count)) for ids, count in work]
    before: list[StepRecord] = []
    while engine.has_work and not ready(before):
        bench.poll(before)
    synchronize(device)
    chosen: list[StepRecord] = []
    with around:
        begin = time.perf_counter()
        while engine.has_work and len(chosen) < steps:
            with record_function(f"step {len(chosen)}"):
                bench.poll(chosen)
        synchronize(device)
        seconds = time.perf_counter() - begin
    bench.settle(abort=names)
    if not chosen:
        raise ConfigError(
            f"the load ended after {len(before)} steps, before those to profile; skip fewer steps"
        )
    return chosen, seconds


@contextmanager
def _profiler(device: str, trace_file: Path) -> Iterator[None]:
    activities = [ProfilerActivity.CPU]
    if device.startswith("cuda"):
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler, _visible_kernels(device):
        yield
    profiler.export_chrome_trace(str(trace_file))


@contextmanager
def _visible_kernels(device: str) -> Iterator[None]:
    """Show the C kernels of a CPU in the profile. They are no torch operators, so each call gets its own span."""
    kernels = compiled_kernels() if device == "cpu" else None
    if kernels is None:
        yield
        return
    kernels.span = record_function
    try:
        yield
    finally:
        kernels.span = None


def _read(trace_file: Path) -> dict[str, Any]:
    opened = gzip.open if trace_file.suffix == ".gz" else open
    with opened(trace_file, "rt", encoding="utf-8") as file:
        return json.load(file)
