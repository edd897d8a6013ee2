"""Kernels of a CPU, in C (step.c): what a step of few rows costs there is mostly calls, and memory read slowly."""

from __future__ import annotations

from functools import cache

from quire.kernels.cpu.build import open_library
from quire.kernels.cpu.ops import CpuKernels


@cache
def compiled_kernels() -> CpuKernels | None:
    """The kernels; None, with the reason logged once, on a machine that cannot build them."""
    library = open_library()
    return None if library is None else CpuKernels(library)
