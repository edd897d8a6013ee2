"""Throughput and latency over latency settings, in simulated time with step times measured on an H200.

    python benchmarks/latency_curves.py slowdown|targets|traces [--traces FOLDER] [--out FILE]
    python benchmarks/latency_curves.py draw FILE SVG

The engine is the real scheduler over a simulated device of the 8B shape in bfloat16: times of decoding steps from
`results/h200-growth-8b.json`, times of steps with prompts from `results/h200-latency-targets.json`, padding to the
sizes of captured steps, and the variation of the measured steps. Each part adds the results that FILE lacks. `slowdown` and
`targets` serve three loads: `streams` keeps 256 requests open (512 tokens in, 256 out), `arrivals` is 20 requests per
second (1,000 in, 200 out), `prompts` keeps 64 requests open (2,000 in, 20 out). `traces` replays recorded lengths and times and counts the requests within targets.
"""

from __future__ import annotations

import argparse
import json
import random
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from latency_targets import RATE, STREAMS, VOCAB, info_of, line_of, row_of

from quire import EngineConfig
from quire.bench.load.arrivals import arrival_times
from quire.bench.load.traces import read_trace, replay
from quire.bench.load.workloads import Workload, uniform
from quire.bench.metrics import percentile
from quire.bench.run import Run
from quire.bench.simulate import simulate
from quire.bench.step_padding import padding_of
from quire.core.step_time import StepLoad
from quire.types import EngineInfo
from quire.worker.step.step_shapes import row_sizes

RESULTS = Path(__file__).parent / "results"
LOADS, PROMPTS = ("streams", "arrivals", "prompts"), 64
SLOWDOWNS = (2.0, 3.0, 3.5, 4.0)
TARGETS_MS = (10, 15, 20, 25, 30, 40, 60, 80, 120, 200)
CHUNKS = (256, 512, 1024, 2048, 4096)
TTFT_S, ITL_S = 2.0, 0.05  # of a good request: time to first token, and P99 of its inter-token latencies
_PROMPT_SHARE = 0.6  # of the time of a trace, that its prompts take
# Seconds of steps with prompts by tokens, read from the results: medians of steps without decoding rows. Those of up to
# 256 tokens are of steps of the same number of tokens in h200-host-time.json and h200-growth-8b.json.
_PROMPT_S = {
    8: 4.3e-3, 32: 4.9e-3, 64: 5.3e-3, 128: 6.4e-3, 256: 8.5e-3, 512: 12.4e-3, 1024: 22.4e-3, 1536: 32.4e-3,
    2048: 42.3e-3, 4096: 87.9e-3, 8192: 178e-3,
}  # fmt: skip
# Per thousand entries that a decoding row reads, without prompts and with them, and that a prompt reads.
_ENTRY_S, _MIXED_ENTRY_S, _PROMPT_ENTRY_S = 27e-6, 45e-6, 1.5e-6
_CAPTURE_S = 53e-3  # for which a capture keeps the host busy


class MeasuredSteps:
    """The step times of the 8B shape on an H200, with the variation of the steps of a file.

    Args:
        steps: rows, context, prompt tokens, prompt context and seconds of measured steps, in their order.
        info: the engine.
        seed: of the choice of variations.
    """

    def __init__(self, steps: Sequence[Sequence[float]], info: EngineInfo, seed: int = 0) -> None:
        points = json.loads((RESULTS / "h200-growth-8b.json").read_text())["points"]
        decode = sorted((p["batch_size"], p["time_s"]) for p in points if p["curve"] == "batch")
        self._rows, self._rows_s = zip(*(point for point in decode if point[0] != 2))  # an outlier
        self._row_sizes = row_sizes(info.max_num_seqs)
        self._choose = random.Random(seed)
        self._ratios: dict[bool, list[float]] = {False: [], True: []}
        self._padding, self._run = padding_of(info), StepLoad(0, 0.0, 0, 0.0)
        for *load, seconds in steps:
            run, captures = self._padding.run(StepLoad(*load))  # type: ignore[arg-type]
            ratio = seconds / self.typical_s(run)
            if (
                not captures and 0.8 < ratio < 1.3
            ):  # others compiled, or share their time with a neighbour under overlap
                self._ratios[run.prompt_tokens > 0].append(ratio)
        self._padding = padding_of(info)

    def typical_s(self, run: StepLoad) -> float:
        """Return the time of a padded step without variation."""
        if not run.prompt_tokens:
            rows = self._row_sizes[bisect_left(self._row_sizes, run.rows)]
            base, read = np.interp(rows, self._rows, self._rows_s), run.context - 0.128 * run.rows
            return float(base) + max(0.0, read) * _ENTRY_S
        base = np.interp(run.rows + run.prompt_tokens, list(_PROMPT_S), list(_PROMPT_S.values()))
        return float(base) + run.context * _MIXED_ENTRY_S + run.prompt_context * _PROMPT_ENTRY_S

    def launch_s(self, load: StepLoad) -> float:
        self._run, captures = self._padding.run(load)
        return captures * _CAPTURE_S

    def predict(self, load: StepLoad) -> float:
        return self.typical_s(self._run) * self._choose.choice(self._ratios[self._run.prompt_tokens > 0])


