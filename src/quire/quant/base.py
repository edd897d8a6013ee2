"""Interfaces of products: the parts of a weight in the checkpoint, and the `Matmul` with the weight.

`load_product` (loading.py) reads the parts of one fused weight and returns its product. Products with plain weights
are chosen here; they are in packed.py for CPUs and in few_rows.py for GPUs. Those with quantised weights are chosen
in products.py.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F

from quire.kernels import Kernels
from quire.layers.activation import ACTIVATIONS
from quire.layers.env import Env

NEVER = sys.maxsize  # more rows than a step has


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a checkpoint tensor: `rows` (outputs) and `cols` (inputs) of the tensor `name` of shape `shape`.

    If `transposed`, the checkpoint stores [inputs, outputs]; shape, rows and cols still have the outputs first. With
    an `index`, the tensor stacks the matrices of all experts, and this is the expert's number.
    """

    name: str
    shape: tuple[int, int]
    rows: slice
    cols: slice
    transposed: bool = False
    index: int | None = None

    @property
    def num_rows(self) -> int:
        return len(range(*self.rows.indices(self.shape[0])))

    @property
    def num_cols(self) -> int:
        return len(range(*self.cols.indices(self.shape[1])))

    def copy_into(self, destination: torch.Tensor, env: Env) -> None:
        """Copy the part into `destination` [outputs, inputs]; a GPU's copy ends when the checkpoint is finished."""
        if self.transposed:
            env.weights.copy_into(destination.t(), self.name, self.shape[::-1], self.cols, self.rows)
        else:
            env.weights.copy_into(destination, self.name, self.shape, self.rows, self.cols)


class Matmul(Protocol):
    """A product with a weight and its bias, from x [tokens, inputs] to [tokens, outputs]."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


# Maps x and residual [rows, width] to the product of their normed sum, and the sum. Without a residual the sum is x.
NormedProduct = Callable[[torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]


# How scales of rounded inputs lie in memory: those of a row or those of a group of columns are neighbours.
ScaleOrder = Literal["rows", "columns"]


@dataclass(frozen=True, slots=True)
class RoundedRows:
    """Rows rounded to e4m3 with a scale per 128 columns, as a product with a `scale_order` takes them.

    Attributes:
        codes: e4m3 [rows, columns].
        scales: fp32 [rows, columns / 128].
        dtype: of the rows before, and of the result.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype


class FusingMatmul(Matmul):
    """A `Matmul` that can be fused with the operations around it. Rounding is the same as in the separate operations.

    Attributes:
        fused_rows: most rows for `after_norm`.
        added_rows: most rows for `add`.
        apart_rows: number of rows from which `after_norm` with a `kind` needs a separate kernel for the activation.
        gated_rows: number of rows from which `of_gated` computes the activation at no cost.
    """

    fused_rows: int
    added_rows: int
    apart_rows: int = NEVER
    gated_rows: int = NEVER

    @abstractmethod
    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return the product plus `residual` [rows, outputs]."""

    @abstractmethod
    def after_norm(self, norm: torch.Tensor, eps: float, kind: str | None) -> NormedProduct:
        """Return the product fused with the RMS norm in front of it.

        Args:
            norm: weight of the norm, [inputs].
            eps: epsilon of the norm.
            kind: activation of a gated MLP. The weight is then gate|up, and the result is kind(gate) * up.
        """

    def of_gated(self, gate_up: torch.Tensor, kind: str, residual: torch.Tensor | None) -> torch.Tensor:
        """Return the product with kind(gate) * up, plus `residual` [rows, outputs] if there is one.

        Args:
            gate_up: [rows, 2 * inputs].
            kind: activation of a gated MLP.
            residual: for at most `added_rows` rows; or None.
        """
        gate, up = gate_up.chunk(2, -1)
        y = self(ACTIVATIONS[kind](gate) * up)
        return y if residual is None else y + residual

    def scale_order(self, rows: int) -> ScaleOrder | None:
        """Return the order of scales if so many rows are rounded per 128 columns; None if they are not."""
        return None

    def of_rounded(self, x: RoundedRows, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return the product with rounded rows, whose number has a `scale_order`, plus `residual` [rows, outputs]."""
        raise NotImplementedError

    def norm_and_round(
        self, x: torch.Tensor, residual: torch.Tensor | None, norm: torch.Tensor, eps: float
    ) -> tuple[RoundedRows, torch.Tensor, torch.Tensor]:
        """Norm x + residual, whose number of rows has a `scale_order`, for this product and others.

        Returns:
            The normed rows, rounded; the normed rows [rows, inputs]; and the sum x + residual.
        """
        raise NotImplementedError


def make_matmul(weight: torch.Tensor, bias: torch.Tensor | None, kernels: Kernels | None) -> Matmul:
    """Return the fastest exact product with `weight` [outputs, inputs] on its device.

    On a CPU, fp32 and bf16 weights of any size are packed: for 1024x3072 that is 1.1 to 3 times as fast as
    F.linear. On a GPU, few rows in half precision are multiplied by Quire's kernels.
    """
    if weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16):
        from quire.quant.packed import pack

        return pack(weight, bias, kernels)
    if kernels is not None:
        from quire.quant.few_rows import FewRowsMatmul

        if FewRowsMatmul.takes(weight):
            return FewRowsMatmul(weight, bias)
    return PlainMatmul(weight, bias)


class PlainMatmul:
    """Product by F.linear with a row-major weight."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight  # [outputs, inputs]
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)
