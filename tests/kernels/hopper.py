"""A driver that only names its target: with it kernels are compiled for Hopper without a GPU, and launches counted."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import torch
from triton.backends.compiler import GPUTarget


class Hopper:
    def __init__(self) -> None:
        self.utils = self
        self.launches: Counter[tuple[str, str]] = Counter()  # by names of the thread and the kernel

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}

    def load_binary(self, name: str, code: bytes, shared: int, device: int) -> tuple[Any, str, int, int, int]:
        time.sleep(0.01)  # in which other threads may come
        return "module", name, 0, 0, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        def launch(x: int, y: int, z: int, stream: int, function: str | None, *args: Any) -> None:
            assert function is not None, "launched before it was loaded"
            self.launches[threading.current_thread().name, function] += 1

        return launch
