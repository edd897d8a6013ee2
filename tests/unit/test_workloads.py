"""The fixed workloads: same requests in every run, and the lengths that they promise."""

from __future__ import annotations

import statistics

import pytest

from quire.bench.load.workloads import WORKLOADS, chat, nano, prefix, shifted, single


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_same_requests_in_every_run(name: str) -> None:
    first, again = (WORKLOADS[name](1000, 5) for _ in range(2))
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
