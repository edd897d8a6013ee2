"""Layers between their norm and the residual stream: `NormedLayer` in front of a half of a layer, `ResidualAdd` at its end.

The stream is handed on as (x, residual), which stands for x + residual: the norm that comes next adds them.
A residual of None stands for nothing to add. For few rows on a GPU a product can take in what surrounds it,
the norm, the activation of a gated MLP, the addition (kernels/matmul/gemv.py); for all else these are compositions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from quire.layers.linear import Linear
from quire.layers.mlp import GatedMLP
from quire.layers.norm import RMSNorm
from quire.quant.base import FusingMatmul

Stream = tuple[torch.Tensor, torch.Tensor | None]


class ResidualNorm(Protocol):
    """x, residual -> the normed sum, and the sum."""

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class ResidualAdd:
    """x, residual -> linear(x) beside the residual, or their sum and None.

    `adds` is false where something else is still to be done to linear(x) alone.
    """

    def __init__(self, linear: Linear, adds: bool = True) -> None:
        self.linear = linear
        self.matmul = _fusing(linear) if adds else None

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None) -> Stream:
        if self.matmul is not None and residual is not None and x.shape[0] <= self.matmul.fused_rows:
            return self.matmul.add(x, residual), None
        return self.linear(x), residual


class NormedLayer:
    """x, residual -> layer(norm(x + residual)) beside that sum, which is the next residual.

    A gated MLP ends like an `ResidualAdd`, if it `adds`; of other layers nothing is known.
    """

    def __init__(
        self, norm: ResidualNorm, layer: Callable[[torch.Tensor], torch.Tensor], adds: bool = False
    ) -> None:
        self.norm, self.layer = norm, layer
        self.few, self.few_rows = _join(norm, layer, adds) or (self.apart, 0)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None) -> Stream:
        return (self.few if x.shape[0] <= self.few_rows else self.apart)(x, residual)

    def apart(self, x: torch.Tensor, residual: torch.Tensor | None) -> Stream:
        x, residual = self.norm(x, residual)
        return self.layer(x), residual


def _join(
    norm: ResidualNorm, layer: Callable[[torch.Tensor], torch.Tensor], adds: bool
) -> tuple[Callable[[torch.Tensor, torch.Tensor | None], Stream], int] | None:
    """The layer with its norm taken in, and for how many rows; None where that is not to be had."""
    if not isinstance(norm, RMSNorm):
        return None
    if isinstance(layer, GatedMLP):
        matmul = _fusing(layer.gate_up)
        if matmul is None:
            return None
        inner, down = matmul.after_norm(norm.weight, norm.eps, layer.kind), ResidualAdd(layer.down, adds)
        return (lambda x, residual: down(*inner(x, residual))), matmul.fused_rows
    matmul = _fusing(layer)
    return None if matmul is None else (matmul.after_norm(norm.weight, norm.eps, None), matmul.fused_rows)


def _fusing(layer: object) -> FusingMatmul | None:
    """The product that is all of the layer and can take in what surrounds it, if there is one."""
    if not isinstance(layer, Linear) or layer.sums or not isinstance(layer.multiply, FusingMatmul):
        return None
    return layer.multiply
