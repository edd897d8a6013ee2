"""Energy, power, clock, utilisation and memory of a GPU during a measurement, from NVML's counters.

Needs nvidia-ml-py (`pip install 'quire-llm[bench]'`). On a CPU, without the package, or where the driver has no such
counter, the figures are absent; the memory of a CPU is that of the process.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.files.peak_memory import peak_bytes

_EVERY_S = 0.05  # between two readings of the clock


@dataclass(slots=True)
class Energy:
    """The energy of a measurement: complete when its context has ended. None where it is unknown."""

    joules: float | None = None
    seconds: float = 0.0
    clocks_mhz: list[int] = field(default_factory=list)  # of the multiprocessors, read at intervals
    most_mhz: int | None = None  # the highest clock of the device
    busy_pct: list[int] = field(
        default_factory=list
    )  # share of time with a kernel running, read at intervals
    peak_memory_bytes: int | None = (
        None  # of the device, all processes; on a CPU of this process since its start
    )

    def conditions(self) -> dict[str, float | None]:
        """Return mean power, clock and utilisation, and peak memory, while the device was measured."""
        joules, clocks, busy = self.joules, self.clocks_mhz, self.busy_pct
        return {
            "power_w": None if joules is None or not self.seconds else joules / self.seconds,
            "clock_mhz": sum(clocks) / len(clocks) if clocks else None,
            "max_clock_mhz": self.most_mhz,
            "gpu_utilization_pct": sum(busy) / len(busy) if busy else None,
            "peak_memory_bytes": self.peak_memory_bytes,
        }

    def figures(self, output_tokens: int) -> dict[str, float | None]:
        """Return `conditions`, and the energy of the measurement and of one of its output tokens."""
        joules = self.joules
        return {
            **self.conditions(),
            "energy_j": joules,
            "j_per_output_token": None if joules is None or not output_tokens else joules / output_tokens,
        }


def joined(parts: Sequence[Energy]) -> Energy:
    """Return several measurements as one."""
    joules = [part.joules for part in parts if part.joules is not None]
    peaks = [part.peak_memory_bytes for part in parts if part.peak_memory_bytes is not None]
    return Energy(
        joules=sum(joules) if joules else None,
        seconds=sum(part.seconds for part in parts),
        clocks_mhz=[clock for part in parts for clock in part.clocks_mhz],
        most_mhz=parts[0].most_mhz,
        busy_pct=[busy for part in parts for busy in part.busy_pct],
        peak_memory_bytes=max(peaks, default=None),
    )


class NoEnergyMeter:
    """A meter of devices without counters."""

    @contextlib.contextmanager
    def measure(self) -> Iterator[Energy]:
        """Measure the time, and the memory of this process."""
        found, begin = Energy(), time.perf_counter()
        yield found
        found.seconds, found.peak_memory_bytes = time.perf_counter() - begin, peak_bytes()


class EnergyMeter(NoEnergyMeter):
    """A meter of one GPU. `nvml` is the module pynvml, or what answers in its place; `handle` the device."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle

    @contextlib.contextmanager
    def measure(self) -> Iterator[Energy]:
        """Measure the energy until the end of the context; a thread reads the other counters meanwhile."""
        nvml, handle = self._nvml, self._handle
        found, ended = Energy(), threading.Event()
        found.most_mhz = nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)

        def read() -> None:
            found.clocks_mhz.append(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
            found.busy_pct.append(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
            used = nvml.nvmlDeviceGetMemoryInfo(handle).used
            found.peak_memory_bytes = max(found.peak_memory_bytes or 0, used)

        def read_on() -> None:
            while not ended.wait(_EVERY_S):
                read()

        reader = threading.Thread(target=read_on, name="NVML reader", daemon=True)
        reader.start()
        begin, before = time.perf_counter(), nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        try:
            yield found
        finally:
            found.joules = (nvml.nvmlDeviceGetTotalEnergyConsumption(handle) - before) / 1e3
            found.seconds = time.perf_counter() - begin
            ended.set()
            reader.join()
            read()  # a short measurement has at least one reading


def energy_meter(device: str) -> NoEnergyMeter:
    """Return the meter of `device` ("cuda:0" or "cpu"), which measures nothing where there are no counters."""
    if not device.startswith("cuda"):
        return NoEnergyMeter()
    try:
        import pynvml
        import torch

        pynvml.nvmlInit()
        # NVML numbers all GPUs of the machine, torch only the visible ones.
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        for counter in (
            pynvml.nvmlDeviceGetTotalEnergyConsumption,
            pynvml.nvmlDeviceGetUtilizationRates,
            pynvml.nvmlDeviceGetMemoryInfo,
        ):
            counter(handle)
    except ImportError:
        return NoEnergyMeter()
    except pynvml.NVMLError:
        return NoEnergyMeter()
    return EnergyMeter(pynvml, handle)
