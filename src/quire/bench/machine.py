"""What a device can do at most, measured in about a second: bytes read, and matrix operations, a second."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable

import torch

from quire.bench.cost import Machine
from quire.worker.executor import device_guard
from quire.worker.memory.sizing import free_memory

_SIDE = {"cuda": 8192, "cpu": 2048}  # of the matrices that are multiplied
_BUFFER_BYTES = 1 << 30  # far beyond any cache
_ROUNDS = 4


def measure(device: torch.device, dtype: torch.dtype) -> Machine:
    """The best of a few rounds; on a device that others use too, that is what they leave.

    Bandwidth is the best of a sum and a matrix-vector product over a large buffer and, on a GPU, a copy
    (bytes read and written); the matrix rate is that of a square product of normal numbers in `dtype`.
    """
    with torch.inference_mode(), device_guard(device)():
        found = Machine(_name(device), _bandwidth(device), _matrix_rate(device, dtype))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def _bandwidth(device: torch.device) -> float:
    size = min(_BUFFER_BYTES, free_memory(device)[0] // 4)
    rows = torch.ones(size // 4 // 16384, 16384, device=device)
    vector = torch.ones(16384, device=device)
    size = rows.numel() * 4
    ways = [(size, lambda: rows.sum()), (size, lambda: torch.mv(rows, vector))]
    if device.type == "cuda":
        target = torch.empty_like(rows)
        ways.append((2 * size, lambda: target.copy_(rows)))
    return max(moved / _seconds(run, device) for moved, run in ways)


def _matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    side = _SIDE[device.type]
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return 2 * side**3 / _seconds(lambda: a @ b, device)


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Least time of one call. On a GPU each round holds several, so that launching costs nothing."""
    run()
    if device.type != "cuda":
        times = []
        for _ in range(_ROUNDS):
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
        return min(times)
    calls, times = 10, []
    for _ in range(_ROUNDS):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        for _ in range(calls):
            run()
        ended.record()
        ended.synchronize()
        times.append(begun.elapsed_time(ended) / 1e3 / calls)
    return min(times)


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
