"""Kernels: in Triton for a GPU, in C for a CPU (cpu/). Each has a twin in plain torch, in the layer that uses it:
what the kernel must compute. Layers get those that both have as one set, `Kernels`.

No Triton kernel waits for the device or reads a device value, grids follow from shapes, and memory comes
from torch.empty alone: every call can be captured in a CUDA graph. The modules import triton, so they
are imported only where `available` says so, once, when an engine is built.

Sizes follow from the GPU (target.py).

Programmatic dependent launch (PDL): where the device can, a kernel is put on the multiprocessors while the
one before it still runs. The rules that keep this right, for every kernel that takes part: `gdc_wait` comes
before the first touch of any memory that a kernel may write (weights and tables are the only exception), and
every program waits, also one without work, because the end of a kernel must imply the end of all before it.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Protocol

import torch
import torch.nn.functional as F


class Kernels(Protocol):
    """What layers may have done in one pass over memory. Tensors are contiguous, rows of one dtype."""

    def lookup(self, table: torch.Tensor, ids: torch.Tensor, scale: float | None) -> torch.Tensor:
        """Rows `ids` [n] of a table [rows, width], times the scale."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [rows, width]; the weight may have another dtype than x."""
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The normed sum, and the sum, in fresh memory: a caller may still hold the old residual."""
        ...

    def layer_norm(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
    ) -> torch.Tensor: ...

    def add_layer_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def gated(self, gate_up: torch.Tensor, kind: str) -> torch.Tensor:
        """act(gate) * up: gate_up [rows, 2 * width] -> [rows, width]; kind: silu, gelu, gelu_tanh or relu."""
        ...

    def norm_rotate_(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        table: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        turned: int,
    ) -> None:
        """Norm (weight [turned, dim] or None) and turn, in place, the first `turned` heads of qkv [tokens,
        heads * dim] to their positions [tokens]; table [positions, dim]: cos | sin."""
        ...


def available(device: torch.device) -> bool:
    """Whether `device` runs the Triton kernels."""
    return device.type == "cuda" and find_spec("triton") is not None


def lookup(table: torch.Tensor, ids: torch.Tensor, scale: float | None) -> torch.Tensor:
    """See `Kernels`: in torch, which has a kernel of its own for it on a GPU."""
    x = F.embedding(ids, table)
    return x if scale is None else x * scale


def pick_kernels(device: torch.device, dtype: torch.dtype, cpu_kernels: bool = True) -> Kernels | None:
    """The set for models on `device` in `dtype`; None: plain torch."""
    if available(device):
        from quire.kernels import fused

        return fused
    if device.type == "cpu" and cpu_kernels and dtype in (torch.float32, torch.bfloat16):
        from quire.kernels.cpu import compiled_kernels

        return compiled_kernels()
    return None
