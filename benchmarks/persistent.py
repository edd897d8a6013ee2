"""Time the kernel that runs a whole decode step, and plot what its blocks do in a layer.

    python benchmarks/persistent.py [--models Qwen3-0.6B ...] [--rows 1 2 4] [--contexts 384 2000]
        [--weights bf16 fp8 fp8-block int4] [--plot FILE] [--out FILE]

Weights are random. The floor is the time of the bytes that a step reads, at the bandwidth that `--bandwidth` names. The
kernel alone is timed, without sampling; `quire bench compare` compares whole engines with it and without.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from random_decoder import BLOCK, RandomDecoder

from quire.bench.plots import new_figure, save_figure
from quire.kernels.persistent.launch import DecodeStep, Mailbox, compile_ahead
from quire.kernels.persistent.schedule import DecoderSizes, Schedule, WeightFormat

MODELS = {
    "Qwen3-0.6B": DecoderSizes(1024, 16, 8, 128, 3072, 28, 151936, 1e-6, 128**-0.5, qk_norm=True),
    "Llama-3.2-3B": DecoderSizes(3072, 24, 8, 128, 8192, 28, 128256, 1e-5, 128**-0.5),
    "Llama-3.1-8B": DecoderSizes(4096, 32, 8, 128, 14336, 32, 128256, 1e-5, 128**-0.5),
}
SLOTS, CONTEXT = 8, 4096
# What a block does between two events of the trace (multiply.h, attention.h). White is waiting for the input.
_FIRST, _PER_PRODUCT = 16, 8
PARTS = {
    "qkv": (_FIRST + 1, _FIRST + 5, "#2f6db5"),
    "attention": (2, 6, "#d9822b"),
    "merge of splits": (6, 7, "#f2c48d"),
    "output": (_FIRST + _PER_PRODUCT + 1, _FIRST + _PER_PRODUCT + 5, "#3a8f5c"),
    "gate and up": (_FIRST + 2 * _PER_PRODUCT + 1, _FIRST + 2 * _PER_PRODUCT + 5, "#8450a0"),
    "down": (_FIRST + 3 * _PER_PRODUCT + 1, _FIRST + 3 * _PER_PRODUCT + 5, "#b5476b"),
}
LAYER, TRACED_LAYERS = 6, 2  # of the plot


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--contexts", nargs="+", type=int, default=[384, 2000])
    parser.add_argument(
        "--weights", nargs="+", choices=["bf16", "fp8", "fp8-block", "int4"], default=["bf16"]
    )
    parser.add_argument("--bandwidth", type=float, default=4.29, help="TB/s")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device, results = torch.device("cuda"), []
    for model, weights in product(args.models, args.weights):
        for result in time_model(model, weights, args.rows, args.contexts, args.bandwidth, device):
            print(
                "{model} {weights} rows {rows} context {context}: {us:.1f} us, {of_floor:.0%} of the floor".format(
                    **result
                ),
                flush=True,
            )
            results.append(result)
    if args.out:
        args.out.write_text(
            json.dumps({"device": torch.cuda.get_device_name(device), "steps": results}, indent=1)
        )
    if args.plot:
        plot(args.models[0], args.contexts[0], device, args.plot)


def time_model(
    model: str,
    weights: WeightFormat,
    rows: list[int],
    contexts: list[int],
    bandwidth: float,
    device: torch.device,
) -> list[dict[str, Any]]:
    """Return the times of the steps of a model in microseconds."""
    sizes = replace(MODELS[model], weights=weights)
    blocks = torch.cuda.get_device_properties(device).multi_processor_count
    schedules = [schedule for n in rows if (schedule := Schedule(sizes, n, BLOCK, blocks)).fits]
    with ThreadPoolExecutor() as pool:
        binaries = list(pool.map(compile_ahead, schedules))
    decoder, mailbox = RandomDecoder(sizes, SLOTS, CONTEXT, device), Mailbox(schedules, device)
    results = []
    for schedule, binary in zip(schedules, binaries, strict=True):
        step = DecodeStep(schedule, binary, mailbox, device)
        for context in contexts:
            inputs = decoder.inputs([context] * schedule.rows)
            arguments = decoder.arguments(inputs, *decoder.results(schedule.rows))
            us = _microseconds(step, arguments)
            floor = _bytes_read(schedule, context) / bandwidth / 1e6
            where = {"model": model, "weights": weights, "rows": schedule.rows, "context": context}
            results.append({**where, "us": us, "of_floor": floor / us})
    return results


def _microseconds(step: DecodeStep, arguments: list[torch.Tensor | int]) -> float:
    """Return the least time of a launch among five graphs of ten."""
    step(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            step(*arguments)
    times = []
    for _ in range(6):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 100)
    return min(times[1:])


def _bytes_read(schedule: Schedule, context: int) -> float:
    s, stages = schedule.sizes, schedule.stages()
    weights = (
        s.layers * sum(stage.weight_bytes for stage in stages if stage.name != "head")
        + stages[-1].weight_bytes
    )
    return weights + schedule.rows * context * s.layers * 2 * s.kv_heads * s.head_dim * 2


def plot(model: str, context: int, device: torch.device, path: Path) -> None:
    """Plot when each block works on what, over two layers of a step of one row."""
    sizes, blocks = MODELS[model], torch.cuda.get_device_properties(device).multi_processor_count
    schedule = Schedule(sizes, 1, BLOCK, blocks, trace=True)
    step = DecodeStep(schedule, compile_ahead(schedule), Mailbox([schedule], device), device)
    decoder = RandomDecoder(sizes, SLOTS, CONTEXT, device)
    trace = torch.zeros(blocks, sizes.layers + 1, schedule.warps, 64, dtype=torch.int64, device=device)
    inputs = decoder.inputs([context])
    for _ in range(3):
        step(*decoder.arguments(inputs, *decoder.results(1)), trace)
    torch.cuda.synchronize()
    times = trace[:, :, 0].cpu().double() / 1000  # of the first warp, in microseconds
    begin = times[:, LAYER, _FIRST + 1]
    begin = begin[begin > 0].min()
    figure = new_figure((10, 5))
    axes = figure.subplots()
    for name, (first, last, colour) in PARTS.items():
        for layer in range(LAYER, LAYER + TRACED_LAYERS):
            at, until = times[:, layer, first] - begin, times[:, layer, last] - begin
            done = (times[:, layer, first] > 0) & (until > at)
            label = name if layer == LAYER else None
            axes.barh(
                torch.arange(blocks)[done],
                (until - at)[done],
                left=at[done],
                height=1,
                color=colour,
                label=label,
            )
    axes.set(xlabel="microseconds", ylabel="block", xlim=(0, None), ylim=(-0.5, blocks - 0.5))
    axes.legend(fontsize=8, frameon=False, ncols=6, loc="upper center", bbox_to_anchor=(0.5, 1.09))
    save_figure(
        figure, f"Two layers of a decode step in one kernel: {model}, one row, context {context}", path
    )


if __name__ == "__main__":
    main()
