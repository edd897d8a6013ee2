"""Time the experts of one layer on a CPU: the C kernels beside one product per expert, in alternating calls.

    python benchmarks/cpu_experts.py                         # Qwen3-30B-A3B's layer in bf16, INT8 and INT4
    python benchmarks/cpu_experts.py --forms int4 --rows 1 8 64 --threads 2

`looped` sorts the tokens in PyTorch and multiplies each expert by itself; it reads the same packed weights. GB/s counts
the weights of the chosen experts. Times are the smallest of several calls; with one thread, of the processor, so that
other programs disturb them less.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quire.kernels import pick_kernels
from quire.kernels.experts.choice import ExpertChoice
from quire.layers.c_experts import FewRowsExperts
from quire.layers.env import Env
from quire.layers.expert_weights import ExpertWeights, StackedWeight
from quire.layers.moe import make_experts
from quire.parallel.ranks import Parallel
from quire.quant.forms import Int8Weight, IntGroupWeight

FORMS = ("bf16", "int8", "int4")
MOST_CALLS = 20


def random_weight(form: str, experts: int, outputs: int, inputs: int) -> StackedWeight:
    """Return random weights of about 1 / sqrt(inputs)."""
    shape, size = (experts, outputs, inputs), inputs**-0.5
    if form == "bf16":
        weight = torch.empty(shape, dtype=torch.bfloat16)
        for one in weight:
            one.copy_(torch.randn(outputs, inputs) * size)
        return weight
    if form == "int8":
        return Int8Weight(
            torch.randint(-127, 128, shape, dtype=torch.int8), torch.full((experts, outputs, 1), size / 73)
        )
    packed = torch.randint(0, 256, (experts, outputs, inputs // 2), dtype=torch.uint8)
    return IntGroupWeight(packed, 4, torch.full((experts, outputs, inputs // 128), size / 4.6).half())


def bytes_per_number(form: str) -> float:
    """Return the stored bytes of a weight's number, with its share of a scale."""
    return {"bf16": 2, "int8": 1, "int4": 0.5 + 2 / 128}[form]


def alternate(calls: dict[str, Any], seconds: float) -> dict[str, float]:
    """Return the shortest time of each call in seconds, measured in turns for at most `seconds`."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    best = dict.fromkeys(calls, float("inf"))
    for call in calls.values():
        call()
    end = time.perf_counter() + seconds
    for _ in range(MOST_CALLS):
        for name, call in calls.items():
            begin = clock()
            call()
            best[name] = min(best[name], clock() - begin)
        if time.perf_counter() > end:
            break
    return best


def measure(form: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each number of tokens."""
    device, nothing = torch.device("cpu"), None
    kernels = pick_kernels(device, torch.bfloat16)
    env = Env(nothing, Parallel(), nothing, device, torch.bfloat16, kernels)  # type: ignore[arg-type]
    experts, hidden, width = options.experts, options.hidden, options.width
    weights = ExpertWeights(
        random_weight(form, experts, 2 * width, hidden), random_weight(form, experts, hidden, width)
    )
    made = make_experts(env, weights, "silu")
    del weights
    if not isinstance(made, FewRowsExperts):
        raise SystemExit("this machine has no C kernels")
    found = []
    for rows in options.rows:
        x = torch.randn(rows, hidden).bfloat16()
        ids = torch.rand(rows, experts).argsort(1)[:, : options.top_k].contiguous()
        choice = ExpertChoice(ids, torch.rand(rows, options.top_k))
        times = alternate(
            {"c": partial(made.few, x, choice), "looped": partial(made.many, x, choice)}, options.seconds
        )
        read = len(ids.unique()) * 3 * hidden * width * bytes_per_number(form)
        found.append(
            {
                "form": form, "rows": rows, "c_ms": times["c"] * 1e3, "looped_ms": times["looped"] * 1e3,
                "ratio": times["looped"] / times["c"], "gb_per_s": read / times["c"] / 1e9,
                "used": rows * options.top_k <= made.few.most_pairs,
            }
        )  # fmt: skip
        row = found[-1]
        print(
            f"{form:>5} {rows:5} rows: C {row['c_ms']:8.2f} ms ({row['gb_per_s']:5.1f} GB/s), looped "
            f"{row['looped_ms']:8.2f} ms, ratio {row['ratio']:.2f}",
            flush=True,
        )
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 32, 128, 256])
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=5.0, help="per case")
    parser.add_argument("--output-json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    with torch.inference_mode():
        found = [row for form in options.forms for row in measure(form, options)]
    if options.output_json:
        options.output_json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
