"""`CFusingMatmul`: the part that products by a C kernel share, whatever the form of their weight."""

from __future__ import annotations

import ctypes
from abc import abstractmethod

import torch

from quire.kernels.cpu.ops import CNorm, CpuKernels, norm_struct
from quire.quant.base import FusingMatmul, NormedProduct

# Up to this many rows, reading the weight dominates; above, kernels for many rows are faster.
FEW_ROWS = 8


class CFusingMatmul(FusingMatmul):
    """A product that a C kernel computes for few rows, fused with the operations around it."""

    def __init__(self, kernels: CpuKernels, outputs: int, block: int) -> None:
        """Describe the weight; subclasses set what `weight_struct` reads first.

        Args:
            kernels: the C kernels.
            outputs: rows of the weight.
            block: number of outputs that the kernel computes at once.
        """
        self.kernels, self.outputs, self.block = kernels, outputs, block
        self.fused_rows = self.added_rows = FEW_ROWS
        self.plain = self.weight_struct(None, "")

    @abstractmethod
    def weight_struct(self, norm: CNorm | None, kind: str) -> ctypes.Structure:
        """Describe the weight to the kernel, with a norm in front and an activation behind it."""

    @abstractmethod
    def many(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product for more than `fused_rows` rows."""

    @abstractmethod
    def run(
        self,
        weight: ctypes.Structure,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        total: torch.Tensor | None,
        add: torch.Tensor | None,
        y: torch.Tensor,
    ) -> None:
        """Launch the kernel for few rows.

        Args:
            weight: the weight, with its norm and activation.
            x: [rows, inputs].
            residual: added to x before the norm.
            total: where the sum x + residual is written.
            add: added to the product.
            y: where the result is written.
        """

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        if not 0 < rows <= self.fused_rows:
            return self.many(x)
        y = x.new_empty(rows, self.outputs)
        self.run(self.plain, x.contiguous(), None, None, None, y)
        return y

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(residual)
        self.run(self.plain, x.contiguous(), None, None, residual, y)
        return y

    def after_norm(self, norm: torch.Tensor, eps: float, kind: str | None) -> NormedProduct:
        return _FusedNormMatmul(self, norm, eps, kind)


class _FusedNormMatmul:
    """The result of `FusingMatmul.after_norm`."""

    def __init__(self, matmul: CFusingMatmul, norm: torch.Tensor, eps: float, kind: str | None) -> None:
        self.matmul, self.norm, self.kind = matmul, norm, kind
        self.gain = norm_struct(norm, None, eps)
        # The kernel applies the activation only if gate and up consist of whole blocks, which it pairs.
        gates = kind is not None and matmul.outputs // 2 % matmul.block == 0
        self.weight = matmul.weight_struct(self.gain, kind if kind and gates else "")
        self.width = matmul.outputs // 2 if gates else matmul.outputs
        self.separate_gate = kind is not None and not gates

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = x.contiguous(), x.new_empty(x.shape[0], self.width)
        total = x if residual is None else torch.empty_like(x)
        self.matmul.run(self.weight, x, residual, total, None, y)
        return (self.matmul.kernels.gated(y, self.kind) if self.separate_gate and self.kind else y), total