class Simulation:
    """Runs of loads on the simulated device."""

    def __init__(self) -> None:
        found = json.loads((RESULTS / "h200-latency-targets.json").read_text())
        self._info, self._steps = info_of(found), found["steps"]

    def run(
        self, settings: dict[str, Any], work: Workload, times: list[float], concurrency: int | None = None
    ) -> Run:
        """Serve a load under engine settings."""
        config = EngineConfig(model="simulated", max_num_seqs=self._info.max_num_seqs, **settings)
        return simulate(config, self._info, MeasuredSteps(self._steps, self._info), work, times, concurrency)

    def load(self, load: str, settings: dict[str, Any]) -> Run:
        """Serve one of `LOADS`."""
        if load == "prompts":
            work = uniform(VOCAB, 12 * PROMPTS, 2000, 20)
            return self.run(settings, work, [0.0] * len(work), PROMPTS)
        if load == "streams":
            work = uniform(VOCAB, 3 * STREAMS, 512, 256)
            return self.run(settings, work, [0.0] * len(work), STREAMS)
        work = uniform(VOCAB, 400, 1000, 200, seed=1)
        return self.run(settings, work, arrival_times(len(work), RATE, 1.0, 0))

    def trace(self, path: Path, settings: dict[str, Any]) -> tuple[Run, float]:
        """Replay a trace at a speed at which prompts take a fixed share of the time. Return the run and the rate."""
        work, times, _ = replay(read_trace(path), VOCAB, 8192, 300)
        duration_s = sum(len(ids) for ids, _ in work) * 22e-6 / _PROMPT_SHARE
        return self.run(settings, work, [at * duration_s / times[-1] for at in times]), len(work) / duration_s


