"""Attention kernels on one GPU: gigabytes and operations per second against what the device can do.

    python benchmarks/kernels.py [--sweep]

Each case runs as a CUDA graph over several layers' caches, together larger than the L2 cache, so launches
cost nothing and every byte comes from device memory. `--sweep` times candidate tiles beside the chosen one.
Bytes are the keys and values read once; operations are those of the causal half of the score matrix.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from quire.kernels import paged_attention as kernels

BANDWIDTH = 4.3e12  # bytes/s read, measured on an H200
COMPUTE = 777e12  # bf16 operations/s of an 8192^3 product, measured on an H200
KV_HEADS, BLOCK_SIZE = 8, 16
DTYPE = torch.bfloat16

SHORT_TILES = {
    64: [(128, 4, 4), (128, 2, 4), (128, 2, 5), (64, 2, 4), (64, 2, 5)],
    128: [(128, 4, 4), (64, 4, 4), (64, 2, 4), (64, 2, 5), (64, 2, 6), (32, 2, 6)],
    256: [(64, 4, 4), (64, 4, 3), (32, 4, 4), (32, 2, 4), (32, 2, 5)],
}
LONG_TILES: dict[int, list[tuple[int, int, int, int, int | None]]] = {
    64: [(128, 64, 8, 3, 128), (128, 64, 4, 3, None), (128, 128, 8, 3, 128), (128, 128, 8, 3, None)],
    128: [(128, 64, 8, 3, None), (128, 64, 8, 3, 128), (128, 128, 8, 3, None), (64, 64, 4, 3, None)],
    256: [(128, 64, 8, 2, None), (128, 64, 8, 3, None), (128, 32, 8, 3, None), (64, 64, 4, 3, None),
          (64, 32, 4, 3, None)],
}  # fmt: skip


@dataclass
class Work:
    """Pages of some layers, and rows of known lengths with `new` tokens each."""

    name: str
    lens: list[int]
    new: int
    group: int
    dim: int

    def __post_init__(self) -> None:
        blocks = [-(-n // BLOCK_SIZE) for n in self.lens]
        pages = torch.randperm(sum(blocks), dtype=torch.int32, device="cuda").split(blocks)
        self.table = torch.zeros(len(self.lens), max(blocks), dtype=torch.int32, device="cuda")
        for row, mine in enumerate(pages):
            self.table[row, : len(mine)] = mine
        self.seq_lens = torch.tensor(self.lens, dtype=torch.int32, device="cuda")
        tokens = len(self.lens) * self.new
        self.query_start = torch.arange(0, tokens + 1, self.new, dtype=torch.int32, device="cuda")
        self.bytes = 2 * sum(self.lens) * KV_HEADS * self.dim * DTYPE.itemsize
        layers = max(1, min(32, int(1e9 / self.bytes))) if self.new == 1 else 1
        shape = (sum(blocks), KV_HEADS, BLOCK_SIZE, self.dim)
        self.kv = [tuple(torch.randn(shape, dtype=DTYPE, device="cuda") for _ in "kv") for _ in range(layers)]
        self.q = torch.randn(tokens, KV_HEADS * self.group, self.dim, dtype=DTYPE, device="cuda")
        self.out = torch.empty(tokens, KV_HEADS * self.group * self.dim, dtype=DTYPE, device="cuda")
        heads = KV_HEADS * self.group
        self.operations = 4 * heads * self.dim * sum(n * n / 2 for n in self.lens) if self.new > 1 else 0

    def short(
        self, splits: int | None = None, tile: tuple[int, int, int] | None = None, pdl: bool = True
    ) -> float:
        if splits is None:
            splits = kernels.num_splits(len(self.lens), KV_HEADS, max(self.lens), self.dim, DTYPE.itemsize)

        def run() -> None:
            for keys, values in self.kv:
                kernels.attend_short(
                    self.q, keys, values, self.out, self.seq_lens, None, self.table, self.dim**-0.5,
                    splits=splits, pdl=pdl, tile=tile,
                )  # fmt: skip

        return seconds(run) / len(self.kv)

    def long(self, tile: tuple[int, int, int, int, int | None] | None = None) -> float:
        tokens = max((tile or kernels.long_tile(self.dim, DTYPE.itemsize))[0], self.group) // self.group
        tiles = len(self.lens) * -(-self.new // tokens)

        def run() -> None:
            for keys, values in self.kv:
                kernels.attend_long(
                    self.q, keys, values, self.out, self.seq_lens, self.query_start, self.table, self.dim**-0.5,
                    tiles, tile=tile,
                )  # fmt: skip

        return seconds(run) / len(self.kv)

    def report(self, label: str, time_s: float) -> None:
        if self.operations:
            rate, unit = self.operations / time_s, f"{self.operations / time_s / 1e12:6.0f} TFLOP/s"
            share = rate / COMPUTE
        else:
            rate = self.bytes / time_s
            unit, share = f"{rate / 1e9:6.0f} GB/s", rate / BANDWIDTH
        print(
            f"{self.name:16} dim {self.dim:3} group {self.group}  {label:28} {time_s * 1e6:8.1f} us  {unit}  {share:6.1%}",
            flush=True,
        )


def seconds(run: Callable[[], object], replays: int = 12) -> float:
    """Median time of a replay of `run` captured in a graph."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    warm = time.perf_counter() + 0.05  # clocks rise under load
    while time.perf_counter() < warm:
        graph.replay()
        torch.cuda.synchronize()
    times = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return sorted(times)[len(times) // 2]


def decode(name: str, lens: list[int], sweep: bool, splits: list[int], dim: int = 128) -> None:
    for group in (2, 4):
        work = Work(name, lens, 1, group, dim)
        work.report("chosen", work.short())
        if not sweep:
            continue
        times = {}
        for tile in SHORT_TILES[dim]:
            for count in splits:
                times[f"{tile} x {count}"] = attempt(partial(work.short, count, tile))
        for label, time_s in sorted(times.items(), key=lambda item: item[1])[:5]:
            work.report(label, time_s)


def prefill(name: str, lens: list[int], sweep: bool, dim: int = 128) -> None:
    for group in (2, 4):
        work = Work(name, lens, lens[0], group, dim)
        work.report("chosen", work.long())
        if len(lens) == 1:
            shape = (1, KV_HEADS * group, lens[0], dim)
            q, k, v = (torch.randn(shape, dtype=DTYPE, device="cuda") for _ in "qkv")
            run = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
            work.report("torch, not paged", seconds(run))
        if not sweep:
            continue
        times = {str(tile): attempt(partial(work.long, tile)) for tile in LONG_TILES[dim]}
        for label, time_s in sorted(times.items(), key=lambda item: item[1]):
            work.report(label, time_s)


def attempt(run: Callable[[], float]) -> float:
    """A candidate may need more shared memory than there is."""
    try:
        return run()
    except Exception as error:
        print("   ", type(error).__name__, str(error)[:80])
        return float("inf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="time candidate tiles as well")
    sweep = parser.parse_args().sweep
    rng = random.Random(0)
    many = [rng.randint(425, 1275) for _ in range(256)]
    decode("256 x 425-1275", many, False, [1])
    decode("64 x 2048", [2048] * 64, False, [1, 2])
    decode("8 x 2048", [2048] * 8, False, [2, 4, 8])
    decode("1 x 4096", [4096], sweep, [32])
    prefill("prompt 4096", [4096], False)
    prefill("8 prompts 1024", [1024] * 8, False)
    for dim in (64, 256):
        decode("256 x 425-1275", many, sweep, [1], dim)
        prefill("prompt 4096", [4096], sweep, dim)


if __name__ == "__main__":
    main()
