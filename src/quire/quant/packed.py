"""Products with an unquantised weight on a CPU.

The weight is repacked once into oneDNN's blocked layout. For few rows, Quire's C kernel reads that layout faster
than oneDNN does, and fuses the product with the operations around it.
"""

from __future__ import annotations

import ctypes

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
    pointer,
)
from quire.quant.base import Matmul, PlainMatmul
from quire.quant.c_matmul import FEW_ROWS, CFusingMatmul


def pack(weight: torch.Tensor, bias: torch.Tensor | None, kernels: Kernels | None) -> Matmul:
    """Return the product with `weight` [outputs, inputs] in fp32 or bf16."""
    if not can_pack(weight.dtype):
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


class FewRowsPackedMatmul(CFusingMatmul):
    """Product by the C kernel for few rows, and by oneDNN for more, from the same packed weight.

    The kernel sums each row in a fixed order, so a row's result does not depend on the number of rows.
    """

    def __init__(
        self, many: PackedMatmul, weight: torch.Tensor, form: PackedWeight, kernels: CpuKernels
    ) -> None:
        self.many_rows, self.form, self.half = many, form, half(weight)
        self.inputs = weight.shape[1]
        super().__init__(kernels, weight.shape[0], form.vectors * LANES)

    def weight_struct(self, norm: CNorm | None, kind: str) -> CWeight:
        return CWeight(
            self.form.address, pointer(self.many_rows.bias), address(norm), self.inputs, self.form.padded,
            self.outputs, self.form.vectors, self.half, KINDS[kind],
        )  # fmt: skip

    def many(self, x: torch.Tensor) -> torch.Tensor:
        return self.many_rows(x)

    def run(
        self,
        weight: ctypes.Structure,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        total: torch.Tensor | None,
        add: torch.Tensor | None,
        y: torch.Tensor,
    ) -> None:
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


def can_pack(dtype: torch.dtype = torch.float32) -> bool:
    """Return whether oneDNN multiplies weights of `dtype` here.

    This build of PyTorch may lack oneDNN or the operators, which are not a public interface, and a processor without
    AVX-512 has no products of bf16.
    """
    try:
        mkldnn = torch.ops.mkldnn
        has_all = all((mkldnn._reorder_linear_weight, mkldnn._linear_pointwise))
        return has_all and (dtype != torch.bfloat16 or bool(mkldnn._is_mkldnn_bf16_supported()))
    except AttributeError:
        return False
