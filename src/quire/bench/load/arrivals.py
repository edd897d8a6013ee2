"""Arrival times of requests: all at once, or with gamma-distributed gaps at a constant or changing rate."""

from __future__ import annotations

import math
import random
from itertools import accumulate


def arrival_times(count: int, rate: float = math.inf, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """Draw arrival times at a constant rate, in seconds from the start.

    As in vLLM, gaps are scaled so that the last request arrives at exactly count / rate.

    Args:
        count: number of requests.
        rate: requests per second; infinite for all at 0.
        burstiness: shape of the gamma distribution of gaps. 1 is a Poisson process; lower values are burstier, higher
            values more even.
        seed: of the random numbers.
    """
    if math.isinf(rate):
        return [0.0] * count
    draw = random.Random(seed)
    gaps = [draw.gammavariate(burstiness, 1.0) for _ in range(count)]
    scale = count / rate / sum(gaps)
    return [at * scale for at in accumulate(gaps)]


def ramp_times(
    count: int, start_rate: float, end_rate: float, strategy: str, burstiness: float = 1.0, seed: int = 0
) -> list[float]:
    """Draw arrival times at a rate that changes from `start_rate` to `end_rate`, in seconds from the start.

    Args:
        count: number of requests.
        start_rate: requests per second at the first request.
        end_rate: requests per second at the last request.
        strategy: `linear` changes the rate by the same difference at each request, `exponential` by the same factor.
        burstiness: shape of the gamma distribution of gaps (see `arrival_times`).
        seed: of the random numbers.
    """
    draw = random.Random(seed)
    gaps = []
    for i in range(count):
        part = i / max(count - 1, 1)
        if strategy == "linear":
            rate = start_rate + (end_rate - start_rate) * part
        else:
            rate = start_rate * (end_rate / start_rate) ** part
        gaps.append(draw.gammavariate(burstiness, 1 / (rate * burstiness)))
    return list(accumulate(gaps))
