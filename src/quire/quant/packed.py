"""Products with an unquantised weight on a CPU.

The weight is repacked once into oneDNN's blocked layout. For few rows, Quire's C kernel reads that layout faster
than oneDNN does, and fuses the product with the operations around it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quire.kernels import Kernels
from quire.kernels.cpu.ops import (
    KINDS,
    LANES,
    CNorm,
    CProduct,
    CpuKernels,
    CWeight,
    PackedWeight,
    address,
    find_packed,
    half,
    norm_struct,
    pointer,
)
from quire.quant.base import FusingMatmul, Matmul, NormedProduct, PlainMatmul

# Up to this many rows, reading the weight dominates; above, oneDNN is faster.
FEW_ROWS = 8


def pack(weight: torch.Tensor, bias: torch.Tensor | None, kernels: Kernels | None) -> Matmul:
    """Return the product with `weight` [outputs, inputs] in fp32 or bf16."""
    if not can_pack():
        return PlainMatmul(weight, bias)
    many = PackedMatmul(weight, bias)
    if isinstance(kernels, CpuKernels) and (form := find_packed(many.weight, weight)):
        return FewRowsPackedMatmul(many, weight, form, kernels)
    return many


def padded_rows(rows: int) -> int:
    """Return the number of rows that oneDNN multiplies for `rows` rows; up to 2,048 there are about sixty such numbers.

    oneDNN generates code for each new number of rows. That takes longer than the product of a small model, and the
    code is never freed (half a MiB each, in addition to its cache of primitives).
    """
    step = 1 if rows <= FEW_ROWS else 16 if rows <= 640 else 64
    return -(-rows // step) * step


class PackedMatmul:
    """Product by oneDNN with a packed weight."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self.bias = bias
        self.multiply = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        if more := padded_rows(rows) - rows:
            x = F.pad(x, (0, 0, 0, more))
        return self.multiply(x, self.weight, self.bias, "none", [], "")[:rows]


class FewRowsPackedMatmul(FusingMatmul):
    """Product by the C kernel for few rows, and by oneDNN for more, from the same packed weight.

    The kernel sums each row in a fixed order, so a row's result does not depend on the number of rows.
    """

    def __init__(
        self, many: PackedMatmul, weight: torch.Tensor, form: PackedWeight, kernels: CpuKernels
    ) -> None:
        self.many, self.form, self.kernels = many, form, kernels
        self.outputs, self.inputs = weight.shape
        self.half = half(weight)
        self.fused_rows = FEW_ROWS
        self.plain = self.weight_struct(None, "")

    def weight_struct(self, norm: CNorm | None, kind: str) -> CWeight:
        """Describe the weight to the kernel, with a norm in front and an activation behind it."""
        return CWeight(
            self.form.address, pointer(self.many.bias), address(norm), self.inputs, self.form.padded, self.outputs,
            self.form.vectors, self.half, KINDS[kind],
        )  # fmt: skip

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        if not 0 < rows <= self.fused_rows:
            return self.many(x)
        y = x.new_empty(rows, self.outputs)
        self.run(self.plain, x.contiguous(), None, None, None, y)
        return y

    def run(
        self,
        weight: CWeight,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        total: torch.Tensor | None,
        add: torch.Tensor | None,
        y: torch.Tensor,
    ) -> None:
        """Launch `product` of step.c.

        Args:
            weight: the weight, with its norm and activation.
            x: [rows, inputs].
            residual: added to x before the norm.
            total: where the sum x + residual is written.
            add: added to the product.
            y: where the result is written.
        """
        arguments = CProduct(
            address(weight),
            x.data_ptr(),
            pointer(residual),
            pointer(add),
            pointer(total),
            y.data_ptr(),
            x.shape[0],
        )
        self.kernels.run(self.kernels.product, arguments, weight, x, residual, add, total, y)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(residual)
        self.run(self.plain, x.contiguous(), None, None, residual, y)
        return y

    def after_norm(self, norm: torch.Tensor, eps: float, kind: str | None) -> NormedProduct:
        return _FusedNormMatmul(self, norm, eps, kind)


class _FusedNormMatmul:
    """The result of `FusingMatmul.after_norm`."""

    def __init__(self, matmul: FewRowsPackedMatmul, norm: torch.Tensor, eps: float, kind: str | None) -> None:
        self.matmul, self.norm, self.kind = matmul, norm, kind
        self.gain = norm_struct(norm, None, eps)
        # The kernel applies the activation only if gate and up consist of whole blocks, which it pairs.
        gates = kind is not None and matmul.outputs // 2 % (matmul.form.vectors * LANES) == 0
        self.weight = matmul.weight_struct(self.gain, kind if kind and gates else "")
        self.width = matmul.outputs // 2 if gates else matmul.outputs
        self.separate_gate = kind is not None and not gates

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = x.contiguous(), x.new_empty(x.shape[0], self.width)
        total = x if residual is None else torch.empty_like(x)
        self.matmul.run(self.weight, x, residual, total, None, y)
        return (self.matmul.kernels.gated(y, self.kind) if self.separate_gate and self.kind else y), total


def can_pack() -> bool:
    """Return whether this build of PyTorch has oneDNN and the two operators, which are not a public interface."""
    try:
        return all((torch.ops.mkldnn._reorder_linear_weight, torch.ops.mkldnn._linear_pointwise))
    except AttributeError:
        return False
