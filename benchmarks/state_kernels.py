"""Time the kernels of layers with states as a fraction of the limits of the GPU.

    python benchmarks/state_kernels.py [--device cuda] [--rows 1 32 256] [--tokens 8192] [--bandwidth GB/s] [--flops TFLOP/s]

Decoding reads and writes each row's state once: the fraction is these bytes over time and `--bandwidth`. A prompt is
one row of `--tokens`: the fraction is 6 (delta rule) or 4 (linear attention) * key size * value size operations per
token and head over time and `--flops`. The defaults are those of an H200. The models' state sizes are the real ones.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from quire.kernels import available
from quire.kernels.state.rows import StateRows
from quire.layers.state.recurrence import recurrence as plain_recurrence


@dataclass(frozen=True)
class Case:
    """State sizes of a model's layer."""

    name: str
    key_heads: int
    heads: int
    key: int
    value: int
    delta: bool
    channels: bool = False


CASES = (
    Case("Qwen3-Next and Qwen3.5, gated delta rule", 16, 32, 128, 128, delta=True),
    Case("Kimi Linear, per channel", 32, 32, 128, 128, delta=True, channels=True),
    Case("Nemotron Nano 9B v2, Mamba-2", 8, 128, 128, 80, delta=False),
    Case("MiniMax-Text-01, lightning attention", 64, 64, 128, 128, delta=False),
)


def timed(device: torch.device, work: Callable[[], object], repeats: int) -> float:
    """Return the mean seconds of `work`."""
    work()
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeats):
            work()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3 / repeats
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    return (time.perf_counter() - start) / repeats


def run(case: Case, device: torch.device, rows: int, tokens: int, repeats: int) -> float:
    """Return the seconds of one call with `rows` rows of `tokens` tokens each."""
    recurrence = plain_recurrence
    if available(device):
        from quire.kernels.state.recurrence import recurrence
    dtype, total = torch.bfloat16 if device.type == "cuda" else torch.float32, rows * tokens
    q, k = (torch.randn(total, case.key_heads, case.key, device=device, dtype=dtype) for _ in range(2))
    v = torch.randn(total, case.heads, case.value, device=device, dtype=dtype)
    shape = (total, case.heads, case.key) if case.channels else (total, case.heads)
    gate, beta = -torch.rand(shape, device=device), torch.rand(total, case.heads, device=device)
    state = torch.zeros(rows + 1, case.heads, case.key, case.value, device=device)
    starts = torch.arange(0, total + 1, tokens, dtype=torch.int32, device=device)
    fresh = torch.zeros(rows, dtype=torch.bool, device=device)
    where = StateRows(torch.arange(rows, device=device), starts, fresh, short_only=tokens == 1)
    rate = beta if case.delta else None
    return timed(
        device, lambda: recurrence(q, k, v, gate, rate, state, where, case.key**-0.5, case.delta), repeats
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--bandwidth", type=float, default=4800.0, help="GB/s")
    parser.add_argument("--flops", type=float, default=989.0, help="TFLOP/s of bf16 products")
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    device = torch.device(args.device)
    print("| layer | step | time | of the limit |\n|---|---|---|---|")
    for case in CASES:
        size = case.heads * case.key * case.value
        for rows in args.rows:
            seconds = run(case, device, rows, 1, args.repeats)
            share = 8 * size * rows / seconds / (args.bandwidth * 1e9)
            print(f"| {case.name} | decode, {rows} rows | {seconds * 1e6:.0f} us | {share:.1%} |")
        seconds = run(case, device, 1, args.tokens, args.repeats)
        share = (6 if case.delta else 4) * size * args.tokens / seconds / (args.flops * 1e12)
        print(f"| {case.name} | prompt, {args.tokens} tokens | {seconds * 1e3:.2f} ms | {share:.1%} |")


if __name__ == "__main__":
    main()
