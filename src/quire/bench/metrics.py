"""Metrics of a run: latency percentiles, throughput, and the share of the machine's limit.

Names and definitions are those of `vllm bench serve` and `vllm bench throughput`, so that results are comparable.
Latencies are in milliseconds: ttft (time to first token), tpot (time per output token after the first), itl
(inter-token latency, the gaps between tokens) and e2el (end-to-end latency).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from quire.bench.cost import Cost, CostModel, Machine
from quire.bench.run import Run, ServedRequest
from quire.core.steplog import StepRecord
from quire.types import ConfigError, DraftCounts, QuireError


class NothingServed(QuireError):
    """A load of which every request failed."""


METRICS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
HOST_PARTS = ("schedule_s", "launch_s", "wait_s", "retire_s")


def percentile(values: Sequence[float], p: float) -> float:
    """Return the p-th percentile, p from 0 to 100, with linear interpolation."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * p / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def latencies_ms(run: Run) -> dict[str, list[float]]:
    """Return the latencies of all requests by metric; itl has one for each gap. Answers of one token have no tpot."""
    done = run.completed
    return {
        "ttft": [one.ttft_s * 1e3 for one in done],
        "tpot": [one.tpot_s * 1e3 for one in done if one.output_len > 1],
        "itl": [gap * 1e3 for one in done for gap in one.itls_s],
        "e2el": [one.e2el_s * 1e3 for one in done],
    }


def summary(found: dict[str, list[float]], percentiles: Sequence[float]) -> dict[str, float | None]:
    """Return mean, median, standard deviation and percentiles of each metric, or None where there are no values."""
    figures: dict[str, float | None] = {}
    for name, values in found.items():
        figures[f"mean_{name}_ms"] = statistics.fmean(values) if values else None
        figures[f"median_{name}_ms"] = percentile(values, 50) if values else None
        figures[f"std_{name}_ms"] = statistics.pstdev(values) if values else None
        for p in percentiles:
            figures[f"p{p:g}_{name}_ms"] = percentile(values, p) if values else None
    return figures


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """Parse goodput limits, such as ["ttft:500", "tpot:50"], to milliseconds by metric.

    Raises:
        ConfigError: if a pair is not ttft:MS, tpot:MS or e2el:MS.
    """
    limits: dict[str, float] = {}
    for pair in pairs:
        name, _, limit = pair.partition(":")
        try:
            limits[name] = float(limit)
        except ValueError:
            name = ""
        if name not in ("ttft", "tpot", "e2el"):
            raise ConfigError(f"goodput must be ttft:MS, tpot:MS or e2el:MS, got {pair!r}")
    return limits


def is_good(one: ServedRequest, limits_ms: dict[str, float]) -> bool:
    """Return whether a request met all goodput limits."""
    took = {"ttft": one.ttft_s, "tpot": one.tpot_s, "e2el": one.e2el_s}
    return all(took[name] * 1e3 <= limit for name, limit in limits_ms.items())


def serving(run: Run, percentiles: Sequence[float] = (99,), goodput: Sequence[str] = ()) -> dict[str, Any]:
    """Compute the metrics of a run.

    Args:
        run: the requests and their times.
        percentiles: of the latencies, 0 to 100.
        goodput: limits that a good request meets, such as "ttft:500" (milliseconds).

    Raises:
        NothingServed: if every request failed.
        ConfigError: if `goodput` is invalid.
    """
    done = run.completed
    if not done:
        raise NothingServed(f"no request was served: {run.served[0].error}")
    limits_ms = parse_goodput(goodput)
    tokens_in = sum(one.prompt_len for one in done)
    tokens_out = sum(one.output_len for one in done)
    duration = run.duration_s
    return {
        "duration": duration,
        "completed": len(done),
        "failed": len(run.served) - len(done),
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "cached_tokens": sum(one.cached_tokens for one in done),
        "request_throughput": len(done) / duration,
        "request_goodput": sum(is_good(one, limits_ms) for one in done) / duration if goodput else None,
        "output_throughput": tokens_out / duration,
        "total_token_throughput": (tokens_in + tokens_out) / duration,
        "max_output_tokens_per_s": _peak_rate(done, duration),
        "max_concurrent_requests": peak_concurrency(done),
        **summary(latencies_ms(run), percentiles),
        **draft_figures(run.drafts),
        # The same figures under the names of `vllm bench throughput`.
        "elapsed_time": duration,
        "num_requests": len(done),
        "total_num_tokens": tokens_in + tokens_out,
        "requests_per_second": len(done) / duration,
        "tokens_per_second": (tokens_in + tokens_out) / duration,
    }


