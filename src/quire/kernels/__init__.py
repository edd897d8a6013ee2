"""Triton kernels. Each has a twin in plain torch, in the layer that uses it: what the kernel must compute.

Nothing here waits for the device or reads a device value, grids follow from shapes, and memory comes
from torch.empty alone: every call can be captured in a CUDA graph. The modules import triton, so they
are imported only where `available` says so, once, when a layer is built.

Programmatic dependent launch (PDL): where the device can, a kernel is put on the multiprocessors while the
one before it still runs. The rules that keep this right, for every kernel that takes part: `gdc_wait` comes
before the first touch of any memory that a kernel may write (weights and tables are the only exception), and
every program waits, also one without work, because the end of a kernel must imply the end of all before it.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch


def available(device: torch.device) -> bool:
    """Whether layers on `device` use the kernels."""
    return device.type == "cuda" and find_spec("triton") is not None


@cache
def dependent_launch(device: torch.device) -> bool:
    """Whether kernels on `device` may start before the one before them has ended: Hopper and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
