"""A driver that only names its target: with it kernels are compiled for Hopper without a GPU."""

from __future__ import annotations

import torch
from triton.backends.compiler import GPUTarget


class Hopper:
    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")
