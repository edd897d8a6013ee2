"""The fixed workloads: same requests in every run, and the lengths that they promise."""

from __future__ import annotations

import statistics
from itertools import pairwise

import pytest

from quire.bench.load.arrivals import arrival_times
from quire.bench.load.workloads import (
    PACED,
    PACES,
    WORKLOADS,
    chat,
    nano,
    prefix,
    scaled,
    shifted,
    single,
)


@pytest.mark.parametrize("name", [*WORKLOADS, *PACED])
def test_the_same_requests_in_every_run(name: str) -> None:
    first, again = ({**WORKLOADS, **PACED}[name](1000, 5) for _ in range(2))
    assert first == again and len(first) == 5
    assert all(0 <= token < 1000 for ids, _ in first for token in ids)


def test_lengths() -> None:
    assert [(len(ids), n) for ids, n in single(1000)] == [(128, 512)]
    work = nano(1000)
    assert len(work) == 256 and all(100 <= len(ids) <= 1024 and 100 <= n <= 1024 for ids, n in work)
    talk = chat(1000)
    assert len(talk) == 1000 and 180 < statistics.fmean(len(ids) for ids, _ in talk) < 280
    shared = prefix(1000)
    assert (
        len({tuple(ids[:1024]) for ids, _ in shared}) == 1 and len({tuple(ids) for ids, _ in shared}) == 256
    )


def test_shifted_work_shares_within_but_not_with_the_first() -> None:
    work = prefix(1000, 3)
    other = shifted(work, 1000, 1)
    assert [(len(ids), n) for ids, n in other] == [(len(ids), n) for ids, n in work]
    assert len({tuple(ids[:1024]) for ids, _ in other}) == 1
    assert all(a != b for (ids, _), (shifted_ids, _) in zip(work, other) for a, b in zip(ids, shifted_ids))


def test_paced_workloads() -> None:
    sizes = {name: len(make(1000, None)) for name, make in PACED.items()}
    assert sizes == {
        "baseline": 10,
        "continuous_batching": 32,
        "paged_attention": 48,
        "chunked_prefill": 48,
        "prefix_caching": 48,
    }
    assert {(len(ids), n) for ids, n in PACED["baseline"](1000, None)} == {(256, 256)}
    long = [len(ids) >= 1024 for ids, _ in PACED["chunked_prefill"](1000, 400)]
    assert 0.68 < statistics.fmean(long) < 0.82
    shared = PACED["prefix_caching"](1000, None)
    assert len({tuple(ids[:1024]) for ids, _ in shared}) == 1
    assert all(1024 + 32 <= len(ids) <= 1024 + 128 and n == 256 for ids, n in shared)
    times = arrival_times(8, PACES["continuous_batching"].rate, PACES["continuous_batching"].burstiness)
    gaps = [b - a for a, b in pairwise(times)]
    assert max(gaps) < 1.02 * min(gaps) and PACES["baseline"].max_concurrency == 1
    assert set(PACES) == set(PACED)


def test_scaled_work_keeps_what_is_shared() -> None:
    work = PACED["prefix_caching"](100_000, 5)
    small = scaled(work, 0.25)
    assert scaled(work, 1) is work
    assert all(abs(len(a) - len(b) / 4) <= 1 and n == m / 4 for (a, n), (b, m) in zip(small, work))
    assert len({tuple(ids[:256]) for ids, _ in small}) == 1 and len({tuple(ids) for ids, _ in small}) == 5
    assert scaled([([1, 2], 3)], 0.01) == [([1], 1)]
