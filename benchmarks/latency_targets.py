"""Latency targets on a device, and the same loads in simulated time.

    python benchmarks/latency_targets.py run [--shape Llama-3.1-8B] [--seconds 100] [--out FILE]
    python benchmarks/latency_targets.py simulate FILE

`run` times steps of a model with random weights at several levels of concurrency, and keeps them. It then serves two
loads under several settings: `streams` keeps 256 requests open (512 tokens in, 256 out), `arrivals` is 20 requests per
second (1,000 in, 200 out). `simulate` fits the steps and serves `arrivals` in simulated time, which shows how far
`quire plan` is off. `latency_curves.py` draws curves.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from quire import EngineConfig
from quire.bench.capacity import busy_seconds
from quire.bench.cost import Machine
from quire.bench.drive import Bench
from quire.bench.learned_steps import LearnedSteps, UnevenSteps
from quire.bench.load.arrivals import arrival_times
from quire.bench.load.workloads import Workload, shifted, uniform
from quire.bench.metrics import latencies_ms, percentile
from quire.bench.run import Run
from quire.bench.simulate import simulate
from quire.bench.step_padding import padding_of
from quire.core.prompt_budget import FixedBudget, LatencyBudget, PromptBudget
from quire.core.step_time import StepLoad, load_of
from quire.types import EngineInfo, RequestTargets

VOCAB = 30_000
STREAMS, RATE = 256, 20.0
SETTINGS: dict[str, dict[str, Any]] = {
    "no limit": {},
    "2048 tokens": {"mixed_prefill_tokens": 2048},
    "prefill_slowdown 4": {"prefill_slowdown": 4.0},
    "prefill_slowdown 3.5": {"prefill_slowdown": 3.5},
    "prefill_slowdown 3": {"prefill_slowdown": 3.0},
    "target_itl 25": {"target_itl": 25.0},
    "target_itl 50": {"target_itl": 50.0},
    "target_itl 15": {"target_itl": 15.0},
    "target_itl 100": {"target_itl": 100.0},
}


def budget_of(settings: dict[str, Any], most: int) -> PromptBudget:
    """Return the budget that an engine with `settings` has, to change it without building another engine."""
    if "mixed_prefill_tokens" in settings:
        return FixedBudget(settings["mixed_prefill_tokens"])
    if not settings:
        return FixedBudget(most)
    targets = RequestTargets.of_ms(settings.get("target_itl"), None)
    return LatencyBudget(most, targets, settings.get("prefill_slowdown", math.inf))


def streams(count: int = 3 * STREAMS // 2) -> Workload:
    return uniform(VOCAB, count, 512, 256)


def arrivals(count: int = 160) -> tuple[Workload, list[float]]:
    return uniform(VOCAB, count, 1000, 200, seed=1), arrival_times(count, RATE, 1.0, 0)


def row_of(run: Run) -> dict[str, float]:
    """Return the latencies and the throughput of a run."""
    found = latencies_ms(run)
    tokens = sum(one.output_len for one in run.completed)
    end_s = max(one.token_times_s[-1] for one in run.completed)
    errors = [abs(s.predicted_s / s.took_s - 1) for s in run.steps if s.predicted_s and s.took_s]
    return {
        **{f"{name}_p{p}_ms": percentile(found[name], p) for name in ("ttft", "itl") for p in (50, 99)},
        "tpot_p50_ms": percentile(found["tpot"], 50),
        "tokens_per_s": tokens / end_s,
        "prediction_error": statistics.median(errors) if errors else math.nan,
    }


def line_of(load: str, name: str, row: dict[str, float]) -> str:
    return (
        f"{load:<9}{name:<20}TTFT {row['ttft_p50_ms']:>7.0f} / {row['ttft_p99_ms']:>7.0f}  ITL {row['itl_p50_ms']:>6.1f} / "
        f"{row['itl_p99_ms']:>6.1f}  TPOT {row['tpot_p50_ms']:>5.1f}  {row['tokens_per_s']:>7.0f} tok/s  error "
        f"{100 * row['prediction_error']:.1f} %"
    )


def learn(bench: Bench, deadline_s: float) -> Iterator[tuple[StepLoad, float]]:
    """Run closed loops of growing concurrency, and yield what each step did and how long it took."""
    shift = 100
    work, times = arrivals(80)
    run = bench.run(shifted(work, VOCAB, shift), {"temperature": 0.0}, times)
    yield from zip(map(load_of, run.steps), busy_seconds(run.steps))
    for concurrency in (1, 8, 64, 256, 400):
        for length, answer in ((512, 32), (1536, 16)):
            if time.monotonic() > deadline_s:
                return
            shift += 1
            work = shifted(uniform(VOCAB, max(4, int(1.5 * concurrency)), length, answer), VOCAB, shift)
            run = bench.run(work, {"temperature": 0.0}, max_concurrency=concurrency)
            yield from zip(map(load_of, run.steps), busy_seconds(run.steps))


def run_device(args: argparse.Namespace) -> None:
    """Measure, and write the file after each result."""
    from shapes import SHAPES

    begin = time.monotonic()
    found: dict[str, Any] = {"shape": args.shape, "rows": []}
    with tempfile.TemporaryDirectory() as folder:
        config = {**SHAPES[args.shape], "max_position_embeddings": 8192}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        bench = Bench(
            EngineConfig(model=folder, load_format="dummy", skip_tokenizer_init=True),
            Machine("not measured", 1.0, 1.0),
        )
    with bench:
        scheduler, info = bench.client.engine.scheduler, bench.info
        found["info"] = asdict(info)
        most = info.max_num_batched_tokens
        print(f"built in {time.monotonic() - begin:.1f} s", flush=True)
        bench.run(shifted(streams(64), VOCAB, 99), {"temperature": 0.0})
        steps = list(learn(bench, begin + 0.3 * args.seconds))
        found["steps"] = [[*load, seconds] for load, seconds in steps]
        args.out.write_text(json.dumps(found))
        print(f"{len(steps)} steps seen at {time.monotonic() - begin:.1f} s", flush=True)
        for load in ("arrivals", "streams"):
            for index, (name, settings) in enumerate(SETTINGS.items()):
                if name not in args.settings or time.monotonic() - begin > args.seconds - 12:
                    continue
                scheduler.prompts = budget_of(settings, most)
                if load == "streams":
                    work = shifted(streams(), VOCAB, index)
                    run = bench.run(work, {"temperature": 0.0}, max_concurrency=STREAMS)
                else:
                    work, times = arrivals()
                    run = bench.run(shifted(work, VOCAB, index), {"temperature": 0.0}, times)
                row = row_of(run)
                found["rows"].append({"load": load, "settings": name, **row})
                args.out.write_text(json.dumps(found))
                print(line_of(load, name, row), flush=True)


def info_of(found: dict[str, Any]) -> EngineInfo:
    """Return the engine of a file. Fields that `EngineInfo` had once do not count."""
    names = {field.name for field in fields(EngineInfo)}
    return EngineInfo(**{name: value for name, value in found["info"].items() if name in names})


def learned_from(found: dict[str, Any]) -> LearnedSteps:
    """Return the step times of a file."""
    learned = LearnedSteps(padding_of(info_of(found)))
    learned.observe((StepLoad(*load), seconds) for *load, seconds in found["steps"])
    return learned


def simulate_file(args: argparse.Namespace) -> None:
    """Compare simulation and device. The loads follow one another on one engine, as they did on the device."""
    found = json.loads(args.file.read_text())
    learned, info = learned_from(found), info_of(found)
    steps = UnevenSteps(learned)
    error = 100 * (learned.model.median_error or 0)
    print(
        f"{len(found['steps'])} steps, median error of the fit {error:.1f} %, {1e3 * learned.capture_s:.0f} ms per capture"
    )
    for row in found["rows"]:
        if row["load"] != "arrivals":
            continue  # 256 streams decode in steps that were not learnt
        settings = SETTINGS[row["settings"]]
        config = EngineConfig(model="simulated", max_num_seqs=info.max_num_seqs, **settings)
        run = simulate(config, info, steps, *arrivals())
        print("device   ", line_of(row["load"], row["settings"], row))
        print("simulated", line_of(row["load"], row["settings"], row_of(run)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(dest="part", required=True)
    device = parts.add_parser("run", help="measure on this device")
    device.add_argument("--shape", default="Llama-3.1-8B")
    device.add_argument("--seconds", type=float, default=100.0, help="start nothing after so many seconds")
    device.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), metavar="NAME")
    device.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")) / "latency-targets.json")
    device.set_defaults(work=run_device)
    later = parts.add_parser("simulate", help="simulate the loads of a file")
    later.add_argument("file", type=Path)
    later.set_defaults(work=simulate_file)
    args = parser.parse_args()
    args.work(args)


if __name__ == "__main__":
    main()
