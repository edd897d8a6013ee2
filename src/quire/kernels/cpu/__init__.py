"""CPU kernels in C (step.c). They cut the two main costs of a small step: call overhead and slow memory reads."""

from __future__ import annotations

from functools import cache

from quire.kernels.cpu.build import open_library
from quire.kernels.cpu.ops import CpuKernels


@cache
def compiled_kernels() -> CpuKernels | None:
    """Return the kernels, or None on a machine that cannot build them; the reason is logged once."""
    library = open_library()
    return None if library is None else CpuKernels(library)
