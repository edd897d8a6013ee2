"""Attention kernels on one GPU: bandwidth and operations per second, compared with the device's limits.

    python benchmarks/kernels.py [--sweep] [--json FILE]

Each case runs as a CUDA graph over the caches of several layers, together larger than the L2 cache. So launches cost
nothing and every byte comes from device memory. `--sweep` also times candidate tiles. Bytes count keys and values once;
operations are those of the causal half of the score matrix. Rows of a decode case have block tables for 4,096 tokens
whatever their length, as in a captured graph.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
import torch.nn.functional as F

from quire.kernels.attention.long import attend_long, list_tiles, long_tile
from quire.kernels.attention.short import SHORT_ROWS, attend_short, num_splits
from quire.kernels.attention.tile import Tile
from quire.kernels.rope import norm_rotate_store
from quire.kernels.target import target_of

BANDWIDTH = 4.3e12  # bytes/s read, measured on an H200
COMPUTE = 777e12  # bf16 operations/s of an 8192^3 product, measured on an H200
KV_HEADS, BLOCK_SIZE, REACH = 8, 16, 4096
DTYPE = torch.bfloat16
RESULTS: list[dict[str, object]] = []

SHORT_TILES = {  # keys, warps, stages
    64: [(128, 4, 4), (128, 2, 4), (128, 2, 5), (64, 2, 4), (64, 2, 5)],
    128: [(128, 4, 4), (64, 4, 4), (64, 2, 4), (64, 2, 5), (64, 2, 6), (32, 2, 6)],
    256: [(64, 4, 4), (64, 4, 3), (32, 4, 4), (32, 2, 4), (32, 2, 5)],
}
LONG_TILES: dict[int, list[tuple[int, int, int, int, int | None]]] = {  # the fields of Tile
    64: [(128, 64, 8, 3, 128), (128, 64, 4, 3, None), (128, 128, 8, 3, 128), (128, 128, 8, 3, None)],
    128: [(128, 64, 8, 3, None), (128, 64, 8, 2, 128), (128, 128, 8, 3, None), (64, 64, 4, 2, None)],
    256: [(128, 64, 8, 2, None), (128, 64, 8, 3, None), (128, 32, 8, 3, None), (64, 64, 4, 3, None),
          (64, 32, 4, 3, None)],
}  # fmt: skip


@dataclass
class Work:
    """The KV blocks of some layers, and rows of known lengths of which all tokens are new, or only the last."""

    name: str
    lens: list[int]
    all_new: bool
    group: int
    dim: int

    def __post_init__(self) -> None:
        blocks = [-(-n // BLOCK_SIZE) for n in self.lens]
        pages = torch.randperm(sum(blocks), dtype=torch.int32, device="cuda").split(blocks)
        width = max(blocks) if self.all_new else max(REACH // BLOCK_SIZE, max(blocks))
        self.table = torch.zeros(len(self.lens), width, dtype=torch.int32, device="cuda")
        for row, mine in enumerate(pages):
            self.table[row, : len(mine)] = mine
        self.seq_lens = torch.tensor(self.lens, dtype=torch.int32, device="cuda")
        news = self.lens if self.all_new else [1] * len(self.lens)
        tokens = sum(news)
        self.query_start = torch.tensor([0, *accumulate(news)], dtype=torch.int32, device="cuda")
        self.bytes = 2 * sum(self.lens) * KV_HEADS * self.dim * DTYPE.itemsize
        layers = 1 if self.all_new else max(1, min(96, int(1e9 / self.bytes)))
        shape = (sum(blocks), KV_HEADS, BLOCK_SIZE, self.dim)
        self.kv = [tuple(torch.randn(shape, dtype=DTYPE, device="cuda") for _ in "kv") for _ in range(layers)]
        heads = KV_HEADS * self.group
        self.q = torch.randn(tokens, heads, self.dim, dtype=DTYPE, device="cuda")
        self.qkv = torch.randn(tokens, (heads + 2 * KV_HEADS) * self.dim, dtype=DTYPE, device="cuda")
        self.angles = torch.randn(max(self.lens), self.dim, dtype=DTYPE, device="cuda")
        self.norm = torch.ones(heads + KV_HEADS, self.dim, dtype=DTYPE, device="cuda")
        self.out = torch.empty(tokens, heads * self.dim, dtype=DTYPE, device="cuda")
        self.operations = 4 * heads * self.dim * sum(n * n / 2 for n in self.lens) if self.all_new else 0
        row = torch.arange(len(self.lens), device="cuda").repeat_interleave(torch.tensor(news, device="cuda"))
        last = self.seq_lens.long() - 1
        self.positions = torch.cat([torch.arange(n, device="cuda") for n in news]) if self.all_new else last
        page = self.table[row, self.positions // BLOCK_SIZE].long()
        self.kv_slots = page * BLOCK_SIZE + self.positions % BLOCK_SIZE
        self.slots = torch.arange(len(self.lens), device="cuda")

    def short(self, splits: int | None = None, tile: Tile | None = None, turn: bool = False) -> float:
        """Run attention; with `turn` also the norm and rotation of heads and the writing of k and v before it."""
        if splits is None:
            reach = self.table.shape[1] * BLOCK_SIZE
            splits = num_splits(
                len(self.lens), KV_HEADS, reach, self.dim, DTYPE.itemsize, target_of(self.q.device)
            )

        def run() -> None:
            for keys, values in self.kv:
                q = self.q
                if turn:
                    q = norm_rotate_store(
                        self.qkv, self.positions, self.angles, self.norm, 1e-6, keys, values, self.kv_slots
                    )
                attend_short(
                    q, keys, values, self.out, self.seq_lens, None, self.table, self.slots, self.dim**-0.5,
                    splits=splits, tile=tile,
                )  # fmt: skip

        return seconds(run) / len(self.kv)

    def long(self, tile: Tile | None = None) -> float:
        tile = tile or long_tile(self.dim, DTYPE.itemsize, self.group, target_of(self.q.device))
        per_tile = tile.rows // self.group
        most = sum(-(-n // per_tile) for n in self.lens)
        tiles = list_tiles(self.query_start, self.seq_lens, self.slots, most, 0, per_tile, most * KV_HEADS)

        def run() -> None:
            for keys, values in self.kv:
                attend_long(self.q, keys, values, self.out, self.table, tiles, self.dim**-0.5, tile=tile)

        return seconds(run) / len(self.kv)

    def report(self, label: str, time_s: float) -> None:
        if self.operations:
            rate, unit = self.operations / time_s, f"{self.operations / time_s / 1e12:6.0f} TFLOP/s"
            share = rate / COMPUTE
        else:
            rate = self.bytes / time_s
            unit, share = f"{rate / 1e9:6.0f} GB/s", rate / BANDWIDTH
        RESULTS.append(
            {
                "case": self.name,
                "dim": self.dim,
                "group": self.group,
                "kernel": label,
                "us": time_s * 1e6,
                "share": share,
            }
        )
        print(
            f"{self.name:16} dim {self.dim:3} group {self.group}  {label:28} {time_s * 1e6:8.1f} us  {unit}  {share:6.1%}",
            flush=True,
        )


def seconds(run: Callable[[], object], replays: int = 12) -> float:
    """Return the median time of a replay of `run`, captured in a graph."""
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
        work = Work(name, lens, False, group, dim)
        work.report("chosen", work.short())
        work.report("with norm, rope, kv write", work.short(turn=True))
        if not sweep:
            continue
        times = {}
        for tile in SHORT_TILES[dim]:
            for count in splits:
                times[f"{tile} x {count}"] = attempt(partial(work.short, count, Tile(SHORT_ROWS, *tile)))
        for label, time_s in sorted(times.items(), key=lambda item: item[1])[:5]:
            work.report(label, time_s)


def prefill(name: str, lens: list[int], sweep: bool, dim: int = 128) -> None:
    for group in (2, 4):
        work = Work(name, lens, True, group, dim)
        work.report("chosen", work.long())
        if len(lens) == 1:
            shape = (1, KV_HEADS * group, lens[0], dim)
            q, k, v = (torch.randn(shape, dtype=DTYPE, device="cuda") for _ in "qkv")
            run = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
            work.report("torch, not paged", seconds(run))
        if not sweep:
            continue
        times = {str(tile): attempt(partial(work.long, Tile(*tile))) for tile in LONG_TILES[dim]}
        for label, time_s in sorted(times.items(), key=lambda item: item[1]):
            work.report(label, time_s)


def attempt(run: Callable[[], float]) -> float:
    """Time a candidate tile, which may need more shared memory than the device has."""
    try:
        return run()
    except Exception as error:
        print("   ", type(error).__name__, str(error)[:80])
        return float("inf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="also time candidate tiles")
    parser.add_argument("--json", help="write the results to this file")
    args = parser.parse_args()
    sweep, rng = args.sweep, random.Random(0)
    many = [rng.randint(425, 1275) for _ in range(256)]
    decode("256 x 425-1275", many, False, [1])
    decode("64 x 2048", [2048] * 64, False, [1, 2])
    for rows in (32, 16, 8, 4):
        decode(f"{rows} x 600", [600] * rows, sweep, [2, 4, 8, 16])
    decode("8 x 2048", [2048] * 8, sweep, [4, 8, 16])
    for length in (128, 600, 1000, 4096):
        decode(f"1 x {length}", [length], sweep, [16, 32, 64])
    prefill("prompt 4096", [4096], sweep)
    prefill("2 prompts 3584", [3584] * 2, False)
    prefill("8 prompts 1024", [1024] * 8, sweep)
    prefill("14 prompts 560", [560] * 14, False)
    prefill("14, 100-1024", [rng.randint(100, 1024) for _ in range(14)], False)
    for dim in (64, 256):
        decode("256 x 425-1275", many, sweep, [1], dim)
        prefill("prompt 4096", [4096], sweep, dim)
    if args.json:
        report = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "results": RESULTS}
        Path(args.json).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
