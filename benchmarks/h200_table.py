"""The performance table of Quire on one NVIDIA H200, compared with vLLM, SGLang and the machine's limit.

    python benchmarks/h200_table.py [--models Qwen3-0.6B ...] [--workloads nano ...] [--eager] [--out FILE]

Models have random weights in their true shapes and run in bfloat16 (names ending in FP8: with FP8 weights), in one process, with token ids in and out, without
an end-of-sequence stop, with max_model_len 4096 and otherwise default settings. Each figure is the better of two runs;
the first run, its clock, power and energy per output token are shown beside it (the latter need nvidia-ml-py). The prompts of each run are new to the prefix cache; those of `prefix` share a prefix within a run. `startup` is a fresh
process on a checkpoint that was just written. Sampled rows must reach 95 % of greedy ones. The floor is the least time
of the run's steps on the machine, whose limits are measured first (src/quire/bench/cost.py). The file is written after
each row; it keeps the rows that are not run again.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from random_checkpoint import write_checkpoint
from shapes import DEEPSEEK_V2_LITE, LLAMA32_3B, QWEN3_30B, QWEN3_NEXT, QWEN35_4B
from shapes import SHAPES as TWO_SHAPES

from quire import EngineConfig
from quire.assembly.device import pick_device
from quire.bench.cost import Machine
from quire.bench.drive import Bench
from quire.bench.load.workloads import WORKLOADS, shifted
from quire.bench.machine import measure
from quire.bench.metrics import limits, serving
from quire.bench.report import save
from quire.bench.startup import start_up

SHAPES = {
    **TWO_SHAPES, "Llama-3.2-3B": LLAMA32_3B, "DeepSeek-V2-Lite": DEEPSEEK_V2_LITE, "Qwen3.5-4B": QWEN35_4B,
    "Qwen3-30B-A3B": QWEN3_30B, "Qwen3-Next-80B-A3B": QWEN3_NEXT, "Qwen3-Next-80B-A3B-FP8": QWEN3_NEXT,
}  # fmt: skip
FORMATS = {"Qwen3-Next-80B-A3B-FP8": "fp8"}  # of converted weights; the others stay in bfloat16
MODELS = ("Qwen3-0.6B", "Llama-3.2-3B", "Llama-3.1-8B")
SAMPLED = {"temperature": 0.6, "top_p": 0.95, "top_k": 50}
VOCAB = 100_000
EAGER = {"attention": "reference", "cuda_graphs": False}


@dataclass(frozen=True)
class Anchor:
    """The target of a row, and the results of vLLM 0.24 and SGLang 0.5.16 on the same kind of machine."""

    target: float | None = None
    vllm: float | None = None
    sglang: float | None = None


ANCHORS = {
    ("Qwen3-0.6B", "startup"): Anchor(None, 198, 143),
    ("Qwen3-0.6B", "single"): Anchor(1500, 591, 624),
    ("Qwen3-0.6B", "nano"): Anchor(30_000, 22_632, 22_921),
    ("Qwen3-0.6B", "nano sampled"): Anchor(None, 23_124, 22_772),
    ("Qwen3-0.6B", "chat"): Anchor(32_000, 23_663, 22_358),
    ("Qwen3-0.6B", "chat sampled"): Anchor(None, 21_713, None),
    ("Qwen3-0.6B", "prefix"): Anchor(0.48, 0.883, 0.686),
    ("Llama-3.1-8B", "startup"): Anchor(12, 91, 67),
    ("Llama-3.1-8B", "single"): Anchor(245, 203, 209),
    ("Llama-3.1-8B", "nano"): Anchor(11_200, 9_983, 10_010),
    ("Llama-3.1-8B", "chat"): Anchor(14_000, 12_202, 11_591),
    ("Llama-3.1-8B", "prefill"): Anchor(43_500, 40_167, 40_966),
    ("Llama-3.1-8B", "prefix"): Anchor(1.15, 1.521, 1.421),
    ("Qwen3-30B-A3B", "single"): Anchor(420, 233, None),
    ("Qwen3-30B-A3B", "nano"): Anchor(7_200, 6_182, None),
    ("Qwen3-30B-A3B", "prefix"): Anchor(1.2, None, None),
}
UNITS = {"prefix": "s", "startup": "s", "prefill": "tok/s in all"}  # others: output tokens per second


class Results:
    """The rows by model and workload, written to disk after each row."""

    def __init__(self, path: Path, machine: Machine) -> None:
        self.path = path
        self.found: dict[str, Any] = {"rows": []}
        if path.exists():
            self.found = json.loads(path.read_text())
        self.found |= {"machine": asdict(machine), "torch": torch.__version__}

    def put(self, model: str, workload: str, value: float, figures: dict[str, Any]) -> None:
        anchor = ANCHORS.get((model, workload), Anchor())
        row = {
            "model": model,
            "workload": workload,
            "value": value,
            "unit": UNITS.get(workload, "tok/s"),
            **asdict(anchor),
            **figures,
        }
        rows = [r for r in self.found["rows"] if (r["model"], r["workload"]) != (model, workload)]
        self.found["rows"] = [*rows, row]
        save(self.path, self.found)
        print(line_of(row), flush=True)


HEADING = (
    f"{'model':<14}{'workload':<14}{'Quire':>9} {'unit':<13}{'target':>9}{'vLLM':>9}{'SGLang':>9}"
    f"{'seconds':>9}{'first run':>11}{'floor s':>9}{'of floor':>10}{'MHz':>6}{'W':>6}{'J/tok':>7}"
)


def line_of(row: dict[str, Any]) -> str:
    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:,.2f}" if value < 100 else f"{value:,.0f}"

    share = f"{100 * row['share_of_limit']:.0f} %" if "share_of_limit" in row else "-"
    return (
        f"{row['model']:<14}{row['workload']:<14}{number(row['value']):>9} {row['unit']:<13}"
        f"{number(row['target']):>9}{number(row['vllm']):>9}{number(row['sglang']):>9}"
        f"{number(row['duration']):>9}{number(row.get('runs_s', [None])[0]):>11}{number(row.get('floor_s')):>9}"
        f"{share:>10}{number(row.get('clock_mhz')):>6}{number(row.get('power_w')):>6}"
        f"{number(row.get('j_per_output_token')):>7}"
    )


def measure_start(results: Results, model: str, settings: dict[str, Any]) -> None:
    """Measure the start twice, because the first one also fills the caches of compiled kernels."""
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), SHAPES[model])
        starts = [start_up({"model": folder, **settings}) for _ in range(2)]
    best = min(starts, key=lambda one: one["total"])
    results.put(model, "startup", best["total"], {"duration": best["total"], "starts": starts})


def measure_load(
    bench: Bench, workload: str, params: dict[str, Any], shifts: Iterator[int], runs: int
) -> dict[str, Any]:
    """Return the figures of the best run, and the seconds of all runs."""
    work = WORKLOADS[workload](VOCAB, None)
    found = []
    for _ in range(runs):
        run = bench.run(shifted(work, VOCAB, next(shifts)), params)
        figures = serving(run)
        assert figures["failed"] == 0 and figures["total_output_tokens"] == sum(count for _, count in work)
        energy = run.energy.figures(figures["total_output_tokens"])
        found.append({**figures, **limits(run.steps, run.duration_s, bench.costs, bench.machine), **energy})
    return {**min(found, key=lambda one: one["duration"]), "runs_s": [one["duration"] for one in found]}


def value_of(workload: str, figures: dict[str, Any]) -> float:
    if UNITS.get(workload) == "s":
        return figures["duration"]
    return figures["total_token_throughput" if workload == "prefill" else "output_throughput"]


def measure_model(results: Results, model: str, workloads: list[str], args: argparse.Namespace) -> None:
    settings = {
        "skip_tokenizer_init": True,
        "max_model_len": 4096,
        "quantization": FORMATS.get(model, "auto"),
    }
    settings |= EAGER if args.eager else {}
    if "startup" in workloads:
        measure_start(results, model, settings)
    if not (loads := [name for name in workloads if name in WORKLOADS]):
        return
    shifts = iter(range(10_000))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[model]))
        config = EngineConfig(model=folder, load_format="dummy", **settings)
        with Bench(config, Machine(**results.found["machine"])) as bench:
            bench.run(shifted(WORKLOADS["single"](VOCAB, 1), VOCAB, 9_999), {"temperature": 0.0})
            for workload in loads:
                greedy, ways = 0.0, {workload: {"temperature": 0.0}}
                if workload in ("nano", "chat") and not args.eager:
                    ways[f"{workload} sampled"] = SAMPLED
                for name, params in ways.items():
                    figures = measure_load(bench, workload, params, shifts, 1 if args.eager else 2)
                    value = value_of(workload, figures)
                    if params is SAMPLED:
                        figures["target"] = 0.95 * greedy
                    else:
                        greedy = value
                    results.put(model, name, value, figures)
    del bench
    gc.unfreeze()  # the engine had frozen its objects
    gc.collect()
    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=MODELS)
    parser.add_argument(
        "--workloads", nargs="+", choices=["startup", *WORKLOADS], default=["startup", *WORKLOADS]
    )
    parser.add_argument(
        "--eager",
        action="store_true",
        help="the baseline: plain torch attention, no graphs, greedy, one run each",
    )
    parser.add_argument("--out", type=Path, help="default: results/h200-table.json or h200-table-eager.json")
    args = parser.parse_args()
    if pick_device("auto").type != "cuda" and set(args.models) & set(MODELS):
        raise SystemExit(
            "h200_table.py needs a GPU: the models would run for hours on a CPU; use quire bench there"
        )
    machine = measure(pick_device("auto"), torch.bfloat16)
    print(
        f"{machine.device}: {machine.bytes_per_s / 1e12:.2f} TB/s, {machine.flops_per_s / 1e12:.0f} TFLOP/s, measured"
    )
    name = "h200-table-eager.json" if args.eager else "h200-table.json"
    results = Results(args.out or Path(__file__).parent / "results" / name, machine)
    print(HEADING)
    for model in args.models:
        measure_model(results, model, args.workloads, args)
    print(f"\n{HEADING}")
    for row in sorted(results.found["rows"], key=lambda row: row["model"]):
        print(line_of(row))


if __name__ == "__main__":
    main()
