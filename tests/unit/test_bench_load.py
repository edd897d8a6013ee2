"""Load generation: arrival times, datasets and traces."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import pytest

from quire.bench.load.arrivals import arrival_times
from quire.bench.load.traces import BLOCK, read_trace, replay
from quire.types import ConfigError

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:17:03.9799600,40,10\r\n2023-11-16 18:17:05.9799600,5000,8\r\n2023-11-16 18:17:04.4799600,7,3\r\n"  # fmt: skip
MOONCAKE = """{"timestamp": 27000, "input_length": 600, "output_length": 5, "hash_ids": [7, 8]}
{"timestamp": 28500, "input_length": 1100, "output_length": 6, "hash_ids": [7, 9, 10]}
"""


def gaps(times: list[float]) -> list[float]:
    return [after - before for before, after in zip([0.0, *times], times)]


def test_all_at_once_without_a_rate() -> None:
    assert arrival_times(3) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_keep_the_rate_and_spread_as_asked(burstiness: float) -> None:
    times = arrival_times(4000, 20.0, burstiness, seed=3)
    assert times == sorted(times) == arrival_times(4000, 20.0, burstiness, seed=3)
    assert times[-1] == pytest.approx(200.0)
    # a gamma distribution of shape k has a standard deviation of mean / sqrt(k)
    spread = statistics.pstdev(gaps(times)) / statistics.fmean(gaps(times))
    assert spread == pytest.approx(1 / math.sqrt(burstiness), rel=0.1)


def test_azure_trace(tmp_path: Path) -> None:
    file = tmp_path / "azure.csv"
    file.write_text(AZURE, newline="")
    rows = read_trace(file)
    assert [(row.at_s, row.input_len, row.output_len) for row in rows] == [
        (0.0, 40, 10),
        (pytest.approx(0.5), 7, 3),
        (pytest.approx(2.0), 5000, 8),
    ]
    work, times, left_out = replay(rows, 1000, 2048, scale=5.0)
    assert [(len(ids), n) for ids, n in work] == [(40, 10), (7, 3)] and left_out == 1
    assert times == [0.0, pytest.approx(0.1)]
    assert all(0 <= token < 1000 for ids, _ in work for token in ids)
    assert work == replay(rows, 1000, 2048)[0], "the same prompts in every run"


def test_mooncake_trace_shares_what_its_hashes_share(tmp_path: Path) -> None:
    file = tmp_path / "mooncake.jsonl"
    file.write_text(MOONCAKE)
    work, times, left_out = replay(read_trace(file), 1000, 2048)
    (first, _), (second, _) = work
    assert times == [0.0, 1.5] and left_out == 0
    assert (len(first), len(second)) == (600, 1100)
    assert first[:BLOCK] == second[:BLOCK] and first[BLOCK:600] != second[BLOCK:600]
    assert len(replay(read_trace(file), 1000, 2048, count=1)[0]) == 1


def test_bad_traces_are_named(tmp_path: Path) -> None:
    file = tmp_path / "other.csv"
    for text in ("a,b\n1,2\n", '{"timestamp": 1}\n', '{"timestamp":0,"input_length":9,"output_length":1,"hash_ids":[1,2]}'):  # fmt: skip
        file.write_text(text)
        with pytest.raises(ConfigError, match=r"other\.csv is neither an Azure trace"):
            read_trace(file)
    with pytest.raises(ConfigError, match="cannot read"):
        read_trace(tmp_path / "missing")
    file.write_text(AZURE)
    with pytest.raises(ConfigError, match="no request of the trace fits"):
        replay(read_trace(file), 1000, 8)


@pytest.mark.parametrize(
    ("name", "count", "seconds"),
    [
        ("AzureLLMInferenceTrace_code.csv", 8819, 3400),
        ("AzureLLMInferenceTrace_conv.csv", 19366, 3500),
        ("mooncake_conversation.jsonl", 12031, 3537),
    ],
)
def test_real_traces(data: Path, name: str, count: int, seconds: float) -> None:
    rows = read_trace(data / "traces" / name)
    assert len(rows) == count and rows[0].at_s == 0 and rows[-1].at_s == pytest.approx(seconds, rel=0.02)
    work, times, _ = replay(rows, 50_000, 16_384, count=20)
    assert len(work) == 20 and times == sorted(times)
    if name.startswith("mooncake"):
        assert len({tuple(ids[:BLOCK]) for ids, _ in work}) == 1, "all begin with block 0"
