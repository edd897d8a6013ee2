"""The GPUs that kernels are compiled for, and a driver that names one, so that kernels compile without the device."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget

from quire.kernels import target as targets
from quire.kernels.target import Target, target_of

TARGETS = {
    target.capability: target
    for target in (
        Target("T4", 75, 65_536, 40),
        Target("A100", 80, 166_912, 108),
        Target("RTX 3090", 86, 101_376, 82),
        Target("RTX 4090", 89, 101_376, 128),
        Target("H100", 90, 232_448, 132),
        Target("B200", 100, 232_448, 148),
        Target("RTX 5090", 120, 101_376, 170),
    )
}


def pretend(monkeypatch: pytest.MonkeyPatch, device: torch.device, **changes: Any) -> Target:
    """Override properties of `device` for a test, and return its target."""
    changed = replace(target_of(device), **changes)
    monkeypatch.setitem(targets.KNOWN_TARGETS, device, changed)
    return changed


class TargetDriver:
    """A fake driver of a GPU with this compute capability."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return self._target.arch  # a device for each target: Triton keeps one compiler per device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


class CountingDriver(TargetDriver):
    """A fake driver that loads and "launches" compiled kernels, and counts launches by thread and kernel name."""

    def __init__(self, capability: int) -> None:
        super().__init__(capability)
        self.utils = self
        self.launches: Counter[tuple[str, str]] = Counter()

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": TARGETS[self._target.arch].shared_bytes}

    def load_binary(self, name: str, code: bytes, shared: int, device: int) -> tuple[Any, str, int, int, int]:
        time.sleep(0.01)  # in which other threads may come
        return "module", name, 0, 0, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        def launch(x: int, y: int, z: int, stream: int, function: str | None, *args: Any) -> None:
            assert function is not None, "launched before it was loaded"
            self.launches[threading.current_thread().name, function] += 1

        return launch
