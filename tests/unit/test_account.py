"""Tracks and counters of requests, histograms, and the timing of a request that a stop string ends."""

from __future__ import annotations

from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.frontend.output import RequestState
from quire.serve.observe.account import ClientTotals, RequestAccounts, extend_timing
from quire.serve.observe.histogram import Histogram, one_two_five
from quire.types import EngineOutput, EngineRequest, Figures, RequestFailure, SamplingParams, Timing, Totals


def requests(*names: str) -> list[EngineRequest]:
    return [EngineRequest(name, [1, 2, 3], SamplingParams(max_tokens=9)) for name in names]


def state(asked: list[EngineRequest]) -> RequestState:
    return RequestState("state", None, asked, None, 10.0)


def told(**more: float) -> Timing:
    """Return the timing of a request with its first token at 12 s after waiting from 10 to 11 s."""
    return Timing(10.0, 12.0, "decoding", {"slots": 1.0}, 1.0, admitted_s=11.0, first_token_s=12.0, **more)


def test_a_request_from_its_beginning_to_its_end() -> None:
    account, asked = RequestAccounts(100), requests("a")
    tracks, one = account.open(asked, 10.0), state(asked)
    for now_s, output in (
        (12.0, EngineOutput("a", [5], timing=told())),
        (12.5, EngineOutput("a", [6])),
        (13.5, EngineOutput("a", [7], "stop", timing=told(decode_s=1.5))),
    ):
        one.apply(output)
        account.apply([output], Figures(time_s=now_s, steps=[(1, 1, 0.5)]), [], now_s)
    account.close([one], tracks, "anna", True)
    assert account.ended == {"stop": 1, "length": 0, "abort": 0, "error": 0}
    assert (account.ttft_s.sum, account.e2e_s.sum, account.itl_s.sum, account.tpot_s.sum) == (
        2,
        3.5,
        1.5,
        0.75,
    )
    assert account.itl_s.count == 2 and account.queue_s.sum == 1 and account.prefill_s.sum == 1
    assert account.of("anna") == account.of(None) == ClientTotals(1, 0, 3, 3)
    assert account.of("bert") == ClientTotals()
    assert account.waited_s["slots"] == sum(account.waited_s.values()) == 1.0 and account.step_rows.count == 3
    assert not account.open_ids


def test_a_stop_string_ends_it_before_the_engine_does() -> None:
    account, asked = RequestAccounts(100), requests("a")
    (track,) = account.open(asked, 10.0)
    account.apply([EngineOutput("a", [5], timing=told())], Figures(time_s=12.0), [], 12.0)
    account.apply([EngineOutput("a", [6])], Figures(time_s=13.0, lost_s=0.25), ["a"], 13.0)
    account.apply([EngineOutput("a", [7])], Figures(time_s=14.0), [], 14.0)  # sent before the abort arrived
    account.apply([EngineOutput("a", [], "abort", timing=told(decode_s=9.0))], Figures(), [], 15.0)
    assert (track.end_s, track.tokens) == (13.0, 2) and not account.open_ids
    assert track.timing is not None and (track.timing.decode_s, track.timing.lost_s) == (0.75, 0.25)
    assert track.timing.until_s == 13.0


def test_a_request_that_is_given_up_or_refused() -> None:
    account, asked = RequestAccounts(100), requests("a", "b")
    tracks = account.open(asked, 10.0)
    one = state(asked)
    one.apply(refused := EngineOutput("b", [], "error", error=RequestFailure("no")))
    account.apply([refused], Figures(), [], 10.5)
    one.abort()
    account.close([one], tracks, "", True)
    assert account.ended == {"stop": 0, "length": 0, "abort": 1, "error": 1}
    assert not account.e2e_s.count and account.open_ids == ["a"]
    account.apply([EngineOutput("a", [], "abort")], Figures(), [], 11.0)
    assert not account.open_ids


def test_until_never_books_more_than_has_passed() -> None:
    found = extend_timing(told(lost_mark_s=1.0), Figures(time_s=12.5, lost_s=5.0, totals=Totals()))
    assert (found.lost_s, found.decode_s, found.until_s) == (0.5, 0.0, 12.5)
    earlier = extend_timing(told(), Figures(time_s=11.0))
    assert earlier.until_s == 12.0 and earlier.decode_s == 0.0


@given(st.lists(st.floats(0, 100), min_size=1, max_size=50))
def test_histogram(values: list[float]) -> None:
    histogram = Histogram((1, 10, 50))
    for value in values:
        histogram.observe(value)
    for end, count in histogram.buckets():
        assert count == sum(value <= float(end) for value in values)
    assert histogram.sum == pytest.approx(sum(values)) and histogram.count == len(values)
    half, most = histogram.percentiles(50, 100) or (None, None)
    assert most == max(values) and bisect_left(sorted(values), half) <= len(values) // 2


def test_bounds() -> None:
    assert one_two_five(1) == [1] and one_two_five(512) == [1, 2, 5, 10, 20, 50, 100, 200, 500]
    assert Histogram((1, 2)).percentiles(50) is None
    assert [end for end, _ in Histogram((0.001, 1, 2560)).buckets()] == ["0.001", "1.0", "2560.0", "+Inf"]
