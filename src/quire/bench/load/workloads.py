"""The standard workloads for comparing engines: lists of (prompt token ids, output length), fixed by a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

Workload = list[tuple[Sequence[int], int]]


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
