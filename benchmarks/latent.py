"""Latent attention of DeepSeek's sizes on one GPU: bandwidth and operations per second.

    python benchmarks/latent.py [--sweep] [--json FILE]

Each case runs as a CUDA graph over the blocks of several layers, together larger than the L2 cache. Results are checked
against plain PyTorch first. `--sweep` also times candidate tiles. Bytes count each entry once, although programs for
different heads of a row read it again from the L2 cache. V2-Lite has 16 heads, V3 128.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch

from kernels import BANDWIDTH, COMPUTE, attempt, seconds
from quire.attention.latent_reference import attend_latents
from quire.kernels.ahead import background_compilation
from quire.kernels.attention import latent
from quire.kernels.attention.latent import (
    attend_latent_ones,
    attend_latent_tiles,
    latent_splits,
    latent_tile,
    latent_tokens,
)
from quire.kernels.attention.long import list_tiles
from quire.kernels.attention.tile import Tile
from quire.kernels.target import target_of

RANK, DIM, BLOCK_SIZE = 512, 576, 16
SCALE = DIM**-0.5
DTYPE = torch.bfloat16
FEW_TILES = [  # rows, keys, warps, stages
    (16, 32, 2, 4), (16, 32, 4, 3), (16, 32, 4, 4), (16, 32, 4, 5), (16, 64, 4, 2), (16, 64, 4, 3), (16, 64, 4, 4),
    (16, 64, 8, 2), (16, 64, 8, 3), (16, 64, 8, 4),
]  # fmt: skip
MANY_TILES = [
    (32, 64, 4, 2), (32, 64, 4, 3), (64, 32, 8, 2), (64, 32, 8, 3), (64, 32, 8, 4), (64, 64, 8, 2), (64, 64, 4, 2),
]  # fmt: skip
RESULTS: list[dict[str, object]] = []


class LatentWork:
    """The blocks of some layers, and rows of one length of which all tokens are new, or only the last."""

    def __init__(self, heads: int, rows: int, length: int, all_new: bool = False) -> None:
        self.heads, self.rows, self.length, self.all_new = heads, rows, length, all_new
        count = -(-length // BLOCK_SIZE)
        blocks = torch.randperm(rows * count, dtype=torch.int32, device="cuda")
        self.table = blocks.view(rows, count)
        self.bytes = rows * length * DIM * DTYPE.itemsize
        layers = 1 if all_new else max(1, min(32, int(4e8 / self.bytes)))
        shape = (rows * count, BLOCK_SIZE, DIM)
        self.entries = [torch.randn(shape, dtype=DTYPE, device="cuda") for _ in range(layers)]
        tokens = rows * (length if all_new else 1)
        self.q = torch.randn(tokens, heads, DIM, dtype=DTYPE, device="cuda")
        self.out = torch.empty(tokens, heads * RANK, dtype=DTYPE, device="cuda")
        self.seq_lens = torch.full((rows,), length, dtype=torch.int32, device="cuda")
        self.slots = torch.arange(rows, device="cuda")
        pairs = rows * (length * (length + 1) // 2 if all_new else length)
        self.operations = 2 * heads * (DIM + RANK) * pairs
        self.target = target_of(self.q.device)

    def launch(self, tile: Tile | None = None, splits: int | None = None) -> None:
        if not self.all_new:
            if splits is None:
                splits = latent_splits(self.rows, self.heads, self.length, DIM, DTYPE.itemsize, self.target)
            for entries in self.entries:
                attend_latent_ones(
                    self.q,
                    entries,
                    self.out,
                    self.seq_lens,
                    None,
                    self.table,
                    self.slots,
                    SCALE,
                    splits,
                    tile,
                )
            return
        per_tile = latent_tokens(self.heads, DIM, DTYPE.itemsize, self.target)
        per_tile = max(tile.rows // self.heads, 1) if tile else per_tile
        starts = torch.arange(self.rows + 1, dtype=torch.int32, device="cuda") * self.length
        most = self.rows * -(-self.length // per_tile)
        tiles = list_tiles(starts, self.seq_lens, self.slots, most, 0, per_tile, most)
        for entries in self.entries:
            attend_latent_tiles(self.q, entries, self.out, self.table, tiles, SCALE, tile)

    def time(self, tile: Tile | None = None, splits: int | None = None, swap: bool | None = None) -> float:
        with patch.object(latent, "swaps", (lambda _: swap) if swap is not None else latent.swaps):
            return seconds(partial(self.launch, tile, splits), replays=7) / len(self.entries)

    def error(self) -> float:
        """Return the relative error of the last row's last token."""
        self.launch()
        keys = self.entries[-1][self.table[-1].long()].view(1, -1, DIM)[:, : self.length]
        layer = SimpleNamespace(rank=RANK, scale=SCALE)
        want = attend_latents(self.q[-1:], keys, None, layer)[0].float()
        return float((self.out[-1].view(-1, RANK).float() - want).norm() / want.norm())

    def report(self, label: str, time_s: float) -> None:
        kind = "prefill" if self.all_new else "decode"
        case = f"{kind} {self.heads} heads, {self.rows} x {self.length}"
        bandwidth, rate = self.bytes / time_s, self.operations / time_s
        RESULTS.append(
            {"case": case, "tile": label, "us": time_s * 1e6, "bytes_per_s": bandwidth, "flops": rate}
        )
        print(
            f"{case:34}{label:34}{time_s * 1e6:9.1f} us{bandwidth / 1e9:8.0f} GB/s {bandwidth / BANDWIDTH:6.1%}"
            f"{rate / 1e12:7.0f} TFLOP/s {rate / COMPUTE:6.1%}",
            flush=True,
        )


