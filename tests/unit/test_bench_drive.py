"""The open-loop driver and the selected steps of the profiler, on a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.bench.cost import Machine
from quire.bench.drive import Bench
from quire.bench.load.workloads import shifted, uniform
from quire.bench.metrics import limits, serving
from quire.bench.offline import OfferedLoad, latency, throughput
from quire.bench.profiling import after, decoding, run_profile
from quire.config import EngineConfig
from quire.types import ConfigError
from tiny import write_tiny

MACHINE = Machine("a machine", 1e9, 1e10)
GREEDY = {"temperature": 0.0}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = write_tiny(tmp_path_factory.mktemp("model"))
    config = EngineConfig(
        model=str(folder), device="cpu", skip_tokenizer_init=True, max_num_seqs=4, kv_cache_memory=1 << 20
    )
    with Bench(config, MACHINE) as made:
        yield made


def test_requests_come_when_they_are_due(bench: Bench) -> None:
    work = uniform(200, 4, 8, 3)
    run = bench.run(work, GREEDY, [0.0, 0.0, 0.2, 0.4])
    assert [one.start_s for one in run.served] == [0.0, 0.0, 0.2, 0.4]
    for one in run.served:
        assert len(one.token_times_s) == 3 and one.token_times_s == sorted(one.token_times_s)
        assert one.token_times_s[0] > one.start_s and one.error is None
    assert run.duration_s >= 0.4
    found = {**serving(run), **limits(run.steps, run.duration_s, bench.costs, bench.machine)}
    assert found["total_output_tokens"] == 12 and found["completed"] == 4
    assert sum(n for record in run.steps for _, _, n in record.rows) >= 4 * (8 + 2), "all steps are there"
    assert found["share_of_limit"] > 0 and not bench.client.engine.has_work


def test_a_limit_on_concurrency_delays_the_start(bench: Bench) -> None:
    run = bench.run(uniform(200, 3, 8, 4, seed=1), GREEDY, max_concurrency=1)
    ends = [one.token_times_s[-1] for one in run.served]
    assert [one.start_s for one in run.served][1:] >= ends[:2]
    assert serving(run)["max_concurrent_requests"] == 1


def test_warm_ups_leave_nothing_in_the_prefix_cache(bench: Bench) -> None:
    shared = [([7] * 40, 2), ([7] * 40, 2)]
    run = throughput(bench, OfferedLoad(shared, [0.0, 0.0]), GREEDY, warmups=2, show_progress=False)
    assert run.served[0].cached_tokens == 0
    assert shifted(shared, 200, 195)[0][0][0] == 2
    with pytest.raises(ConfigError, match="the longest request has 300 tokens, but max_model_len is 256"):
        throughput(bench, OfferedLoad(uniform(200, 1, 200, 100), [0.0]), GREEDY, 0, False)
    with pytest.raises(
        ConfigError, match="the longest request has 300 tokens"
    ):  # else its rate would be too high
        latency(bench, 1, 200, 100, 0, 1, GREEDY)


def test_latency_of_batches(bench: Bench) -> None:
    found = latency(bench, 2, 8, 3, 1, 2, GREEDY)
    assert len(found["latencies"]) == 2 and set(found["percentiles"]) == {"10", "25", "50", "75", "90", "99"}
    assert found["steps"] >= 6 and found["median_itl_ms"] > 0


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_profile_of_decode(bench: Bench, tmp_path: Path, suffix: str) -> None:
    work = uniform(200, 3, 8, 40)
    found = run_profile(bench, work, GREEDY, decoding(3), 5, tmp_path / f"trace{suffix}")
    assert found.steps == found.timed["steps"] == 5 and not found.on_gpu
    assert {row.name: row.calls for row in found.products} == {
        "qkv": 10, "o": 10, "gate_up": 10, "down": 10, "lm_head": 5,
    }  # fmt: skip
    parts = {row.name: row for row in found.parts}
    assert parts["attention"].least_us > 0 and parts["matrix products"].least_us > 0
    assert 0 <= found.idle_share < 1 and found.busy_s > 0
    assert not bench.client.engine.has_work, "the rest of the load was aborted"


def test_profile_of_prefill_and_beyond_the_end(bench: Bench, tmp_path: Path) -> None:
    found = run_profile(bench, uniform(200, 2, 30, 1, seed=5), GREEDY, after(0), 9, tmp_path / "t.json")
    assert found.steps == 1
    with pytest.raises(ConfigError, match="the load ended after"):
        run_profile(bench, uniform(200, 1, 8, 2), GREEDY, after(50), 5, tmp_path / "t.json")
