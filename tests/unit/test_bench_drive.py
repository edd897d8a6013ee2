"""The open-loop driver and the selected steps of the profiler, on a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from quire.bench.cost import Cost, Machine
from quire.bench.drive import Bench
from quire.bench.energy import EnergyMeter, energy_meter, joined
from quire.bench.growth import GrowthPlan, bound_by, measure_growth
from quire.bench.load.sessions import sessions
from quire.bench.load.workloads import shifted, uniform
from quire.bench.metrics import limits, serving
from quire.bench.offline import OfferedLoad, latency, throughput
from quire.bench.profiling import after, decoding, run_profile
from quire.bench.sessions import run_sessions, session_figures
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


def test_drafts_of_the_run_are_counted(tmp_path: Path) -> None:
    config = EngineConfig(
        model=str(write_tiny(tmp_path)), device="cpu", skip_tokenizer_init=True, kv_cache_memory=1 << 20,
        spec_method="ngram", spec_tokens=3, spec_adaptive=False,
    )  # fmt: skip
    work = uniform(200, 3, 8, 30)
    with Bench(config, MACHINE) as drafting:
        first, second = drafting.run(work, GREEDY), drafting.run(work, GREEDY)
        assert second.drafts.rows == first.drafts.rows > 0  # those of the run, not since the start
        found = serving(second)
        whole = latency(drafting, 2, 8, 20, 1, 2, GREEDY)
    drafts = second.drafts
    assert sum(drafts.accepted_at) == drafts.accepted <= drafts.tokens <= 3 * drafts.rows
    assert found["spec_decode_draft_tokens"] == drafts.tokens
    assert found["spec_decode_acceptance_length"] == 1 + drafts.accepted / drafts.rows
    assert len(found["spec_decode_per_position_acceptance_rates"]) == 3
    assert 0 < whole["spec_decode_num_drafts"] <= 2 * 2 * 20


def test_without_drafts_there_are_no_figures_of_them(bench: Bench) -> None:
    assert not any("spec_decode" in name for name in serving(bench.run(uniform(200, 1, 4, 2), GREEDY)))


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


def test_growth_measures_only_what_it_says(bench: Bench) -> None:
    plan, skipped = GrowthPlan([1, 4, 8], 16, [16, 64, 4096], [1, 3], [5, 40]).fitted(bench.info)
    assert plan.batch_sizes == [1, 4] and plan.contexts == [16, 64] and plan.prompt_lens == [5, 40]
    assert len(skipped) == 2 and "max_num_seqs is 4" in skipped[0] and "max_model_len is 256" in skipped[1]
    points = list(measure_growth(bench, plan))
    found = [(point.curve, point.batch_size, point.context) for point in points]
    assert found == [
        *(("batch", rows, 16) for rows in (1, 4)),
        *(("context", rows, context) for rows in (1, 3) for context in (16, 64)),
        *(("prompt", 1, length) for length in (5, 40)),
    ]
    assert all(point.floor_s > 0 and point.time_s > 0 for point in points)
    floors = {(point.curve, point.batch_size, point.context): point.floor_s for point in points}
    assert floors["context", 3, 64] > floors["context", 3, 16] > floors["context", 1, 16]
    assert floors["prompt", 1, 40] > floors["prompt", 1, 5]


def test_the_larger_part_names_the_limit() -> None:
    assert bound_by(Cost(1e9, 1e9, 0, 0), MACHINE) == "bandwidth"
    assert bound_by(Cost(1e9, 3e10, 1e9, 0), MACHINE) == "matrix rate"
    assert bound_by(Cost(1e9, 3e10, 4e9, 0), MACHINE) == "bandwidth"


class _Nvml:
    """Counters of a GPU that draws 500 W at 1,500 MHz, on a clock of its own."""

    NVML_CLOCK_SM = 1

    def __init__(self) -> None:
        self.millijoules = 7_000

    def nvmlDeviceGetMaxClockInfo(self, handle: object, kind: int) -> int:
        return 1980

    def nvmlDeviceGetClockInfo(self, handle: object, kind: int) -> int:
        return 1500

    def nvmlDeviceGetUtilizationRates(self, handle: object) -> SimpleNamespace:
        return SimpleNamespace(gpu=90)

    def nvmlDeviceGetMemoryInfo(self, handle: object) -> SimpleNamespace:
        return SimpleNamespace(used=3 << 30)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: object) -> int:
        return self.millijoules


def test_energy_of_a_measurement() -> None:
    nvml = _Nvml()
    with EnergyMeter(nvml, None).measure() as energy:
        nvml.millijoules += 5_000
    energy.seconds = 0.01
    figures = energy.figures(output_tokens=20)
    assert figures["energy_j"] == 5.0 and figures["j_per_output_token"] == 0.25 and figures["power_w"] == 500
    assert figures["max_clock_mhz"] == 1980 and figures["clock_mhz"] == 1500
    assert figures["gpu_utilization_pct"] == 90 and figures["peak_memory_bytes"] == 3 << 30
    twice = joined([energy, energy]).figures(output_tokens=20)
    assert twice["energy_j"] == 10.0 and twice["power_w"] == 500 and twice["peak_memory_bytes"] == 3 << 30
    with energy_meter("cpu").measure() as energy:
        pass
    figures = energy.figures(3)
    assert figures.pop("peak_memory_bytes") > 50 << 20  # of this process
    assert set(figures.values()) == {None}


def test_sessions_send_what_was_said_before(bench: Bench) -> None:
    load, again = (sessions("agent_session", "short", 200, 0.05) for _ in range(2))
    assert load == again and len({tuple(one.system) for one in load}) == 1
    shifted_load = sessions("agent_session", "short", 200, 0.05, shift=3)
    assert [one.length for one in shifted_load] == [one.length for one in load]
    run = run_sessions(bench, load, GREEDY)
    for index, session in enumerate(load):
        turns = [turn for turn in run.turns if turn.session == index]
        assert [turn.turn for turn in turns] == list(range(len(session.turns)))
        length = len(session.system)
        for served, turn in zip(turns, session.turns):
            length += len(turn.new_tokens)
            assert served.prompt_len == length and len(served.token_times_s) == turn.answer_len
            length += turn.answer_len
        for served, turn, before in zip(turns[1:], session.turns[1:], turns):
            assert served.sent_s == pytest.approx(before.token_times_s[-1] + turn.pause_s)
    figures = session_figures(run)
    assert figures["turns"] == sum(len(one.turns) for one in load) and figures["cached_share"] > 0.3
    assert figures["mean_turn_latency_ms"] > figures["mean_ttft_ms"] > 0
    with pytest.raises(ConfigError, match=r"the longest session has .* max_model_len is 256"):
        run_sessions(bench, sessions("agent_session", "short", 200), GREEDY)
