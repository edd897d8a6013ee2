"""The two ends of each half of a decoder layer: `NormedLayer` in front, `ResidualAdd` at the end.

The residual stream is passed on as (x, residual), which stands for x + residual: the next norm adds the two. A
residual of None means that there is nothing to add.

For few rows, one kernel can fuse a product with the norm in front, the activation of a gated MLP, and the addition
(kernels/matmul/gemv.py on a GPU, quant/packed.py on a CPU). In all other cases these classes run the operations one
after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from quire.layers.activation import FUSED_ACTIVATIONS
from quire.layers.linear import Linear
from quire.layers.mlp import GatedMLP
from quire.layers.moe import MoE
from quire.layers.norm import RMSNorm
from quire.quant.base import NEVER, FusingMatmul, RoundedRows, ScaleOrder
from quire.quant.loading import ConcatenatedMatmul

Stream = tuple[torch.Tensor, torch.Tensor | None]


class ResidualNorm(Protocol):
    """A norm that maps x and residual to the normed sum and the sum."""

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class ResidualAdd:
    """A linear layer at the end: returns (linear(x), residual), or their sum and None if they can be fused.

    Pass `adds` False if linear(x) is processed further before the addition.
    """

    def __init__(self, linear: Linear, adds: bool = True) -> None:
        self.linear = linear
        self.product = fusing_matmul(linear)
        self.matmul = self.product if adds else None

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None) -> Stream:
        if self.matmul is not None and residual is not None and x.shape[0] <= self.matmul.added_rows:
            return self.matmul.add(x, residual), None
        return self.linear(x), residual

    def scale_order(self, rows: int) -> ScaleOrder | None:
        """Return the order of scales of inputs that may be rounded in front; None if they may not."""
        return None if self.product is None else self.product.scale_order(rows)

    def of_rounded(self, x: RoundedRows, residual: torch.Tensor | None) -> Stream:
        """Return the layer of rounded rows, whose number has a `scale_order`."""
        assert self.product is not None
        if self.matmul is not None and residual is not None and len(x.codes) <= self.matmul.added_rows:
            return self.product.of_rounded(x, residual), None
        return self.product.of_rounded(x), residual

    def of_gated(self, gate_up: torch.Tensor, kind: str, residual: torch.Tensor) -> Stream:
        """Return the layer of kind(gate) * up, for at least `gated_rows` rows of its product."""
        assert self.product is not None
        if self.matmul is not None and gate_up.shape[0] <= self.matmul.added_rows:
            return self.product.of_gated(gate_up, kind, residual), None
        return self.product.of_gated(gate_up, kind, None), residual


class FusedMLP:
    """A norm and a gated MLP: the activation is fused with the product in front, or with the one behind for many rows."""

    def __init__(self, norm: RMSNorm, mlp: GatedMLP, adds: bool) -> None:
        """Fuse the layers, whose `gate_up` is a product that can be fused. For `adds` see `ResidualAdd`."""
        product = fusing_matmul(mlp.gate_up)
        assert product is not None
        self.kind, self.down = mlp.kind, ResidualAdd(mlp.down, adds)
        self.gated = product.after_norm(norm.weight, norm.eps, mlp.kind)
        self.apart = product.after_norm(norm.weight, norm.eps, None)
        behind = self.down.product
        self.apart_rows = NEVER if behind is None else max(product.apart_rows, behind.gated_rows)
        self.rows = product.fused_rows

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None) -> Stream:
        if x.shape[0] < self.apart_rows:
            return self.down(*self.gated(x, residual))
        gate_up, total = self.apart(x, residual)
        return self.down.of_gated(gate_up, self.kind, total)


class NormedLayer:
    """A norm and the layer behind it: returns layer(norm(x + residual)) and the sum, which is the next residual.

    With `adds`, a gated MLP ends with a `ResidualAdd`; other layers never do.
    """

    def __init__(
        self, norm: ResidualNorm, layer: Callable[[torch.Tensor], torch.Tensor], adds: bool = False
    ) -> None:
        self.norm, self.layer = norm, layer
        self.fused, self.fused_rows = _fuse(norm, layer, adds) or (self.separate, 0)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None) -> Stream:
        return (self.fused if x.shape[0] <= self.fused_rows else self.separate)(x, residual)

    def separate(self, x: torch.Tensor, residual: torch.Tensor | None) -> Stream:
        """Run the norm and then the layer."""
        x, residual = self.norm(x, residual)
        return self.layer(x), residual


class SplitProjection:
    """A norm and a linear layer with several results: returns tensors [tokens, size] and the next residual."""

    def __init__(self, norm: ResidualNorm, linear: Linear, sizes: list[int]) -> None:
        self.normed, self.linear, self.sizes = NormedLayer(norm, linear), linear, sizes
        self.rms = norm if isinstance(norm, RMSNorm) and norm.fuses else None
        self.products = linear.multiply if isinstance(linear.multiply, ConcatenatedMatmul) else None

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[Sequence[torch.Tensor], torch.Tensor | None]:
        if x.shape[0] <= self.normed.fused_rows:
            whole, residual = self.normed.fused(x, residual)
            return whole.split(self.sizes, 1), residual
        if self.rms is not None and self.products is not None and self.products.rounding(x.shape[0]):
            return self.products.split_normed(x, residual, self.rms.weight, self.rms.eps, self.sizes)
        x, residual = self.normed.norm(x, residual)
        return self.linear.split(x, self.sizes), residual


def _fuse(
    norm: ResidualNorm, layer: Callable[[torch.Tensor], torch.Tensor], adds: bool
) -> tuple[Callable[[torch.Tensor, torch.Tensor | None], Stream], int] | None:
    """Return the fused norm and layer, and its largest number of rows; None if they cannot be fused."""
    if not isinstance(norm, RMSNorm) or not norm.fuses:
        return None
    if isinstance(layer, GatedMLP):
        if fusing_matmul(layer.gate_up) is None or layer.kind not in FUSED_ACTIVATIONS:
            return None
        mlp = FusedMLP(norm, layer, adds)
        return mlp, mlp.rows
    if isinstance(layer, MoE):
        return layer.after_norm(norm.weight, norm.eps)
    matmul = fusing_matmul(layer)
    return None if matmul is None else (matmul.after_norm(norm.weight, norm.eps, None), matmul.fused_rows)


def fusing_matmul(layer: object) -> FusingMatmul | None:
    """Return the layer's product if the layer consists of it alone and it can be fused with its neighbours."""
    if not isinstance(layer, Linear) or layer.needs_reduce or not isinstance(layer.multiply, FusingMatmul):
        return None
    return layer.multiply
