"""Time the products with quantised weights in the shapes of Llama-3.1-8B, for several sizes of programs.

    python benchmarks/quantised_products.py [--seconds 100] [--out results.json] [--formats fp8,int4] [--rows 1,16]

Every product is first compared with the de-quantised weight in fp32. Weights are read from memory, not from the cache:
a CUDA graph multiplies with one copy after the other. Prints, by shape and number of rows, the time, the bandwidth of
reading the weight and the rate, best first; `bf16` is Quire's unquantised product, `cublas` the library's. Kernels are
compiled by several processes beforehand.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from quire.kernels.matmul.gemv import gemv, norm_gemv
from quire.kernels.matmul.nibble_gemv import nibble_gemv
from quire.kernels.matmul.nibble_rows import nibble_rows
from quire.kernels.matmul.packed import (
    MOST_TILES,
    PackedTensors,
    PackedTile,
    packed_product,
    reorder_nibbles,
)
from quire.kernels.matmul.rescale import rescale
from quire.kernels.matmul.round_fp8 import round_fp8
from quire.kernels.matmul.tiles import RowsTile
from quire.kernels.matmul.unpack import unpack
from quire.kernels.norm import add_rms_norm
from quire.quant.few_rows import FewRowsMatmul

SHAPES = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]  # qkv, o, gate|up, down
ROWS = [1, 16, 64, 256, 4, 128, 32, 8, 2, 2048]  # the most telling first, in case the time is up
RING_BYTES = 160 << 20  # copies of a weight take this much, three times the cache
CUDA = torch.device("cuda")
EPS = 1e-5

T = PackedTile
FEW = [T(32, 128, 2, 5, 4), T(64, 128, 4, 4, 4), T(64, 128, 4, 5, 2), T(64, 256, 4, 3, 2), T(128, 128, 4, 4, 2),
       T(32, 256, 2, 4, 4), T(32, 256, 4, 4, 4), T(32, 128, 4, 5, 4), T(16, 256, 1, 5, 4), T(64, 128, 4, 6, 6)]  # fmt: skip
MORE = [T(64, 128, 4, 4, 2), T(128, 128, 4, 4, 2), T(128, 128, 8, 3, 1), T(128, 128, 8, 4, 1, 64),
        T(128, 128, 8, 3, 0, 256), T(128, 128, 8, 2, 0, 256), T(64, 128, 4, 3, 0, 256), T(256, 128, 8, 3, 1)]  # fmt: skip
WITH_FP8 = [T(64, 128, 4, 4, 2), T(128, 128, 4, 4, 2), T(128, 128, 8, 4, 1), T(64, 128, 4, 5, 4), T(64, 256, 4, 4, 2),
            T(128, 256, 8, 3, 1), T(128, 128, 8, 4, 0, 256), T(128, 128, 8, 3, 2, 256)]  # fmt: skip
R = RowsTile
IN_WORDS = [R(64, 32, 4, 4, 64, 4), R(128, 32, 8, 4, 64, 2), R(128, 64, 8, 4, 64, 1), R(128, 64, 4, 4, 32, 2),
            R(128, 128, 8, 4, 32, 1), R(256, 128, 8, 3, 32, 1), R(128, 256, 8, 3, 32, 1)]  # fmt: skip


@dataclass(frozen=True)
class Task:
    format: str  # fp8, fp8-block, int8, int4, fp4
    shape: tuple[int, int]
    rows: int
    tile: PackedTile | RowsTile
    half: int = 0  # of the order of nibbles
    in_fp8: bool = False  # whether x is rounded
    fused: bool = (
        False  # gate behind for the widest shape, addition behind for the others; `gemv`: and a norm in front
    )
    gemv: int = -1  # rows of the weight per program of a matrix-vector product (0: chosen); -1: matrix units

    @property
    def name(self) -> str:
        t = self.tile
        if self.gemv >= 0:
            return f"{self.format} gemv {'fused ' * self.fused}n{self.gemv}"
        if isinstance(t, RowsTile):
            words = f"k{t.words} w{t.warps} s{t.stages} p{t.programs} m{t.block_m}"
            return f"{self.format} in words half {self.half} n{t.block_n} {words}"
        flags = "x8 " * self.in_fp8 + "fused " * self.fused + (f"half {self.half} " if self.half else "")
        return f"{self.format} {flags}n{t.block_n} k{t.block_k} w{t.warps} s{t.stages} p{t.programs} m{t.block_m}"


def all_tasks(formats: list[str], row_counts: list[int]) -> list[Task]:
    tasks = []
    for rows in row_counts:
        for shape in SHAPES:
            tiles = FEW if rows <= 16 else MORE
            for kind in formats:
                four = kind in ("int4", "fp4")
                halves = ((64, 128) if kind == "int4" else (32,)) if four else (0,)
                if rows <= (256 if four else 64):
                    chosen = tiles[1:4] if kind in ("int8", "fp4", "fp8-block") else tiles
                    tasks += [Task(kind, shape, rows, tile, half) for tile in chosen for half in halves]
                if kind == "int4" and 16 <= rows <= 256:
                    tasks += [
                        Task(kind, shape, rows, tile, 128)
                        for tile in IN_WORDS
                        if tile.block_m <= max(rows, 32)
                    ]
                if kind in ("fp8", "fp8-block") and 16 <= rows <= 256:
                    tasks += [Task(kind, shape, rows, tile, in_fp8=True) for tile in WITH_FP8]
                if rows <= 2 and kind != "fp4":
                    sizes = (4, 8, 16) if kind == "int4" else (0,)
                    tasks += [
                        Task(kind, shape, rows, FEW[0], halves[-1], fused=fused, gemv=size)
                        for size in sizes
                        for fused in (False, True)
                    ]
                if rows in (1, 4) and kind in ("fp8", "int4"):
                    tasks += [Task(kind, shape, rows, tile, halves[-1], fused=True) for tile in FEW[:2]]
    return tasks


@cache
def weight(kind: str, shape: tuple[int, int], half: int) -> PackedTensors:
    """Return a random weight whose values are about 0.02 large."""
    outputs, inputs = shape
    torch.manual_seed(outputs + inputs)
    if kind in ("fp8", "fp8-block"):
        codes = (torch.randn(shape, device=CUDA) * 50).clamp_(-448, 448).to(torch.float8_e4m3fn)
        codes = codes.view(torch.uint8)
        if kind == "fp8":
            return PackedTensors("fp8", codes, inputs, torch.rand(outputs, device=CUDA) * 4e-4, 0)
        scale = torch.rand(inputs // 128, outputs // 128, device=CUDA) * 4e-4
        return PackedTensors("fp8", codes, inputs, scale, 128, 128)
    if kind == "int8":
        codes = torch.randint(0, 256, shape, dtype=torch.uint8, device=CUDA)
        return PackedTensors("byte", codes, inputs, torch.rand(outputs, device=CUDA) * 2e-4, 0)
    codes = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8, device=CUDA)
    if kind == "int4":
        scale = (torch.rand(inputs // 128, outputs, device=CUDA) * 4e-3).half()
        return PackedTensors("int4", reorder_nibbles(codes, half), inputs, scale, 128, half=half)
    scale = torch.randint(116, 121, (inputs // 32, outputs), dtype=torch.uint8, device=CUDA)
    return PackedTensors("fp4", reorder_nibbles(codes, half), inputs, scale, 32, half=half)


@cache
def whole_weight(kind: str, shape: tuple[int, int], half: int) -> torch.Tensor:
    return unpack(weight(kind, shape, half), torch.float32)


@cache
def ring(kind: str, shape: tuple[int, int], half: int) -> list[PackedTensors]:
    one = weight(kind, shape, half)
    copies = max(2, -(-RING_BYTES // one.codes.nbytes))
    return [replace(one, codes=one.codes.clone()) for _ in range(copies)]


@cache
def inputs_for(rows: int, width: int) -> torch.Tensor:
    torch.manual_seed(rows)
    return torch.randn(rows, width, device=CUDA, dtype=torch.bfloat16)


@cache
def counters() -> torch.Tensor:
    return torch.zeros(MOST_TILES, dtype=torch.int32, device=CUDA)


def product(task: Task, w: PackedTensors) -> torch.Tensor:
    x = inputs_for(task.rows, task.shape[1])
    if task.gemv >= 0:
        return matrix_vector(task, w, x)
    if isinstance(task.tile, RowsTile):
        return nibble_rows(x, w, None, counters(), tile=task.tile)
    options: dict[str, Any] = {"tile": task.tile}
    if task.in_fp8:
        codes, scales = rounded(task.rows, task.shape[1], task.format == "fp8-block")
        return packed_product(
            codes.view(torch.uint8), w, None, counters(), x_scale=scales, dtype=torch.bfloat16, **options
        )
    if task.fused and task.shape[0] > 8192:
        options["kind"] = "silu"
    elif task.fused and task.shape[0] == 4096:
        options["add"] = inputs_for(task.rows, task.shape[0])
    return packed_product(x, w, None, counters(), **options)


def matrix_vector(task: Task, w: PackedTensors, x: torch.Tensor) -> torch.Tensor:
    norm = {"residual": x, "norm": x[0], "eps": EPS, "kind": "silu" if task.shape[0] > 8192 else None}
    adds = task.fused and task.shape[0] == 4096
    beside = inputs_for(task.rows, task.shape[0]) if adds else None
    fused = task.fused and not adds
    if task.format == "int4":
        options = norm if fused else {"add": beside}
        return nibble_gemv(x, w, None, rows=task.gemv, **options)[0]  # type: ignore[arg-type]
    codes = w.codes.view(torch.int8 if task.format == "int8" else torch.float8_e4m3fn)
    if fused:
        return norm_gemv(x, x, x[0], EPS, codes, None, norm["kind"], w.scale)[0]  # type: ignore[arg-type]
    return gemv(x, codes, None, beside, w.scale)


@cache
def rounded(rows: int, width: int, by_group: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return round_fp8(inputs_for(rows, width), by_group)[:2]


def reference(task: Task) -> torch.Tensor:
    x = inputs_for(task.rows, task.shape[1]).float()
    w = whole_weight(task.format, task.shape, task.half)
    if task.in_fp8:
        codes, scales = rounded(task.rows, task.shape[1], task.format == "fp8-block")
        x = codes.float() * scales.repeat_interleave(x.shape[1] // scales.shape[1], 1)
    if task.fused and task.gemv >= 0 and task.shape[0] > 4096:
        total = (x + x).bfloat16().float()
        x = total * torch.rsqrt((total * total).mean(1, keepdim=True) + EPS) * x[0]
    y = x @ w.t()
    if task.fused and task.shape[0] > 8192:
        gate, up = y.chunk(2, 1)
        return F.silu(gate) * up
    return y + inputs_for(task.rows, task.shape[0]).float() if task.fused and task.shape[0] == 4096 else y


def compile_task(task: Task) -> str:
    """Run a product in a process of its own, so that its kernel is in the cache on disk."""
    try:
        product(task, weight(task.format, task.shape, task.half))
        torch.cuda.synchronize()
        return ""
    except Exception as error:
        return f"{task.shape} {task.rows} {task.name}: {type(error).__name__}: {str(error)[:300]}"


def time_us(calls: list[Callable[[], Any]]) -> float:
    """Return the time of one call in microseconds, in a graph of all calls."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    best = float("inf")
    for _ in range(4):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) * 1000 / len(calls))
    return best