def run(work: LatentWork, sweep: bool, splits: tuple[int | None, ...] = (None,)) -> None:
    print(f"relative error {work.error():.1e}", flush=True)
    work.report(f"chosen {latent_tile(work.heads, DIM, 2, work.target, work.all_new)[:4]}", work.time())
    if not sweep:
        return
    tiles = [Tile(*tile) for tile in (FEW_TILES if work.heads <= 16 and not work.all_new else MANY_TILES)]
    found = [
        (attempt(partial(work.time, tile, count, swap)), f"{tile[:4]} x {count}{' swapped' if swap else ''}")
        for swap in (False, True)
        for tile in tiles
        for count in splits
        if not swap or tile.keys >= 64
    ]
    for time_s, label in sorted(found)[:8]:
        work.report(label, time_s)


def compile_all(works: list[LatentWork]) -> None:
    """Compile every candidate in parallel."""
    begin = time.perf_counter()
    with background_compilation(torch.device("cuda", 0)):
        for work in works:
            for swap in (False, True):
                for tile in FEW_TILES + MANY_TILES:
                    if (tile[0] > 16) == (work.heads > 16 or work.all_new) and (not swap or tile[1] >= 64):
                        with patch.object(latent, "swaps", lambda _, swap=swap: swap):
                            for count in (1,) if work.all_new else (1, 2):
                                work.launch(Tile(*tile), count)
    print(f"compiled in {time.perf_counter() - begin:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="also time candidate tiles")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    args = parser.parse_args()
    if args.sweep:
        compile_all([LatentWork(16, 2, 4096), LatentWork(128, 2, 4096), LatentWork(16, 2, 4096, True)])
    try:
        run(LatentWork(16, 64, 4096), args.sweep, (1, 2, 4, 8))
        run(LatentWork(128, 64, 4096), args.sweep, (1, 2))
        single = LatentWork(16, 1, 4096)
        for splits in (8, 16, 32, 64):
            single.report(f"{splits} splits", attempt(partial(single.time, None, splits)))
        for heads, rows, length in (
            (16, 256, 1000),
            (16, 8, 4096),
            (128, 8, 4096),
            (128, 1, 4096),
            (16, 4, 131072),
        ):
            run(LatentWork(heads, rows, length), False)
        run(LatentWork(16, 1, 4096, True), args.sweep)
        run(LatentWork(16, 8, 1024, True), False)
        run(LatentWork(128, 1, 2048, True), False)
    finally:
        if args.json:
            report = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "results": RESULTS}
            args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
