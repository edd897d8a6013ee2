"""The standard workloads for comparing engines: lists of (prompt token ids, output length), fixed by a seed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Workload = list[tuple[Sequence[int], int]]
MAX_RANDOM_ID = 100_000  # random token ids are below this, because higher ids are often special


def _ids(r: random.Random, vocab: int, count: int) -> list[int]:
    return [r.randrange(vocab) for _ in range(count)]


def single(vocab: int, count: int | None = None) -> Workload:
    """Generate one request for the latency of a single user: 128 tokens in, 512 out."""
    r = random.Random(1)
    return [(_ids(r, vocab, 128), 512) for _ in range(count or 1)]


def nano(vocab: int, count: int | None = None) -> Workload:
    """Generate 256 requests with 100 to 1,024 tokens in and out, uniformly distributed."""
    r = random.Random(0)
    return [(_ids(r, vocab, r.randint(100, 1024)), r.randint(100, 1024)) for _ in range(count or 256)]


def chat(vocab: int, count: int | None = None) -> Workload:
    """Generate 1,000 requests with the log-normal lengths of conversations, about 220 tokens in and 200 out."""
    r = random.Random(2)

    def length(mean: float, deviation: float, most: int) -> int:
        return max(4, min(most, int(r.lognormvariate(mean, deviation))))

    return [(_ids(r, vocab, length(4.9, 1.1, 2048)), length(5.0, 0.9, 1024)) for _ in range(count or 1000)]


def prefill(vocab: int, count: int | None = None) -> Workload:
    """Generate 64 requests that are almost only prefill: 3,584 tokens in, 2 out."""
    r = random.Random(3)
    return [(_ids(r, vocab, 3584), 2) for _ in range(count or 64)]


def prefix(vocab: int, count: int | None = None) -> Workload:
    """Generate 256 requests that share their first 1,024 tokens, with 64 more tokens each and 64 out."""
    r = random.Random(4)
    shared = _ids(r, vocab, 1024)
    return [(shared + _ids(r, vocab, 64), 64) for _ in range(count or 256)]


def uniform(vocab: int, count: int, input_len: int, output_len: int, seed: int = 0) -> Workload:
    """Generate `count` requests of equal length."""
    r = random.Random(seed)
    return [(_ids(r, vocab, input_len), output_len) for _ in range(count)]


def shifted(work: Workload, vocab: int, by: int) -> Workload:
    """Return the workload with every token id shifted by `by`.

    Lengths and sharing between its prompts stay the same, but the prefix cache finds nothing of `work`.
    """
    return [([(token + by) % vocab for token in ids], count) for ids, count in work]


WORKLOADS: dict[str, Callable[[int, int | None], Workload]] = {
    "single": single,
    "nano": nano,
    "chat": chat,
    "prefill": prefill,
    "prefix": prefix,
}


def scaled(work: Workload, factor: float) -> Workload:
    """Return the workload with all lengths multiplied by `factor`, for small machines and short contexts.

    Each prompt keeps tokens at regular distances, so prompts with a common beginning still have one.
    """
    if factor == 1:
        return work

    def kept(ids: Sequence[int]) -> list[int]:
        return [ids[min(int(i / factor), len(ids) - 1)] for i in range(max(round(len(ids) * factor), 1))]

    return [(kept(ids), max(round(count * factor), 1)) for ids, count in work]


@dataclass(frozen=True, slots=True)
class Pace:
    """The arrivals of a workload: see `arrival_times` (load/arrivals.py)."""

    rate: float = math.inf  # requests per second
    burstiness: float = 1.0
    max_concurrency: int | None = None  # None: no limit


_EVEN = 1e6  # burstiness of evenly spaced arrivals
_SEED = 42


def _drawn(
    name: str, lengths: Callable[[random.Random], tuple[int, int]], default: int, shared: int = 0
) -> Callable[[int, int | None], Workload]:
    """Return a generator of `default` requests whose lengths in and out come from `lengths`."""

    def generate(vocab: int, count: int | None = None) -> Workload:
        r = random.Random(_SEED)
        prefix = _ids(r, vocab, shared)
        work: Workload = []
        for _ in range(count or default):
            tokens_in, tokens_out = lengths(r)
            work.append((prefix + _ids(r, vocab, tokens_in), tokens_out))
        return work

    generate.__name__ = name
    return generate


def _mostly_long(r: random.Random) -> tuple[int, int]:
    tokens_in = r.randint(1024, 2048) if r.random() < 0.75 else r.randint(64, 128)
    return tokens_in, r.randint(64, 256)


# Each shows one idea of serving. Its arrivals are in `PACES`.
PACED: dict[str, Callable[[int, int | None], Workload]] = {
    "baseline": _drawn("baseline", lambda r: (256, 256), 10),
    "continuous_batching": _drawn(
        "continuous_batching", lambda r: (r.randint(64, 512), r.randint(64, 256)), 32
    ),
    "paged_attention": _drawn("paged_attention", lambda r: (r.randint(128, 384), r.randint(128, 256)), 48),
    "chunked_prefill": _drawn("chunked_prefill", _mostly_long, 48),
    "prefix_caching": _drawn("prefix_caching", lambda r: (r.randint(32, 128), 256), 48, shared=1024),
}
PACES = {
    "baseline": Pace(max_concurrency=1),
    "continuous_batching": Pace(4.0, _EVEN),
    "paged_attention": Pace(),
    "chunked_prefill": Pace(6.0),
    "prefix_caching": Pace(8.0),
}
WARM_REQUESTS = 2  # before one of these
ALL_WORKLOADS = {**WORKLOADS, **PACED}
