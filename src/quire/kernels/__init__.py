"""Kernels: in Triton for a GPU, in C for a CPU (cpu/).

Each kernel has a reference in plain torch, in the layer that uses it, which defines what the kernel computes. The
kernels that both devices have form one interface, `Kernels`.

A wrapper of a Triton kernel never synchronizes with the device or reads a device value, derives the grid from
shapes, and allocates only with torch.empty, so every call can be captured in a CUDA graph. The modules import
triton, so they are imported only where `available` returns True, once, when an engine is built.

Tile sizes depend on the GPU (target.py).

Programmatic dependent launch (PDL): on devices that support it, a kernel starts on the multiprocessors while the
previous kernel still runs. Every kernel that takes part keeps two rules:

- `gdc_wait` precedes the first access to memory that another kernel may write. Only weights and tables may be read
  before it, and what was complete before the previous kernel could start: the choice of experts behind a kernel that
  waits before it lets the next one start, and states, because each step begins with kernels that take no part.
- Every program waits, even one without work, because the end of a kernel must imply the end of all kernels before it.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Protocol

import torch
import torch.nn.functional as F


class Kernels(Protocol):
    """The fused operations that layers use. Tensors are contiguous, and the rows of a call have one dtype."""

    def lookup(self, table: torch.Tensor, ids: torch.Tensor, scale: float | None) -> torch.Tensor:
        """Return rows `ids` (int64 [n]) of `table` [rows, width], times `scale`: [n, width]."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return the RMS norm of x [rows, width]. `weight` [width] may have another dtype than x."""
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the RMS norm of x + residual, and that sum.

        Both are new tensors, because a caller may still hold the old residual.
        """
        ...

    def layer_norm(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Return the LayerNorm of x [rows, width]."""
        ...

    def add_layer_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the LayerNorm of x + residual, and that sum, as new tensors."""
        ...

    def gated(self, gate_up: torch.Tensor, kind: str) -> torch.Tensor:
        """Return act(gate) * up [rows, width] of gate_up [rows, 2 * width], as a gated MLP does.

        Args:
            gate_up: gate in the first half of the columns, up in the second.
            kind: the activation: silu, gelu, gelu_tanh or relu.
        """
        ...

    def norm_rotate_(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        table: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        turned: int,
        span: int = 0,
    ) -> None:
        """Normalize and rotate the first `turned` heads of each row of qkv, in place.

        Args:
            qkv: [tokens, heads * dim].
            positions: int64 [tokens].
            table: [positions, dim], cos in the first half of the columns, sin in the second.
            weight: of an RMS norm of each head, [turned, dim], or None for no norm.
            eps: of the norm.
            turned: number of heads to rotate; the heads after them stay unchanged.
            span: distance between the two dimensions of a rotated pair; 0: half a head.
        """
        ...


def available(device: torch.device) -> bool:
    """Return whether `device` runs the Triton kernels."""
    return device.type == "cuda" and find_spec("triton") is not None


def lookup(table: torch.Tensor, ids: torch.Tensor, scale: float | None) -> torch.Tensor:
    """Return rows `ids` of `table`, times `scale`, as `Kernels.lookup`; torch already has a GPU kernel for it."""
    x = F.embedding(ids, table)
    return x if scale is None else x * scale


def pick_kernels(device: torch.device, dtype: torch.dtype, cpu_kernels: bool = True) -> Kernels | None:
    """Return the kernels for models on `device` in `dtype`, or None if plain torch must do.

    Args:
        device: where the model runs.
        dtype: of its activations.
        cpu_kernels: whether to use the C kernels on a CPU.
    """
    if available(device):
        from quire.kernels import fused

        return fused
    if device.type == "cpu" and cpu_kernels and dtype in (torch.float32, torch.bfloat16):
        from quire.kernels.cpu import compiled_kernels

        return compiled_kernels()
    return None
