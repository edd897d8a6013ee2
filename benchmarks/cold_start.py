"""Measure the time from the start of a process to its first token, with an empty and a filled cache of kernels.

    python benchmarks/cold_start.py                                    # the 8B shape on one GPU
    python benchmarks/cold_start.py --models Qwen3-0.6B --starts empty warm warm --top 20

Each start is a process of its own with random weights in the true shape. `empty` gives it a new folder for compiled
Triton kernels, `warm` the folder of the start before. The table lists the phases of the start-up, when each part of them
began (counted from the import of the engine), the kernels that were compiled, the seconds that their compilation took in all
processes or threads together, and the slowest ones. With `--set compile_processes=0` threads compile.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from shapes import SHAPES

PROMPT_TOKENS = 128


def run_case(model: str, settings: dict[str, Any], began_s: float) -> dict[str, Any]:
    """Start an engine in this process and generate one token. `began_s` is the wall-clock time of its launch."""
    from triton import knobs

    from quire.compilers import Compilers

    compiled: list[dict[str, Any]] = []

    def note(src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
        if not cache_hit:
            stages = {"ir": times.ir_initialization / 1e6}
            stages |= {name: us / 1e6 for name, us in times.lowering_stages}
            at_s = time.time() - began_s
            compiled.append({"name": src.name, "took_s": times.total / 1e6, "at_s": at_s, **stages})

    def compile_and_note(self: Compilers, name: str, job: bytes) -> bool:
        sent_s = time.time()
        done = compile_elsewhere(self, name, job)
        if done:
            compiled.append({"name": name, "took_s": time.time() - sent_s, "at_s": time.time() - began_s})
        return done

    knobs.compilation.listener = note
    compile_elsewhere, Compilers.compile = Compilers.compile, compile_and_note
    from quire import LLM, SamplingParams

    imported_s = time.time() - began_s
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[model]))
        with LLM(folder, load_format="dummy", skip_tokenizer_init=True, **settings) as llm:
            started_s = time.time() - began_s
            params = SamplingParams(max_tokens=1, temperature=0)
            llm.generate([list(range(1000, 1000 + PROMPT_TOKENS))], params, use_tqdm=False)
            first_token_s = time.time() - began_s
            phases_s, spans_s = llm.info.phases_s, llm.info.rank_phases_s[0]
    return {
        "model": model,
        "imported_s": imported_s,
        "started_s": started_s,
        "first_token_s": first_token_s,
        "phases_s": phases_s,
        "spans_s": spans_s,
        "compiled": compiled,
    }


def in_new_process(case: dict[str, Any], cache: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--case", json.dumps({**case, "began_s": time.time()})]
    env = {**os.environ, "TRITON_CACHE_DIR": cache}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=env)
    return json.loads(done.stdout.splitlines()[-1])


def print_row(row: dict[str, Any], top: int) -> None:
    compiled = sorted(row["compiled"], key=lambda kernel: -kernel["took_s"])
    total_s = sum(kernel["took_s"] for kernel in compiled)
    phases = " ".join(f"{name} {seconds:.2f}" for name, seconds in row["phases_s"].items())
    print(
        f"{row['model']:<14}{row['start']:<7}import {row['imported_s']:.2f} s, start {row['started_s']:.2f} s, first "
        f"token {row['first_token_s']:.2f} s ({phases}); {len(compiled)} kernels compiled in {total_s:.1f} s",
        flush=True,
    )
    spans = ", ".join(
        f"{name} {begin:.2f}+{took:.2f}" for name, (begin, took) in row["spans_s"].items() if took >= 0.01
    )
    print(f"    begin+duration, s: {spans}")
    for kernel in compiled[:top]:
        stages = " ".join(
            f"{name} {value:.2f}"
            for name, value in kernel.items()
            if name not in ("name", "took_s", "at_s") and value >= 0.05
        )
        print(f"    {kernel['took_s']:6.2f} s  at {kernel['at_s']:6.2f} s  {kernel['name']}  {stages}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=["Llama-3.1-8B"])
    parser.add_argument("--starts", nargs="+", choices=["empty", "warm"], default=["empty", "warm"])
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=JSON", help="settings of the engine")
    parser.add_argument("--top", type=int, default=10, help="slowest kernels to list")
    parser.add_argument("--out", type=Path, help="write the rows to this JSON file")
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(run_case(**args.case)))
        return
    settings = {name: json.loads(value) for name, value in (one.split("=", 1) for one in args.set)}
    rows = []
    for model in args.models:
        with tempfile.TemporaryDirectory() as folder:
            cache = folder
            for turn, start in enumerate(args.starts):
                if start == "empty":
                    cache = str(Path(folder) / str(turn))
                row = in_new_process({"model": model, "settings": settings}, cache)
                rows.append({**row, "start": start})
                print_row(rows[-1], args.top)
                if args.out:
                    args.out.write_text(json.dumps({"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