class ResultFile:
    """The results in a JSON file, which is written after each of them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.found: dict[str, list[dict[str, Any]]] = json.loads(path.read_text()) if path.exists() else {}

    def lacks(self, part: str, **key: Any) -> bool:
        """Return whether no result of a part has these fields."""
        return not any(key.items() <= row.items() for row in self.found.get(part, []))

    def add(self, part: str, row: dict[str, Any]) -> None:
        """Append a result to a part."""
        print(line_of(row.get("load", ""), row["name"], row), flush=True)
        self.found.setdefault(part, []).append(row)
        self._path.write_text(json.dumps(self.found, indent=1) + "\n")


def goodput_share(run: Run) -> float:
    """Return the share of the requests whose first token and P99 of inter-token latencies are within the targets."""
    good = [
        one
        for one in run.completed
        if one.ttft_s <= TTFT_S and (not one.itls_s or percentile(one.itls_s, 99) <= ITL_S)
    ]
    return len(good) / len(run.completed)


def trace_settings() -> dict[str, dict[str, Any]]:
    """Return the settings that are compared on traces, by name."""
    chunks = {f"chunks of {size}": {"mixed_prefill_tokens": size} for size in CHUNKS}
    targets = {f"target_itl {ms}": {"target_itl": float(ms)} for ms in (25, 40, 50)}
    return {"no limit": {}, **chunks, "prefill_slowdown 4": {"prefill_slowdown": 4.0}, **targets}


def serve_loads(part: str, key: str, values: Sequence[float], results: ResultFile) -> None:
    """Add the figures of both loads without a limit, and for each value of a setting."""
    simulation = Simulation()
    for value in (None, *values):
        name = "no limit" if value is None else f"{key} {value:g}"
        for load in LOADS:
            if results.lacks(part, load=load, value=value):
                row = row_of(simulation.load(load, {key: value}))
                results.add(part, {"load": load, "name": name, "value": value, **row})


def replay_traces(folder: Path, results: ResultFile) -> None:
    """Add the goodput of each setting on each trace."""
    simulation = Simulation()
    for path in sorted(folder.iterdir()):
        for name, settings in trace_settings().items():
            if results.lacks("traces", load=path.stem, name=name):
                run, rate = simulation.trace(path, settings)
                share = goodput_share(run)
                results.add(
                    "traces", {"load": path.stem, "name": name, "rate": rate, "good": share, **row_of(run)}
                )


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw throughput and inter-token latency over the target, and the goodput on traces."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(10, 7))
    left, right = axes[0]
    for load, colour in zip(LOADS, ("C0", "C1", "C2")):
        free, *rows = sorted(
            (r for r in found["targets"] if r["load"] == load), key=lambda r: r["value"] or 0
        )
        targets = [row["value"] for row in rows]
        left.plot(
            targets, [100 * row["tokens_per_s"] / free["tokens_per_s"] for row in rows], "o-", label=load
        )
        right.plot(targets, [row["itl_p99_ms"] for row in rows], "o-", color=colour, label=f"{load}, P99")
        right.plot(targets, [row["itl_p50_ms"] for row in rows], ":", color=colour, label=f"{load}, median")
    right.plot(targets, targets, color="0.7", linewidth=1, label="the target")
    left.set(ylabel="output tokens/s, % of no limit", ylim=(0, 108))
    right.set(ylabel="inter-token latency in ms", yscale="log")
    right.set_yticks(targets, [f"{x:g}" for x in targets])
    for axis in (left, right):
        axis.set(xlabel="--target-itl in ms", xscale="log")
        axis.set_xticks(targets, [f"{x:g}" for x in targets])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    _draw_goodput(found["traces"], axes[1], pyplot)
    figure.suptitle("Simulated with step times of an H200, 8B shape in bfloat16")
    figure.tight_layout()
    figure.savefig(path)


def _draw_goodput(rows: list[dict[str, Any]], axes: Any, pyplot: Any) -> None:
    names, traces = list(trace_settings()), sorted({row["load"] for row in rows})
    grid = axes[0].get_gridspec()
    for axis in axes:
        axis.remove()
    axis = pyplot.gcf().add_subplot(grid[1, :])
    for number, trace in enumerate(traces):
        values = {row["name"]: 100 * row["good"] for row in rows if row["load"] == trace}
        places = [index + 0.27 * (number - 1) for index in range(len(names))]
        axis.bar(places, [values[name] for name in names], 0.25, label=trace)
    axis.set_xticks(range(len(names)), [name.replace(" ", "\n", 1) for name in names], fontsize=8)
    axis.set(ylabel="% of the requests within 2 s and 50 ms", ylim=(0, 105))
    axis.legend(fontsize=7, loc="upper left")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("slowdown", "targets", "traces", "draw"))
    parser.add_argument("files", nargs="*", type=Path, help="with draw: the results and the picture")
    parser.add_argument("--traces", type=Path, help="folder of recorded traces")
    parser.add_argument("--out", type=Path, default=RESULTS / "simulated-latency-curves.json")
    args = parser.parse_args()
    if args.part == "draw":
        results, picture = args.files
        return draw(json.loads(results.read_text()), picture)
    results = ResultFile(args.out)
    if args.part == "slowdown":
        serve_loads("slowdown", "prefill_slowdown", SLOWDOWNS, results)
    elif args.part == "targets":
        serve_loads("targets", "target_itl", TARGETS_MS, results)
    else:
        replay_traces(args.traces, results)


if __name__ == "__main__":
    main()
