"""Bandwidth of reading weights in products with few rows: Quire's kernels against F.linear, by CUDA graph replay.

    python benchmarks/gemv.py [--models qwen3-0.6b,llama-3.1-8b] [--json FILE]

A graph holds calls over several weights, together larger than the L2 cache, one after the other as in a model. A second
table times all products of a model's layers at batch 1: as fused kernels, as Quire's products between separate kernels,
and as F.linear between separate kernels. Shares refer to the measured 4.3 TB/s of an H200.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.activation import gated
from quire.kernels.norm import add_rms_norm
from quire.quant.few_rows import FewRowsMatmul

BANDWIDTH = 4.3e12
DTYPE = torch.bfloat16
EPS = 1e-6
Call = Callable[[], object]


@dataclass(frozen=True)
class Shape:
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    vocab: int
    layers: int
    dim: int = 128

    def products(self) -> dict[str, tuple[int, int]]:
        """(outputs, inputs)"""
        return {
            "qkv": ((self.heads + 2 * self.kv_heads) * self.dim, self.hidden),
            "o": (self.hidden, self.heads * self.dim),
            "gate_up": (2 * self.inner, self.hidden),
            "down": (self.hidden, self.inner),
            "head": (self.vocab, self.hidden),
        }


SHAPES = {
    "qwen3-0.6b": Shape(1024, 16, 8, 3072, 151936, 28),
    "llama-3.2-3b": Shape(3072, 24, 8, 8192, 128256, 28),
    "llama-3.1-8b": Shape(4096, 32, 8, 14336, 128256, 32),
}
ROWS = (1, 2, 4, 8, 16, 32, 64)


def seconds(calls: list[Call], replays: int = 7) -> float:
    """Return the median time of a replay of the calls, captured one after the other."""
    for call in calls[:1]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(replays + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return sorted(times[2:])[replays // 2]


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=DTYPE)


class Weights:
    """Weights that are views into one buffer, used in turn."""

    def __init__(self, size_bytes: int) -> None:
        self.buffer = torch.empty(size_bytes // DTYPE.itemsize, device="cuda", dtype=DTYPE).normal_(0, 0.02)
        self.at = 0

    def take(self, outputs: int, inputs: int) -> Tensor:
        size = outputs * inputs
        if self.at + size > self.buffer.numel():
            self.at = 0
        self.at += size
        return self.buffer[self.at - size : self.at].view(outputs, inputs)

    def several(self, outputs: int, inputs: int) -> list[Tensor]:
        size = outputs * inputs * DTYPE.itemsize
        distinct = max(1, min(self.buffer.nbytes // size, -(-300_000_000 // size)))
        taken = [self.take(outputs, inputs) for _ in range(distinct)]
        calls = min(160, max(len(taken), int(4e-4 * BANDWIDTH / size)))
        return [taken[i % distinct] for i in range(calls)]


def product(weights: Weights, outputs: int, inputs: int, rows: int) -> tuple[float, float, float]:
    """Return the seconds of Quire's kernel and of F.linear, and the relative error of Quire's kernel."""
    several, x = weights.several(outputs, inputs), randn(rows, inputs)
    ours = [FewRowsMatmul(weight, None) for weight in several]
    wanted = F.linear(x.float(), several[0].float())
    error = float((ours[0](x).float() - wanted).norm() / wanted.norm())
    calls: list[list[Call]] = [
        [lambda m=m: m(x) for m in ours],
        [lambda w=w: F.linear(x, w) for w in several],
    ]
    ours_s, linear_s = (seconds(each) / len(several) for each in calls)
    return ours_s, linear_s, error


def linear(matmul: FewRowsMatmul) -> Callable[[Tensor], Tensor]:
    return lambda x: F.linear(x, matmul.weight)


def chain(weights: Weights, shape: Shape, way: str) -> tuple[float, int]:
    """Return the seconds of all layers at batch 1 without attention, and the bytes of their weights."""
    sizes = shape.products()
    layers = [
        {name: FewRowsMatmul(weights.take(*sizes[name]), None) for name in ("qkv", "o", "gate_up", "down")}
        for _ in range(shape.layers)
    ]
    gain, start, width = randn(shape.hidden), randn(1, shape.hidden), sizes["o"][1]
    if way == "fused":
        fused = [
            (
                m["qkv"].after_norm(gain, EPS, None),
                m["o"],
                m["gate_up"].after_norm(gain, EPS, "silu"),
                m["down"],
            )
            for m in layers
        ]

        def run() -> None:
            x: Tensor = start
            for qkv, o, gate_up, down in fused:
                y, total = qkv(x, None)
                y, total = gate_up(o.add(y[:, :width], total), None)
                x = down.add(y, total)

    else:

        def run() -> None:
            x, residual = start, start
            for m in layers:
                qkv, o, gate_up, down = (m[name] if way == "apart" else linear(m[name]) for name in m)
                h, residual = add_rms_norm(x, residual, gain, EPS)
                h, residual = add_rms_norm(o(qkv(h)[:, :width]), residual, gain, EPS)
                x = down(gated(gate_up(h), "silu"))

    total_bytes = shape.layers * sum(2 * n * k for name, (n, k) in sizes.items() if name != "head")
    return seconds([run]), total_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(SHAPES))
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    weights = Weights(2 << 30)
    records: list[dict[str, object]] = []
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    print(
        f"{'product':24s}{'rows':>5s}{'ours us':>10s}{'GB/s':>7s}{'share':>7s}{'F.linear':>10s}{'share':>7s}"
    )
    for model in args.models.split(","):
        for name, (outputs, inputs) in SHAPES[model].products().items():
            size = outputs * inputs * DTYPE.itemsize
            for rows in ROWS:
                ours, linear, error = product(weights, outputs, inputs, rows)
                print(
                    f"{model + ' ' + name:24s}{rows:5d}{ours * 1e6:10.2f}{size / ours / 1e9:7.0f}"
                    f"{size / ours / BANDWIDTH:7.1%}{linear * 1e6:10.2f}{size / linear / BANDWIDTH:7.1%}",
                    flush=True,
                )
                records.append(
                    {"model": model, "product": name, "outputs": outputs, "inputs": inputs, "rows": rows,
                     "ours_us": ours * 1e6, "linear_us": linear * 1e6, "share": size / ours / BANDWIDTH,
                     "linear_share": size / linear / BANDWIDTH, "relative_error": error}
                )  # fmt: skip
        for way in ("fused", "apart", "F.linear"):
            time_s, size = chain(weights, SHAPES[model], way)
            print(
                f"{model} layers, {way:9s} {time_s * 1e6:9.1f} us  {size / time_s / BANDWIDTH:6.1%}",
                flush=True,
            )
            records.append(
                {"model": model, "layers": way, "us": time_s * 1e6, "share": size / time_s / BANDWIDTH}
            )
    if args.json:
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "bandwidth": BANDWIDTH}
        args.json.write_text(json.dumps(about | {"records": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
