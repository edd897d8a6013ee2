"""Time the kernels of layers with states as a fraction of the limits of the GPU.

    python benchmarks/state_kernels.py [--device cuda] [--rows 1 32 256] [--tokens 8192] [--prompts 1 4] [--only NAME]

The time on a GPU is that of a captured graph of many calls, so launches cost what they cost in a decode step.

The limit of a call is the longer of two times. One is that of the bytes of queries, keys, values, gates, outputs and
states, each moved once, over `--bandwidth`. The other is that of the operations in chunks of 64 tokens, with only the
causal half of products within a chunk, over `--flops`. The defaults were measured on an H200. For prompts the last
column is the share of the matrix rate that the products with the state alone reach: 6 (delta rule) or 4 (linear
attention) * key size * value size operations per token and head. The models' state sizes are the real ones.
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

CHUNK = 64


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

    @property
    def numbers(self) -> int:
        """Numbers of a state."""
        return self.heads * self.key * self.value

    def bytes(self, rows: int, tokens: int) -> int:
        """Return the bytes of a call: states in and out, inputs and outputs of `rows * tokens` tokens."""
        gates = self.heads * (4 * (self.key if self.channels else 1) + 4 * self.delta)
        vectors = 2 * (2 * self.key_heads * self.key + 2 * self.heads * self.value)
        return rows * (8 * self.numbers + tokens * (vectors + gates))

    def operations(self, tokens: int) -> float:
        """Return the operations of `tokens` tokens in chunks."""
        with_state = (6 if self.delta else 4) * self.key * self.value
        within = CHUNK * (self.key * (2 if self.delta else 1) + self.value * (2 if self.delta else 1))
        return tokens * self.heads * (with_state + within + (CHUNK**2 / 3 if self.delta else 0))


CASES = (
    Case("Qwen3-Next and Qwen3.5, gated delta rule", 16, 32, 128, 128, delta=True),
    Case("Kimi Linear, per channel", 32, 32, 128, 128, delta=True, channels=True),
    Case("Nemotron Nano 9B v2, Mamba-2", 8, 128, 128, 80, delta=False),
    Case("MiniMax-Text-01, lightning attention", 64, 64, 128, 128, delta=False),
)


def timed(device: torch.device, work: Callable[[], object], repeats: int) -> float:
    """Return the least mean seconds of `work` over three series of `repeats`."""
    work()
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        return (time.perf_counter() - start) / repeats
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            work()
    graph.replay()
    times = []
    for _ in range(3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / repeats)
    return min(times)


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
    state = torch.randn(rows + 1, case.heads, case.key, case.value, device=device)
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
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 32, 256])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--prompts", type=int, nargs="*", default=[1, 4], help="prompts that share --tokens")
    parser.add_argument("--only", default="", help="part of the names of the layers to time")
    parser.add_argument("--bandwidth", type=float, default=4290.0, help="GB/s")
    parser.add_argument("--flops", type=float, default=818.0, help="TFLOP/s of bf16 products")
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    device = torch.device(args.device)
    print("| layer | step | time | of the limit | of the matrix rate |\n|---|---|---|---|---|")
    calls = [(rows, 1) for rows in args.rows] + [(count, args.tokens // count) for count in args.prompts]
    for case in (case for case in CASES if args.only in case.name):
        for rows, tokens in calls:
            seconds = run(case, device, rows, tokens, args.repeats)
            operations = case.operations(rows * tokens) if tokens > 1 else 0
            limit = max(case.bytes(rows, tokens) / args.bandwidth / 1e9, operations / args.flops / 1e12)
            step = f"decode, {rows} rows" if tokens == 1 else f"prompt, {rows} x {tokens} tokens"
            products = (6 if case.delta else 4) * case.numbers * rows * tokens / args.flops / 1e12
            rate = "" if tokens == 1 else f"{products / seconds:.1%}"
            print(
                f"| {case.name} | {step} | {seconds * 1e6:.1f} us | {limit / seconds:.1%} | {rate} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
