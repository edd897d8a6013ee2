"""Time the products of 17 to 256 rows on Hopper (kernels/hopper/rows.cu) beside the products that they replace.

    python benchmarks/hopper_rows.py [--formats half,fp8,int4,int8] [--rows 64,256] [--out results.json]

Weights have the shapes of Llama-3.1-8B and Qwen3-0.6B. A CUDA graph multiplies with one copy of a weight after the
other, so that none is in the cache. `before` is cuBLAS for 16-bit weights, cuBLAS and the kernel that applies the
scales for e4m3, `nibble_rows` for 4-bit ones, `packed_product` or the library behind `unpack` for int8. `limit` is the larger of the time to read the weight and the time to
multiply, at the bandwidth and the matrix rate given. All choices of rows and outputs per block and of parts are timed
that make at least 50 blocks; the engine's own is marked with *.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from quire.kernels.hopper.choice import variant_for
from quire.kernels.hopper.rows import RowsWeight, Variant, prepare, rows_product
from quire.kernels.matmul.nibble_rows import nibble_rows
from quire.kernels.matmul.packed import MOST_TILES, PackedTensors, packed_product
from quire.kernels.matmul.rescale import rescale
from quire.kernels.matmul.unpack import unpack

SHAPES = {
    "8B qkv": (6144, 4096), "8B output": (4096, 4096), "8B gate, up": (28672, 4096), "8B down": (4096, 14336),
    "8B head": (128256, 4096),
    "0.6B qkv": (4096, 1024), "0.6B output": (1024, 2048), "0.6B gate, up": (6144, 1024), "0.6B down": (1024, 3072),
}  # fmt: skip
ROWS = {"half": (32, 64, 128), "fp8": (32, 64, 128), "int4": (32, 64, 128, 256), "int8": (32, 64, 128, 256)}
BYTES = {"half": 2.0, "fp8": 1.0, "int4": 0.5, "int8": 1.0}  # of a number
TILES = (32, 64, 96, 128, 160, 192, 224, 256)  # rows of a block
GROUP = HALF = 128
COPIED_BYTES = 400 << 20
CUDA, HALF_DTYPE = torch.device("cuda"), torch.bfloat16

Product = Callable[[], Any]


def time_of(products: list[Product], repetitions: int = 5) -> float:
    """Return the median time of a product in a graph of all of them, in us."""
    for product in products:
        product()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for product in products:
            product()
    times = []
    for _ in range(repetitions + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / len(products))
    return sorted(times[2:])[repetitions // 2]


def variants(format: str, rows: int, outputs: int, inputs: int) -> Iterator[tuple[Variant, int]]:
    group = GROUP if format == "int4" else 0
    steps = int(inputs * BYTES[format] / 128)
    tiles = [tile for tile in TILES if -(-rows // tile) * tile < 1.35 * rows]
    for tile, outs, split in itertools.product(tiles, (128, 256), (1, 2, 3, 4, 5, 6)):
        variant = Variant(tile, outs, HALF_DTYPE, format, None, group, HALF)
        blocks = -(-outputs // outs) * -(-rows // tile) * split
        parts_fit = split == 1 or (blocks <= 132 and split <= steps // 2)
        if variant.fits and tile * outs <= 32768 and parts_fit and (blocks >= 50 or outputs < 4096):
            yield variant, split


def weights_of(format: str, outputs: int, inputs: int, copies: int) -> list[RowsWeight]:
    def make() -> RowsWeight:
        if format == "half":
            return RowsWeight(torch.randn(outputs, inputs, device=CUDA).to(HALF_DTYPE))
        if format == "fp8":
            codes = torch.randn(outputs, inputs, device=CUDA).to(torch.float8_e4m3fn)
            return RowsWeight(codes, torch.rand(outputs, device=CUDA))
        if format == "int8":
            codes = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8, device=CUDA)
            return RowsWeight(codes, torch.rand(outputs, device=CUDA))
        codes = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8, device=CUDA)
        scale = torch.rand(inputs // GROUP, outputs, device=CUDA).to(HALF_DTYPE)
        return RowsWeight(codes, scale, torch.randint(0, 16, scale.shape, dtype=torch.uint8, device=CUDA))

    return [make() for _ in range(copies)]


def before(format: str, x: torch.Tensor, scales: torch.Tensor | None, w: RowsWeight, inputs: int) -> Product:
    """Return the product without the kernel."""
    if format == "half":
        return lambda: F.linear(x, w.weight)
    if format == "fp8":
        assert scales is not None and w.scale is not None
        row_scales, scale, one = scales, w.scale, torch.ones((), device=CUDA)
        return lambda: rescale(
            torch._scaled_mm(x, w.weight.t(), one, one, out_dtype=HALF_DTYPE), row_scales, scale, None, None, None,
            HALF_DTYPE,
        )  # fmt: skip
    arrived = torch.zeros(MOST_TILES, dtype=torch.int32, device=CUDA)
    assert w.scale is not None
    if format == "int8":
        stored = PackedTensors("byte", w.weight.view(torch.uint8), inputs, w.scale, 0)
        if x.shape[0] <= (1024 if w.outputs > 1 << 16 else 128):
            return lambda: packed_product(x, stored, None, arrived)
        return lambda: F.linear(x, unpack(stored, x.dtype))
    assert w.zero is not None
    packed = PackedTensors("int4", w.weight, inputs, w.scale, GROUP, 1, w.zero, None, half=HALF)
    if x.shape[0] > 256:
        return lambda: F.linear(x, unpack(packed, x.dtype))
    return lambda: nibble_rows(x, packed, None, arrived)


def kernel(
    format: str, x: torch.Tensor, scales: torch.Tensor | None, w: RowsWeight, variant: Variant, split: int
) -> Product:
    """Return the product by the kernel."""
    return lambda: rows_product(x, w, variant, split, scales)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--formats", default="half,fp8,int4,int8")
    parser.add_argument("--rows", help="instead of those of each format, like 64,256")
    parser.add_argument("--shapes", default=";".join(SHAPES), help='separated by ";", like "8B qkv;8B down"')
    parser.add_argument("--tb-per-s", type=float, default=3.0, help="bandwidth for the limit (H200: 4.3)")
    parser.add_argument("--tflops", type=float, default=780.0, help="bf16 rate for the limit")
    parser.add_argument("--out", default=os.path.join(os.environ.get("OUT", "."), "hopper_rows.json"))
    args = parser.parse_args()
    results = []
    for format, name in itertools.product(args.formats.split(","), args.shapes.split(";")):
        outputs, inputs = SHAPES[name]
        size = outputs * inputs * BYTES[format]
        weights = weights_of(format, outputs, inputs, max(4, min(24, int(COPIED_BYTES / size))))
        for rows in map(int, args.rows.split(",")) if args.rows else ROWS[format]:
            x, scales = torch.randn(rows, inputs, device=CUDA).to(HALF_DTYPE), None
            if format == "fp8":
                x, scales = x.to(torch.float8_e4m3fn), torch.rand(rows, 1, device=CUDA)
            choices = list(variants(format, rows, outputs, inputs))
            for variant, _ in choices:
                prepare(variant, CUDA)
            chosen = variant_for(
                format, rows, outputs, inputs, HALF_DTYPE, None, 132, GROUP if format == "int4" else 0
            )
            old = time_of([before(format, x, scales, w, inputs) for w in weights])
            found: dict[str, float] = {}
            for variant, split in choices:
                mark = "*" if (variant, split) == chosen else ""
                tile = f"{variant.rows}x{variant.outs}" if variant.rows != rows else str(variant.outs)
                found[f"{tile}/{split}{mark}"] = time_of(
                    [kernel(format, x, scales, w, variant, split) for w in weights]
                )
            flops = 2 * rows * outputs * inputs * (0.5 if format == "fp8" else 1)
            limit = max(size / args.tb_per_s / 1e6, flops / args.tflops / 1e6)
            results.append(
                {
                    "format": format,
                    "shape": name,
                    "rows": rows,
                    "limit": limit,
                    "before": old,
                    "kernel": found,
                }
            )
            ordered = sorted(found.items(), key=lambda one: one[1])
            print(
                f"{format:5}{name:14}{rows:4} limit {limit:6.1f} before {old:6.1f} us   "
                + "  ".join(f"{key} {value:.1f}" for key, value in ordered[:5]),
                flush=True,
            )
            with open(args.out, "w", encoding="utf-8") as file:
                json.dump({"device": torch.cuda.get_device_name(), "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
