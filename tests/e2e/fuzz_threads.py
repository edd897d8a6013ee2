"""Fuzz the engine on several CPU threads: random requests under random switches against each request alone.

    PYTHONPATH=src python tests/e2e/fuzz_threads.py --threads 2 8 --seconds 300

The requests are made for races between the rows of a step: prompts are beginnings of one another, of lengths
around multiples of the block, and token budgets end one token before a block does. Prints the number of
loads, steps and tokens for each number of threads; exits with 1 at the first token that differs.
"""

from __future__ import annotations

import quire.config  # noqa: F401  (sets how threads wait for each other, before torch is loaded)

# isort: split
import argparse
import random
import time
from collections import Counter
from typing import Any

import torch
from switches import WITH_DRAFTS, Bench, random_settings

from quire.types import EngineRequest, SamplingParams

_LOADS = 12  # with one set of requests
_SWITCHES = WITH_DRAFTS | {
    "max_num_batched_tokens": (None, 8, 15, 31, 33),
    "prefix_caching": (None, True, True, False),
    "cpu_kernels": (True, True, True, False),
}


def related_requests(rng: random.Random, count: int = 24) -> list[EngineRequest]:
    """Greedy and seeded requests whose prompts begin alike, each with or without a token of its own."""
    stem = [rng.randrange(300, 1500) for _ in range(66)]
    requests = []
    for i in range(count):
        length = rng.choice([1, 2, 3, 4]) * rng.choice([16, 16, 5]) + rng.choice([-1, 0, 0, 1, 1])
        prompt = stem[:length] + [rng.randrange(300, 1500)] * rng.randrange(2)
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.0, 0.8]),
            max_tokens=rng.choice([1, 2, 5, 17, 40, 56]),
            ignore_eos=True,
        )
        seed = rng.randrange(1 << 40)
        requests.append(EngineRequest(f"r{i}", prompt, params, seed=seed, priority=rng.randrange(3)))
    return requests


def fuzz(bench: Bench, threads: int, seed: int) -> Counter[str]:
    """Run one random load on `threads` threads. Raises AssertionError if a token differs from the solo run."""
    rng = random.Random(seed)
    settings: dict[str, Any] = random_settings(rng, _SWITCHES)
    engine = bench.run({**settings, "cpu_threads": threads}, seed)
    totals = engine.log.totals
    return Counter(
        loads=1,
        steps=engine.log.ended,
        tokens=totals.generated_tokens,
        cached_tokens=totals.cached_tokens,
        preemptions=totals.preemptions,
        draft_tokens=totals.draft_tokens,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--seconds", type=float, default=60, help="for each number of threads")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    bench, seed = Bench("demo", requests=related_requests(random.Random(asked.seed))), asked.seed
    for threads in asked.threads:
        counts, until_s = Counter[str](), time.monotonic() + asked.seconds
        while time.monotonic() < until_s:
            for _ in range(_LOADS):
                counts += fuzz(bench, threads, seed)
                seed += 1
            bench.expect(related_requests(random.Random(seed)))
        print(f"{threads} threads:", ", ".join(f"{n} {name}" for name, n in counts.items()), flush=True)


if __name__ == "__main__":
    main()
