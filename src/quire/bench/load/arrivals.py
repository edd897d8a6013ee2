"""When requests come: at a rate, steady or growing, with gamma-distributed gaps; or all at once."""

from __future__ import annotations

import math
import random
from itertools import accumulate


def arrival_times(count: int, rate: float = math.inf, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """Seconds from the start at which `count` requests come, `rate` a second; an infinite rate: all at 0.

    Gaps are gamma distributed with shape `burstiness`: 1 is a Poisson process, less comes in bursts, more
    comes evenly. As in vLLM, they are scaled so that the last request comes at count / rate exactly.
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
    """The same for a rate that grows (or falls) from `start_rate` to `end_rate` over the requests: by the same
    difference from each to the next (`linear`), or by the same factor (`exponential`)."""
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
