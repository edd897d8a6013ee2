"""The table of sums over GPUs."""

from __future__ import annotations

from quire.parallel.sum_limits import SumLimits


def test_sizes_go_to_the_method_that_was_the_fastest() -> None:
    limits = SumLimits()
    assert [limits.pick(1 << 20, size) for size in (2, 4)] == ["one trip", "two shots"]
    assert limits.pick((1 << 20) + 32, 2) == "two shots"
    assert limits.pick((1 << 20) + 2, 2) == "wider", "two shots need whole vectors"
    assert [limits.pick(nbytes, 4) for nbytes in (32 << 20, 33 << 20)] == ["two shots", "wider"]


def test_two_trips_serve_sizes_between_if_they_are_on() -> None:
    limits = SumLimits(two_trips=4 << 20)
    assert [limits.pick(nbytes, 4) for nbytes in (512 << 10, 1 << 20, 5 << 20)] == [
        "one trip", "two trips", "two shots",
    ]  # fmt: skip
