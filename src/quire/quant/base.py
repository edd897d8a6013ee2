"""How a linear layer's weight is stored and multiplied: the seam for number formats.

A `QuantMethod` reads the parts of one fused matrix from the checkpoint and returns a `Matmul`. The
unquantised method is here; see packed.py for a CPU and few_rows.py for a GPU.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from quire.kernels import Kernels
from quire.layers.env import Env


@dataclass(frozen=True, slots=True)
class Part:
    """`rows` (outputs) and `cols` (inputs) of the checkpoint's tensor `name`, whose whole shape is `shape`.

    `transposed`: the checkpoint stores [inputs, outputs]; shape, rows and cols are still outputs first.
    """

    name: str
    shape: tuple[int, int]
    rows: slice
    cols: slice
    transposed: bool = False

    @property
    def num_rows(self) -> int:
        return len(range(*self.rows.indices(self.shape[0])))

    @property
    def num_cols(self) -> int:
        return len(range(*self.cols.indices(self.shape[1])))

    def copy_into(self, destination: torch.Tensor, env: Env) -> None:
        """Fill `destination` [outputs, inputs]; on a GPU it is there once the checkpoint is finished."""
        if self.transposed:
            env.weights.copy_into(destination.t(), self.name, self.shape[::-1], self.cols, self.rows)
        else:
            env.weights.copy_into(destination, self.name, self.shape, self.rows, self.cols)


class Matmul(Protocol):
    """x [tokens, inputs] -> [tokens, outputs], bias included."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


# x, residual [rows, width] -> a product with the normed sum of the two, and the sum; without a residual that is x
NormedProduct = Callable[[torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]


class FusingMatmul(Matmul):
    """A `Matmul` that, for at most `fused_rows` rows, can take in what surrounds it.

    It rounds where the separate operations would.
    """

    fused_rows: int

    @abstractmethod
    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The product plus residual [rows, outputs]."""

    @abstractmethod
    def after_norm(self, norm: torch.Tensor, eps: float, kind: str | None) -> NormedProduct:
        """The product with the RMS norm (weight `norm`) of a sum. With a `kind` of activation the weight is
        gate|up, and the result kind(gate) * up."""


class QuantMethod(Protocol):
    """A number format of weights."""

    def load(self, env: Env, parts: list[Part], bias: torch.Tensor | None) -> Matmul: ...


class Unquantised:
    """Weights in the model's dtype."""

    def load(self, env: Env, parts: list[Part], bias: torch.Tensor | None) -> Matmul:
        """One fused weight, each part copied to its place."""
        rows = sum(part.num_rows for part in parts)
        weight = torch.empty(rows, parts[0].num_cols, device=env.device, dtype=env.dtype)
        start = 0
        for part in parts:
            part.copy_into(weight[start : start + part.num_rows], env)
            start += part.num_rows
        return make_matmul(weight, bias, env.kernels)


UNQUANTISED = Unquantised()


def make_matmul(weight: torch.Tensor, bias: torch.Tensor | None, kernels: Kernels | None) -> Matmul:
    """The fastest exact product with `weight` [outputs, inputs] on its device.

    On a CPU in fp32 and bf16 that is the packed form, whatever the size: for 1024x3072 it is 1.1 to 3
    times as fast as F.linear. On a GPU in half precision few rows are multiplied by kernels of our own.
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
    """F.linear on a row-major weight."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight  # [outputs, inputs]
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)
