"""The measurements of `quire bench throughput` (a load) and `quire bench latency` (batches one after the other).

Warm-up runs and batches have different prompts, so that the prefix cache finds only what the workload itself shares.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from quire.bench.drive import Bench
from quire.bench.energy import joined
from quire.bench.load.workloads import Workload, shifted, uniform
from quire.bench.metrics import draft_figures, latencies_ms, limits, percentile, summary
from quire.bench.run import Run, ServedRequest
from quire.core.steplog import StepRecord

PERCENTILES = (10, 25, 50, 75, 90, 99)


@dataclass(slots=True)
class OfferedLoad:
    """A workload, the arrival times of its requests (seconds, ascending), and the limit of open requests."""

    work: Workload
    arrivals_s: list[float]
    max_concurrency: int | None = None


def throughput(
    bench: Bench,
    load: OfferedLoad,
    params: dict[str, Any],
    warmups: int,
    show_progress: bool,
    warm_requests: int = 0,
) -> Run:
    """Serve the load and return its run.

    Before that, serve its first `warm_requests` requests one by one, and the whole load `warmups` times, with other
    prompts and without waiting for arrivals.
    """
    vocab = bench.info.vocab_size
    for i in range(warm_requests):
        bench.run(shifted(load.work[i : i + 1], vocab, -i - 1), params)
    for i in range(warmups):
        bench.run(shifted(load.work, vocab, i + 1), params)
    return bench.run(load.work, params, load.arrivals_s, load.max_concurrency, show_progress)


def latency(
    bench: Bench,
    batch_size: int,
    input_len: int,
    output_len: int,
    warmup: int,
    iterations: int,
    params: dict[str, Any],
) -> dict[str, Any]:
    """Measure the time from a batch's start to its last token.

    Args:
        bench: the engine.
        batch_size: requests per batch.
        input_len: tokens per prompt.
        output_len: tokens per answer.
        warmup: batches to run before the measurement.
        iterations: batches to measure.
        params: sampling parameters of all requests.

    Returns:
        The result by the names of `vllm bench latency`; times in seconds.
    """
    runs: list[Run] = []
    before = bench.drafts()
    shown = f"Batch of {batch_size}"
    for i in tqdm(range(warmup + iterations), desc=shown, unit="batch", disable=None, dynamic_ncols=True):
        work = uniform(bench.info.vocab_size, batch_size, input_len, output_len, seed=batch_size << 32 | i)
        run = bench.run(work, params)
        if i >= warmup:
            runs.append(run)
        else:
            before = bench.drafts()
    seconds = [run.duration_s for run in runs]
    steps: list[StepRecord] = [record for run in runs for record in run.steps]
    served: list[ServedRequest] = [one for run in runs for one in run.served]
    return {
        "model_id": bench.info.model,
        "batch_size": batch_size,
        "input_len": input_len,
        "output_len": output_len,
        "avg_latency": statistics.fmean(seconds),
        "latencies": seconds,
        "percentiles": {str(p): percentile(seconds, p) for p in PERCENTILES},
        "output_throughput": batch_size * output_len / statistics.fmean(seconds),
        **summary(latencies_ms(Run(served, steps, 0.0)), PERCENTILES),
        **draft_figures(bench.drafts().since(before)),
        **limits(steps, sum(seconds), bench.costs, bench.machine),
        **joined([run.energy for run in runs]).figures(batch_size * output_len * len(runs)),
    }