def library_calls(shape: tuple[int, int], rows: int) -> dict[str, list[Callable[[], Any]]]:
    """Return the products to compare with, by name."""
    outputs, inputs = shape
    x = inputs_for(rows, inputs)
    matmuls = [FewRowsMatmul(w, None) for w in bf16_ring(shape)]
    calls: dict[str, list[Callable[[], Any]]] = {"bf16": [lambda m=m: m(x) for m in matmuls]}
    calls["norm alone"] = [lambda: add_rms_norm(x, x, x[0], 1e-5)] * 20
    if rows >= 16:
        codes, scales = rounded(rows, inputs, False)
        ring8 = [w.codes.view(torch.float8_e4m3fn) for w in ring("fp8", shape, 0)]
        one, of_row = torch.ones((), device=CUDA), torch.ones(1, outputs, device=CUDA)
        calls["fp8 cublas tensor"] = [
            lambda w=w: torch._scaled_mm(codes, w.t(), one, one, out_dtype=torch.bfloat16) for w in ring8
        ]
        calls["fp8 cublas rescaled"] = [
            lambda w=w: rescale(
                torch._scaled_mm(codes, w.t(), one, one, out_dtype=torch.bfloat16), scales, of_row.view(-1)
            ) for w in ring8
        ]  # fmt: skip
        calls["fp8 cublas row"] = [
            lambda w=w: torch._scaled_mm(codes, w.t(), scales, of_row, out_dtype=torch.bfloat16)
            for w in ring8
        ]
        grouped, group_scales = rounded(rows, inputs, True)
        block = torch.ones(outputs // 128, inputs // 128, device=CUDA)
        kind = F.ScalingType if hasattr(F, "ScalingType") else torch.nn.functional.ScalingType
        by_column = group_scales.t().contiguous().t()
        calls["fp8-block cublas"] = [
            lambda w=w: F.scaled_mm(
                grouped, w.t(), by_column, kind.BlockWise1x128, block.t(), kind.BlockWise128x128,
                output_dtype=torch.bfloat16,
            ) for w in ring8
        ]  # fmt: skip
        calls["fp8 rounding of x"] = [lambda: round_fp8(x, False)] * 20
        calls["fp8-block rounding of x"] = [lambda: round_fp8(x, True)] * 20
    if rows >= 128:
        for kind_, half in (("int4", 64), ("fp4", 32), ("int8", 0)):
            calls[f"{kind_} unpack + bf16"] = [
                lambda w=w: F.linear(x, unpack(w, torch.bfloat16)) for w in ring(kind_, shape, half)[:4]
            ]
    return calls


@cache
def bf16_ring(shape: tuple[int, int]) -> list[torch.Tensor]:
    copies = max(2, -(-RING_BYTES // (2 * shape[0] * shape[1])))
    return [torch.randn(shape, device=CUDA, dtype=torch.bfloat16) * 0.02 for _ in range(copies)]


def bytes_of(name: str, shape: tuple[int, int]) -> float:
    bits = (
        16
        if name.startswith(("bf16", "norm"))
        else 4.125
        if name.startswith("int4")
        else 4.25
        if name[:3] == "fp4"
        else 8
    )
    return shape[0] * shape[1] * bits / 8


def measure(task: Task) -> tuple[float, float]:
    """Return the time in microseconds and the relative error."""
    want = reference(task)
    y = product(task, weight(task.format, task.shape, task.half)).float()
    error = ((y - want).norm() / want.norm()).item()
    copies = ring(task.format, task.shape, task.half)
    return time_us([lambda w=w: product(task, w) for w in copies]), error


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=100)
    parser.add_argument("--out", default=os.path.join(os.environ.get("OUT", "."), "quantised_products.json"))
    parser.add_argument("--formats", default="fp8,int4,fp8-block,fp4,int8")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--processes", type=int, default=12)
    args = parser.parse_args()
    begin = time.perf_counter()
    rows_of = [int(rows) for rows in args.rows.split(",")]
    tasks = all_tasks(args.formats.split(","), rows_of)
    print(torch.cuda.get_device_name(), torch.__version__, len(tasks), "products", flush=True)
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        errors = []
        for error in pool.imap_unordered(compile_task, tasks, chunksize=2):
            errors += [error] if error else []
            if time.perf_counter() - begin > args.seconds / 2:
                print("compilation takes too long; the rest is compiled when it is timed", flush=True)
                break
    print(f"compiled after {time.perf_counter() - begin:.0f} s, {len(errors)} errors", flush=True)
    for error in errors[:20]:
        print("  ", error, flush=True)
    results: list[dict[str, Any]] = []
    for rows in rows_of:
        for shape in SHAPES:
            found: list[tuple[float, str]] = []
            for name, calls in _safely({}, library_calls, shape, rows).items():
                spent = _safely(None, time_us, calls)
                if spent is not None:
                    found.append((spent, name))
            for task in (t for t in tasks if (t.rows, t.shape) == (rows, shape)):
                if time.perf_counter() - begin > args.seconds:
                    continue

                measured = _safely(None, measure, task)
                if measured is None:
                    continue
                spent, error = measured
                name = task.name + ("" if error < 0.02 else f" WRONG {error:.3f}")
                found.append((spent, name))
                results.append({**asdict(task), "us": spent, "error": error})
            print(f"\n{shape[0]} x {shape[1]}, {rows} rows, after {time.perf_counter() - begin:.0f} s")
            seen: dict[str, int] = {}
            for spent, name in sorted(found):
                key = " ".join(name.split(" n")[0].split(" half")[0].split())
                seen[key] = seen.get(key, 0) + 1
                if seen[key] <= 3:
                    rate = 2 * rows * shape[0] * shape[1] / spent / 1e6
                    print(
                        f"  {spent:8.1f} us {bytes_of(name, shape) / spent / 1e3:6.0f} GB/s {rate:6.0f} TFLOP/s  {name}"
                    )
            results += [{"shape": shape, "rows": rows, "name": name, "us": spent} for spent, name in found]
            print(end="", flush=True)
        with open(args.out, "w") as file:
            json.dump({"device": torch.cuda.get_device_name(), "results": results}, file)


def _safely(otherwise: Any, work: Callable[..., Any], *args: Any) -> Any:
    """Return the result of `work`; if it fails, print why and return `otherwise`."""
    try:
        return work(*args)
    except Exception as error:
        print(f"  failed: {type(error).__name__}: {str(error)[:200]}", flush=True)
        return otherwise


if __name__ == "__main__":
    main()
