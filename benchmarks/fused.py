"""Microseconds and bandwidth of each fused kernel and of its plain torch twin, by CUDA graph replay.

    python benchmarks/fused.py [--sweep]

A graph holds many calls over several sets of inputs, together larger than the L2 cache unless a set is
tiny (as it is in decoding, where the cache holds it too). Bytes are those that must move: each input
read once, each output written once. `--sweep` also tries other block sizes and numbers of warps.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from quire.kernels import activation, norm, rope
from quire.layers.mlp import gated
from quire.layers.norm import after_add, make_rms
from quire.layers.rope import Rope, Rotation, rotate
from quire.layers.rope_params import RopeParams

CUDA, DTYPE = torch.device("cuda"), torch.bfloat16
TOKENS = (1, 32, 256, 2048)
Call = Callable[[], object]


def microseconds(calls: list[Call]) -> float:
    """Median time of one call, from replays of a graph that holds each of them several times."""
    rounds = max(1, 48 // len(calls))
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    times = []
    for _ in range(7):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / (rounds * len(calls)))
    return sorted(times)[3]


def copies(size_bytes: int) -> range:
    return range(min(16, max(2, 200_000_000 // size_bytes)))


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device=CUDA, dtype=DTYPE)


Case = tuple[int, list[Call], list[Call]]  # bytes, fused calls, plain calls


def add_norm(tokens: int, hidden: int) -> Case:
    size, weight = tokens * hidden * 2, randn(hidden)
    sets = [(randn(tokens, hidden), randn(tokens, hidden)) for _ in copies(4 * size)]
    plain = after_add(make_rms(weight, hidden, 1e-6))
    return (
        4 * size,
        [lambda s=s: norm.add_rms_norm(*s, weight, 1e-6) for s in sets],
        [lambda s=s: plain(*s) for s in sets],
    )


def heads(tokens: int, hidden: int) -> Case:
    """Heads as in Qwen3: 16 + 2 * 8 of 128 for a hidden size of 1024, 32 + 2 * 8 for 4096."""
    q, kv, dim = (16 if hidden == 1024 else 32), 8, 128
    table = Rope(RopeParams(theta=1e6), dim, 4096, CUDA, DTYPE).table
    weight = randn(q + kv, dim)
    plain_norm = make_rms(weight, dim, 1e-6)
    positions = torch.arange(tokens, device=CUDA)
    rotation = Rotation(positions, table)
    size = tokens * (q + kv) * dim * 2
    sets = [randn(tokens, (q + 2 * kv) * dim) for _ in copies(2 * size)]

    def plain(qkv: Tensor) -> Tensor:
        return rotate(plain_norm(qkv.view(tokens, -1, dim)[:, : q + kv]), rotation)

    return (
        2 * size,
        [lambda x=x: rope.norm_rotate_(x, positions, table, weight, 1e-6, q + kv) for x in sets],
        [lambda x=x: plain(x) for x in sets],
    )


def silu(tokens: int, hidden: int) -> Case:
    width = 3072 if hidden == 1024 else 12288
    plain = gated("silu", None)
    size = tokens * width * 2
    sets = [randn(tokens, 2 * width) for _ in copies(3 * size)]
    return (
        3 * size,
        [lambda x=x: activation.gated(x, "silu") for x in sets],
        [lambda x=x: plain(x) for x in sets],
    )


def cases() -> Iterator[tuple[str, int, int, Case]]:
    for hidden, (name, make) in itertools.product(
        (1024, 4096), (("add + rms norm", add_norm), ("qk norm + rope", heads), ("silu * up", silu))
    ):
        for tokens in TOKENS:
            yield name, hidden, tokens, make(tokens, hidden)


def sweep(name: str, module: ModuleType, attribute: str, options: tuple, make: Callable[[], Case]) -> None:
    """Times with `module.attribute` set to each of the options in turn."""
    kept = getattr(module, attribute)
    times = []
    for option in options:
        setattr(module, attribute, option)
        times.append(f"{getattr(option, '__name__', option)}: {microseconds(make()[1]):.2f}")
    setattr(module, attribute, kept)
    print(f"{name:34s}" + "   ".join(times), flush=True)


def launch_with(elements: int) -> Callable[[int], dict[str, int]]:
    def launch(width: int) -> dict[str, int]:
        block = 1 << (width - 1).bit_length()
        return {"BLOCK": block, "num_warps": min(max(block // (32 * elements), 1), 32)}

    launch.__name__ = f"{elements} a thread"
    return launch


LAUNCHES = tuple(map(launch_with, (4, 8, 16, 32)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    print(f"{'kernel':16s}{'width':>8s}{'tokens':>8s}{'us':>9s}{'GB/s':>8s}{'twin us':>10s}{'GB/s':>8s}")
    for name, width, tokens, (size, fused, plain) in cases():
        a, b = microseconds(fused), microseconds(plain)
        print(
            f"{name:16s}{width:8d}{tokens:8d}{a:9.2f}{size / a / 1e3:8.0f}{b:10.2f}{size / b / 1e3:8.0f}",
            flush=True,
        )
    if not args.sweep:
        return
    for width, tokens in itertools.product((1024, 4096), (1, 256, 2048)):
        at = f"{width} x {tokens}"
        sweep(f"norm {at}", norm, "_launch", LAUNCHES, partial(add_norm, tokens, width))
        sweep(f"rope heads {at}", rope, "_HEADS", (2, 4, 8, 16), partial(heads, tokens, width))
        sweep(f"silu block {at}", activation, "_BLOCK", (512, 1024, 2048), partial(silu, tokens, width))


if __name__ == "__main__":
    main()