def limits(steps: Sequence[StepRecord], seconds: float, costs: CostModel, machine: Machine) -> dict[str, Any]:
    """Compare the duration of steps with the machine's limits.

    In the result, `floor_s` is the least time of these steps (bench/cost.py) and `share_of_limit` is floor_s / seconds.
    `mbu` and `mfu` are the used shares of the measured bandwidth and matrix rate.

    Args:
        steps: the records of the steps.
        seconds: their total duration.
        costs: the model's cost model.
        machine: the measured limits.
    """
    each = [costs.step(record.rows) for record in steps]
    cost, floor_s = Cost.total(each), sum(one.floor_s(machine) for one in each)
    return {
        "machine": asdict(machine),
        "steps": len(steps),
        "floor_s": floor_s,
        "share_of_limit": floor_s / seconds,
        "mbu": cost.bytes / seconds / machine.bytes_per_s,
        "mfu": cost.flops / seconds / machine.flops_per_s,
        "bytes": cost.bytes,
        "flops": cost.flops,
        "median_step_us": {
            part.removesuffix("_s"): statistics.median(getattr(r, part) for r in steps) * 1e6
            for part in HOST_PARTS
        },
    }


def draft_figures(drafts: DraftCounts) -> dict[str, Any]:
    """Return the figures of speculative decoding under the names of `vllm bench serve`; none if nothing was drafted.

    Rates are in percent. The acceptance length is the mean number of tokens of a row with drafts.
    """
    if not drafts.rows:
        return {}
    return {
        "spec_decode_acceptance_rate": 100 * drafts.acceptance,
        "spec_decode_acceptance_length": drafts.mean_accepted_length,
        "spec_decode_num_drafts": drafts.rows,
        "spec_decode_draft_tokens": drafts.tokens,
        "spec_decode_accepted_tokens": drafts.accepted,
        "spec_decode_per_position_acceptance_rates": [100 * rate for rate in drafts.rates],
    }


def peak_concurrency(done: Sequence[ServedRequest]) -> int:
    """Return the largest number of requests that were open at once."""
    changes = [(one.start_s, 1) for one in done] + [(one.token_times_s[-1], -1) for one in done]
    running = most = 0
    for _, change in sorted(changes):
        running += change
        most = max(most, running)
    return most


def rates(times_s: Sequence[float], width_s: float, duration_s: float) -> list[float]:
    """Return the events per second in each interval of `width_s`, from 0 to `duration_s`."""
    counts = [0] * max(math.ceil(duration_s / width_s), 1)
    for at in times_s:
        counts[min(int(at / width_s), len(counts) - 1)] += 1
    return [count / width_s for count in counts]


def _peak_rate(done: Sequence[ServedRequest], duration_s: float) -> float:
    """Return the tokens per second in the best second, or in the whole of a shorter run.

    The tokens of an answer are assumed to be spread evenly over the pieces of its stream.
    """
    width_s = min(1.0, duration_s)
    best = [0.0] * max(math.ceil(duration_s / width_s), 1)
    for one in done:
        weight = one.output_len / len(one.token_times_s)
        for at in one.token_times_s:
            best[min(int(at / width_s), len(best) - 1)] += weight
    return max(best) / width_s
