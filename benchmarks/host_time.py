"""Host time of decode steps by part: beside a running model, and beside an executor that does nothing.

    python benchmarks/host_time.py [--model demo] [--rows 1 64 256 1024] [--tokens 160] [--dtype auto] [--out FILE]

Prompts differ in length, so that one row of 16 gets a new block in each step. The figures are medians over the steps in
which all rows decode, in microseconds. On a GPU the table takes about half a minute.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from quire import LLM, SamplingParams
from quire.bench.host import host_cost

PROMPT_TOKENS = 32  # of the shortest prompt
BLOCK_TOKENS = 16
PARTS = {  # of the launch, by the attribute of the runner and the name of a method
    "columns": ("state", "apply"),  # new blocks to the block tables on the device
    "open": ("launcher", "launch"),  # shape, header and replay
}


class Stopwatch:
    """Times of methods by step: each call of a watched method adds one."""

    def __init__(self) -> None:
        self.times_us: dict[str, list[float]] = defaultdict(list)

    def watch(self, name: str, owner: Any, method: str) -> None:
        """Time all further calls of a method of `owner` under `name`."""
        inner = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter_ns()
            try:
                return inner(*args, **kwargs)
            finally:
                self.times_us[name].append((time.perf_counter_ns() - begin) / 1e3)

        setattr(owner, method, timed)


def beside_a_model(llm: LLM, watch: Stopwatch, rows: int, tokens: int) -> dict[str, float]:
    """Run `rows` requests to their ends, and return the medians of their decode steps in microseconds."""
    engine = llm.client.engine  # type: ignore[attr-defined]
    first = engine.log.totals.steps
    watch.times_us.clear()
    prompts = [
        {"prompt_token_ids": [(7 * i + j) % 97 + 3 for j in range(PROMPT_TOKENS + i % BLOCK_TOKENS)]}
        for i in range(rows)
    ]
    llm.generate(prompts, SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True), use_tqdm=False)
    records = [r for r in engine.log.ended_since(first) if len(r.rows) == rows and not r.prompt_tokens]
    records = records[len(records) // 8 :]  # the first steps capture graphs
    medians = {
        name: statistics.median(getattr(record, f"{name}_s") * 1e6 for record in records)
        for name in ("schedule", "launch", "wait", "retire", "took")
    }
    host_us = statistics.median((r.schedule_s + r.launch_s + r.retire_s) * 1e6 for r in records)
    parts = {name: statistics.median(times[len(times) // 8 :]) for name, times in watch.times_us.items()}
    return {"rows": rows, "steps": len(records), **medians, "sum": host_us, **parts}


def beside_nothing(rows: int, steps: int) -> dict[str, float]:
    """Return the medians of decode steps without a device, in microseconds."""
    figures = host_cost(rows, steps)
    return {
        "rows": rows,
        **{name: figures[f"{name}_us"] for name in ("step", "schedule", "retire", "message")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256, 1024])
    parser.add_argument("--tokens", type=int, default=160, help="tokens of each answer (default 160)")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", type=Path, help="write a JSON file")
    args = parser.parse_args()
    length = PROMPT_TOKENS + BLOCK_TOKENS + args.tokens
    found: dict[str, Any] = {"model": args.model, "torch": torch.__version__, "engine": [], "null": []}
    found["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    with LLM(args.model, max_num_seqs=max(args.rows), max_model_len=length + 1, dtype=args.dtype) as llm:
        watch, engine = Stopwatch(), llm.client.engine  # type: ignore[attr-defined]
        for name, (part, method) in PARTS.items():
            watch.watch(name, getattr(engine.executor.runner, part), method)
        watch.watch("text", llm._assembler, "apply")
        for rows in args.rows:
            found["engine"].append(beside_a_model(llm, watch, rows, args.tokens))
    found["null"] = [beside_nothing(rows, args.tokens) for rows in args.rows]
    print(f"{found['device']}, {args.model}: medians in microseconds")
    names = ("rows", "schedule", "launch", "retire", "sum", "columns", "open", "text", "wait", "took")
    print(*(f"{name:>8}" for name in (*names, "alone")))
    for figures, alone in zip(found["engine"], found["null"]):
        print(*(f"{figures[name]:8.0f}" for name in names), f"{alone['step']:8.0f}")
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
