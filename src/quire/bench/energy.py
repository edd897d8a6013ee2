"""Energy, power and clock of a GPU during a measurement, from NVML's counters.

Needs nvidia-ml-py (`pip install 'quire-llm[bench]'`). On a CPU, without the package, or where the driver has no such
counter, the figures are absent.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

_EVERY_S = 0.05  # between two readings of the clock


@dataclass(slots=True)
class Energy:
    """The energy of a measurement: complete when its context has ended. None where it is unknown."""

    joules: float | None = None
    seconds: float = 0.0
    clocks_mhz: list[int] = field(default_factory=list)  # of the multiprocessors, read at intervals
    most_mhz: int | None = None  # the highest clock of the device

    def conditions(self) -> dict[str, float | None]:
        """Return mean power and clock: what the device allowed while it was measured."""
        joules, clocks = self.joules, self.clocks_mhz
        return {
            "power_w": None if joules is None or not self.seconds else joules / self.seconds,
            "clock_mhz": sum(clocks) / len(clocks) if clocks else None,
            "max_clock_mhz": self.most_mhz,
        }

    def figures(self, output_tokens: int) -> dict[str, float | None]:
        """Return `conditions`, and the energy of the measurement and of one of its output tokens."""
        joules = self.joules
        return {
            **self.conditions(),
            "energy_j": joules,
            "j_per_output_token": None if joules is None or not output_tokens else joules / output_tokens,
        }


class NoEnergyMeter:
    """A meter of devices without counters."""

    @contextlib.contextmanager
    def measure(self) -> Iterator[Energy]:
        """Measure nothing but the time."""
        found, begin = Energy(), time.perf_counter()
        yield found
        found.seconds = time.perf_counter() - begin


class EnergyMeter(NoEnergyMeter):
    """A meter of one GPU. `nvml` is the module pynvml, or what answers in its place; `handle` the device."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle

    @contextlib.contextmanager
    def measure(self) -> Iterator[Energy]:
        """Measure the energy until the end of the context; a thread reads the clock meanwhile."""
        nvml, handle = self._nvml, self._handle
        found, ended = Energy(), threading.Event()
        found.most_mhz = nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)

        def read_clock() -> None:
            while not ended.wait(_EVERY_S):
                found.clocks_mhz.append(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))

        reader = threading.Thread(target=read_clock, name="clock reader", daemon=True)
        reader.start()
        begin, before = time.perf_counter(), nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        try:
            yield found
        finally:
            found.joules = (nvml.nvmlDeviceGetTotalEnergyConsumption(handle) - before) / 1e3
            found.seconds = time.perf_counter() - begin
            ended.set()
            reader.join()


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
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except ImportError:
        return NoEnergyMeter()
    except pynvml.NVMLError:
        return NoEnergyMeter()
    return EnergyMeter(pynvml, handle)
