"""Latency targets on a device, and the same loads in simulated time.

    python benchmarks/latency_targets.py run [--shape Llama-3.1-8B] [--seconds 100] [--out FILE]
    python benchmarks/latency_targets.py check [--out FILE]
    python benchmarks/latency_targets.py simulate FILE

`run` times steps of a model with random weights at several levels of concurrency, and keeps them. It then serves two
loads under several settings: `streams` keeps 256 requests open (512 tokens in, 256 out), `arrivals` is 20 requests per
second (1,000 in, 200 out). `check` serves `arrivals` for 20 seconds and 256 requests at once with the default of
`quire serve`, and two targets. `simulate` fits the steps and serves the loads in simulated time, which shows how far
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
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

from quire import EngineConfig
from quire.bench.capacity import busy_seconds, fixed_chunks
from quire.bench.cost import Machine
from quire.bench.drive import Bench
from quire.bench.learned_steps import LearnedSteps, UnevenSteps
from quire.bench.load.arrivals import arrival_times
from quire.bench.load.workloads import Workload, shifted, uniform
from quire.bench.metrics import latencies_ms, percentile
from quire.bench.run import Run
from quire.bench.simulate import simulate
from quire.bench.step_padding import padding_of
from quire.core.prompt_budget import PromptBudget
from quire.core.step_time import StepLoad, load_of
from quire.serve.settings import PREFILL_SLOWDOWN
from quire.types import COMMON_STEP_TOKENS, EngineInfo, RequestTargets
from quire.wiring import prompt_budget

VOCAB = 30_000
STREAMS, RATE = 256, 20.0
CHUNKS = (64, 128, 256, 512, 768)  # that a limit may choose beside decoding rows
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {"prefill_slowdown": PREFILL_SLOWDOWN},
    "no limit": {},
    "2048 tokens": {"mixed_prefill_tokens": 2048},
    "prefill_slowdown 4": {"prefill_slowdown": 4.0},
    "prefill_slowdown 6": {"prefill_slowdown": 6.0},
    "prefill_slowdown 3.5": {"prefill_slowdown": 3.5},
    "prefill_slowdown 3": {"prefill_slowdown": 3.0},
    "target_itl 25": {"target_itl": 25.0},
    "target_itl 40": {"target_itl": 40.0},
    "target_itl 50": {"target_itl": 50.0},
    "target_itl 15": {"target_itl": 15.0},
    "target_itl 100": {"target_itl": 100.0},
}


def budget_of(settings: dict[str, Any], bench: Bench) -> PromptBudget:
    """Return the budget that an engine with `settings` has, to change it without building another engine."""
    limits = bench.client.engine.scheduler.limits
    config = replace(bench.config, **settings).resolved(1 << 36, limits.max_model_len)
    sizes = COMMON_STEP_TOKENS if bench.info.device.startswith("cuda") else ()
    most = config.mixed_prefill_tokens or limits.max_num_batched_tokens
    targets = RequestTargets.of_ms(config.target_itl, config.target_ttft)
    return prompt_budget(config, replace(limits, mixed_prefill_tokens=most, targets=targets), sizes)


def streams(count: int = 3 * STREAMS // 2) -> Workload:
    return uniform(VOCAB, count, 512, 256)


def arrivals(count: int = 160) -> tuple[Workload, list[float]]:
    return uniform(VOCAB, count, 1000, 200, seed=1), arrival_times(count, RATE, 1.0, 0)


# Requests, their arrival times and the limit of open ones.
LOADS: dict[str, Callable[[], tuple[Workload, list[float], int | None]]] = {
    "arrivals": lambda: (*arrivals(), None),
    "long": lambda: (*arrivals(400), None),
    "streams": lambda: (streams(), [0.0] * len(streams()), STREAMS),
    "burst": lambda: (streams(STREAMS), [0.0] * STREAMS, None),
}
CHECKS = [
    ("long", "default"),
    ("burst", "default"),
    ("burst", "no limit"),
    ("arrivals", "target_itl 15"),
    ("arrivals", "target_itl 40"),
    ("arrivals", "no limit"),
]


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
    """Run arrivals, chunks of several sizes and closed loops, and yield what each step did and how long it took."""
    shift = 100
    work, times = arrivals(80)
    yield from _timed(bench.run(shifted(work, VOCAB, shift), {"temperature": 0.0}, times))
    for size in CHUNKS:
        shift += 1
        with fixed_chunks(bench, size):
            work = shifted(uniform(VOCAB, 24, 1000, 32), VOCAB, shift)
            yield from _timed(bench.run(work, {"temperature": 0.0}, max_concurrency=12))
    for concurrency in (1, 8, 64, 256, 400):
        for length, answer in ((512, 32), (1536, 16)):
            if time.monotonic() > deadline_s:
                return
            shift += 1
            work = shifted(uniform(VOCAB, max(4, int(1.5 * concurrency)), length, answer), VOCAB, shift)
            yield from _timed(bench.run(work, {"temperature": 0.0}, max_concurrency=concurrency))


def _timed(run: Run) -> Iterator[tuple[StepLoad, float]]:
    return zip(map(load_of, run.steps), busy_seconds(run.steps))


def build(shape: str) -> Bench:
    """Return an engine with random weights."""
    from shapes import SHAPES

    with tempfile.TemporaryDirectory() as folder:
        config = {**SHAPES[shape], "max_position_embeddings": 8192}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return Bench(
            EngineConfig(model=folder, load_format="dummy", skip_tokenizer_init=True),
            Machine("not measured", 1.0, 1.0),
        )


def run_device(args: argparse.Namespace) -> None:
    """Measure, and write the file after each result."""
    begin = time.monotonic()
    found: dict[str, Any] = {"shape": args.shape, "rows": []}
    with build(args.shape) as bench:
        found["info"] = asdict(bench.info)
        print(f"built in {time.monotonic() - begin:.1f} s", flush=True)
        bench.run(shifted(streams(64), VOCAB, 99), {"temperature": 0.0})
        steps = list(learn(bench, begin + 0.3 * args.seconds))
        found["steps"] = [[*load, seconds] for load, seconds in steps]
        args.out.write_text(json.dumps(found))
        print(f"{len(steps)} steps seen at {time.monotonic() - begin:.1f} s", flush=True)
        points = args.points or product(("arrivals", "streams"), args.settings)
        for index, (load, name) in enumerate(points):
            if time.monotonic() - begin > args.seconds - 12:
                print(f"no time for {load} with {name}", flush=True)
                continue
            run = measure(bench, load, SETTINGS[name], index)
            taken = [[*load_of(s), round(s.took_s, 6), round(s.predicted_s, 6)] for s in run.steps]
            found["rows"].append({"load": load, "settings": name, **row_of(run)})
            found.setdefault("row_steps", []).append(taken)
            args.out.write_text(json.dumps(found))
            print(line_of(load, name, found["rows"][-1]), flush=True)


def measure(bench: Bench, load: str, settings: dict[str, Any], index: int) -> Run:
    """Serve a load under settings. Runs with different indices have different prompts."""
    bench.client.engine.scheduler.prompts = budget_of(settings, bench)
    work, times, concurrency = LOADS[load]()
    return bench.run(shifted(work, VOCAB, index), {"temperature": 0.0}, times, concurrency)


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
        config = EngineConfig(model="simulated", max_num_seqs=info.max_num_seqs, **SETTINGS[row["settings"]])
        simulated = row_of(simulate(config, info, steps, *LOADS[row["load"]]()))
        print("device   ", line_of(row["load"], row["settings"], row))
        print("simulated", line_of(row["load"], row["settings"], simulated), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(dest="part", required=True)
    device = parts.add_parser("run", help="measure on this device")
    device.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), metavar="NAME")
    device.set_defaults(work=run_device, points=None)
    check = parts.add_parser("check", help="measure the default, a burst and two targets in 90 seconds")
    check.set_defaults(work=run_device, points=CHECKS)
    for one, seconds in ((device, 100.0), (check, 88.0)):
        one.add_argument("--shape", default="Llama-3.1-8B")
        one.add_argument(
            "--seconds", type=float, default=seconds, help="start nothing shortly before so many seconds"
        )
        one.add_argument(
            "--out", type=Path, default=Path(os.environ.get("OUT", ".")) / "latency-targets.json"
        )
    later = parts.add_parser("simulate", help="simulate the loads of a file")
    later.add_argument("file", type=Path)
    later.set_defaults(work=simulate_file)
    args = parser.parse_args()
    args.work(args)


if __name__ == "__main__":
    main()
