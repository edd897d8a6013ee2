"""The metrics of a run with known times."""

from __future__ import annotations

import pytest

from quire.bench.metrics import NothingServed, parse_goodput, percentile, rates, serving, summary
from quire.bench.report import details
from quire.bench.run import Run, ServedRequest
from quire.types import ConfigError

RUN = Run(
    [
        ServedRequest(10, 0.0, [0.5, 0.6, 0.8], cached_tokens=8),
        ServedRequest(20, 1.0, [1.1]),
        ServedRequest(5, 1.5, [], error="too long"),
        ServedRequest(30, 1.5, [2.0, 2.5]),
    ],
    [],
    0.0,
)


def test_percentiles() -> None:
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([1.0, 2.0], 75) == 1.75
    assert percentile([5.0], 99) == 5.0


def test_figures() -> None:
    found = serving(RUN, (50, 99.9), ["ttft:200"])
    assert (found["completed"], found["failed"], found["duration"]) == (3, 1, 2.5)
    assert (found["total_input_tokens"], found["total_output_tokens"], found["cached_tokens"]) == (60, 6, 8)
    assert found["output_throughput"] == found["total_output_tokens"] / 2.5
    assert found["total_token_throughput"] == found["tokens_per_second"] == 66 / 2.5
    assert found["request_goodput"] == 1 / 2.5, "one answer began within 200 ms"
    assert found["median_ttft_ms"] == pytest.approx(500) and found["mean_ttft_ms"] == pytest.approx(1100 / 3)
    assert found["mean_tpot_ms"] == pytest.approx((150 + 500) / 2), "an answer of one token has none"
    assert found["p50_itl_ms"] == pytest.approx(200) and found["p99.9_itl_ms"] <= 500
    assert found["mean_e2el_ms"] == pytest.approx((800 + 100 + 1000) / 3)
    assert found["max_concurrent_requests"] == 1, "each began after the one before had ended"
    assert found["max_output_tokens_per_s"] == 3
    assert serving(RUN)["request_goodput"] is None


def test_nothing_to_summarise() -> None:
    assert set(summary({"itl": []}, (99,)).values()) == {None}
    with pytest.raises(NothingServed, match="no request was served: too long"):
        serving(Run(RUN.served[2:3], [], 0.0))


def test_goodput_must_be_understood() -> None:
    assert parse_goodput(["ttft:500", "e2el:1e3"]) == {"ttft": 500.0, "e2el": 1000.0}
    for wrong in ("ttft", "itl:5", "ttft:fast"):
        with pytest.raises(ConfigError, match="goodput must be"):
            parse_goodput([wrong])


def test_rates_of_stretches() -> None:
    assert rates([0.1, 0.2, 0.9, 2.0], 0.5, 2.0) == [4.0, 2.0, 0.0, 2.0]


def test_details_are_those_of_each_request() -> None:
    found = details(RUN)
    assert found["input_lens"] == [10, 20, 5, 30] and found["output_lens"] == [3, 1, 0, 2]
    assert found["ttfts"][2] is None and found["errors"] == ["", "", "too long", ""]
    assert found["itls"][0] == pytest.approx([0.1, 0.2])
