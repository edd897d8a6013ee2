"""Measure the first run of a fresh process against the second: what a server loses in its first minute.

    python benchmarks/first_run.py                                     # every model and workload, one GPU
    python benchmarks/first_run.py --models Qwen3-0.6B --workloads nano chat --set capture_at_start=false

Each workload runs twice in a process of its own, with the settings of h200_table.py: random weights in the true shapes,
bfloat16, greedy (or sampled, with --sampled), max_model_len 4096. Before the table, one short process per model fills the
disk cache of compiled kernels. The prompts of the second run are new to the prefix cache.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from h200_table import MODELS, SAMPLED, SHAPES, VOCAB

from quire import EngineConfig
from quire.bench.cost import Machine
from quire.bench.drive import Bench
from quire.bench.load.workloads import WORKLOADS, shifted
from quire.bench.report import save

_ANY_MACHINE = Machine(device="", bytes_per_s=1.0, flops_per_s=1.0)


def run_case(model: str, workload: str, settings: dict[str, Any], runs: int, sampled: bool) -> dict[str, Any]:
    """Run one workload in this process. Return seconds of the start-up and of each run."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[model]))
        config = EngineConfig(
            model=folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=4096, **settings
        )
        begin_s = time.perf_counter()
        with Bench(config, _ANY_MACHINE) as bench:
            start_s = time.perf_counter() - begin_s
            work = WORKLOADS[workload](VOCAB, None)
            params = SAMPLED if sampled else {"temperature": 0.0}
            runs_s = [bench.run(shifted(work, VOCAB, run), params).duration_s for run in range(runs)]
            phases_s = bench.info.phases_s
    return {
        "model": model,
        "workload": workload,
        "sampled": sampled,
        "settings": settings,
        "start_s": start_s,
        "phases_s": phases_s,
        "runs_s": runs_s,
    }


def in_new_process(case: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, __file__, "--case", json.dumps(case)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=MODELS)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--sampled", action="store_true")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=JSON", help="settings of the engine")
    parser.add_argument("--out", type=Path, help="write the rows to this JSON file")
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(run_case(**args.case)))
        return
    settings = {name: json.loads(value) for name, value in (one.split("=", 1) for one in args.set)}
    rows = []
    print(f"{'model':<14}{'workload':<10}{'start s':>9}{'first s':>9}{'second s':>9}{'first / second':>16}")
    for model in args.models:
        in_new_process(
            {"model": model, "workload": "single", "settings": settings, "runs": 1, "sampled": args.sampled}
        )
        for workload in args.workloads:
            case = {"model": model, "workload": workload, "settings": settings}
            row = in_new_process({**case, "runs": args.runs, "sampled": args.sampled})
            rows.append(row)
            first_s, second_s = row["runs_s"][:2]
            print(
                f"{model:<14}{workload:<10}{row['start_s']:>9.2f}{first_s:>9.2f}{second_s:>9.2f}"
                f"{first_s / second_s:>16.3f}",
                flush=True,
            )
            if args.out:
                save(args.out, {"rows": rows})


if __name__ == "__main__":
    main()
