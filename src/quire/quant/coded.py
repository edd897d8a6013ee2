"""Products with integer and 4-bit float weights on a CPU, by the C kernels of quantised.c.

The weight is packed once into the kernels' layout. Up to 8 rows, a kernel reads it at the speed of memory and rounds
the inputs to 8 bits: per row if the format rounds activations (`token`), else per 32 inputs of a row. More rows of a
format that rounds are multiplied in 8 bits too. For the other formats, the weight is then unpacked to bf16 block by
block, if the model runs in bf16 and the processor has AMX.
"""

from __future__ import annotations

import ctypes

import torch

from quire.kernels.cpu.codes import (
    MOST_INPUTS,
    CCodedProduct,
    CCodedWeight,
    CodedFunctions,
    CodedWeight,
    can_pack_codes,
    pack_codes,
)
from quire.kernels.cpu.ops import KINDS, LANES, CNorm, CpuKernels, address, pointer
from quire.layers.env import Env
from quire.quant.base import Matmul
from quire.quant.c_matmul import CFusingMatmul
from quire.quant.forms import Fp4Weight, Int8Weight, IntGroupWeight, QuantisedWeight, unpack4

_ROWS_OF_TILES = 32  # rows that quantised.c multiplies at once


def coded_product(env: Env, weight: QuantisedWeight, bias: torch.Tensor | None) -> Matmul | None:
    """Return the product with a weight on a CPU that has the C kernels, or None if they do not take it."""
    if not isinstance(env.kernels, CpuKernels):
        return None
    packed = pack_weight(weight)
    if packed is None:
        return None
    product = CodedMatmul(packed, bias, env.dtype, env.kernels)
    if isinstance(weight, IntGroupWeight) and weight.permutation is not None:
        return PermutedMatmul(product, weight.permutation)
    return product


def pack_weight(weight: QuantisedWeight) -> CodedWeight | None:
    """Pack a weight for the C kernels, or return None if they do not take its form."""
    if len(weight.shape) != 2:
        return None
    inputs = weight.shape[1]
    if isinstance(weight, Int8Weight):
        codes = weight.weight.view(torch.uint8) ^ 128
        if weight.rounding == "token":
            return (
                pack_codes(codes, weight.scale, None, 8, 128, per_row=True) if inputs <= MOST_INPUTS else None
            )
        group = next((size for size in (128, 64, 32) if inputs % size == 0), 0)
        if not group:
            return None
        return pack_codes(codes, weight.scale.expand(-1, inputs // group), None, 8, 128)
    if not isinstance(weight, IntGroupWeight | Fp4Weight):
        return None
    group, scale = weight.group_size, weight.scale.float()
    if group == inputs and group > 128:  # one scale per row: any groups will do
        group = next((size for size in (128, 64, 32) if inputs % size == 0), group)
    if not can_pack_codes(group, inputs):
        return None
    groups = inputs // group
    if isinstance(weight, Fp4Weight):
        if weight.global_scale is None:
            scale = (weight.scale.int() << 23).view(torch.float32)
        else:
            scale = scale * weight.global_scale
        return pack_codes(unpack4(weight.packed), scale.expand(-1, groups), None, 4, e2m1=True)
    codes = unpack4(weight.packed) if weight.bits == 4 else weight.packed
    offset = None
    if weight.offset is not None:
        offset = -weight.offset.float()
    elif weight.zero is not None:
        offset = weight.zero.float() * scale
    return pack_codes(
        codes, scale.expand(-1, groups), None if offset is None else offset.expand(-1, groups), weight.bits,
        1 << weight.bits - 1,
    )  # fmt: skip


class CodedMatmul(CFusingMatmul):
    """x W^T + b for a weight of 4 or 8 bits.

    Every row is rounded and summed on its own in a fixed order, so the result of a row depends on the other rows only
    in that more than 8 take the kernels for many rows. In fp32 it does not even depend on that.
    """

    def __init__(
        self, weight: CodedWeight, bias: torch.Tensor | None, dtype: torch.dtype, kernels: CpuKernels
    ) -> None:
        self.weight, self.bias, self.half = weight, bias, int(dtype == torch.bfloat16)
        self.functions = CodedFunctions(kernels)
        super().__init__(kernels, weight.outputs, LANES)
        self.bytes_per_row = self.functions.many_rows_bytes(address(self.plain))

    def weight_struct(self, norm: CNorm | None, kind: str) -> CCodedWeight:
        w = self.weight
        return CCodedWeight(
            w.codes.data_ptr(), pointer(w.scales), pointer(w.offsets), w.factors.data_ptr(), pointer(self.bias),
            address(norm), w.inputs, w.padded, w.outputs, w.group, w.unit, w.bits, w.table, w.zero, self.half,
            KINDS[kind],
        )  # fmt: skip

    def many(self, x: torch.Tensor) -> torch.Tensor:
        x, rows = x.contiguous(), x.shape[0]
        y = x.new_empty(rows, self.outputs)
        if rows:
            whole = -(-rows // _ROWS_OF_TILES) * _ROWS_OF_TILES
            rounded = torch.empty(whole * self.bytes_per_row, dtype=torch.uint8)
            arguments = CCodedProduct(
                address(self.plain), x.data_ptr(), None, None, None, y.data_ptr(), rounded.data_ptr(), rows
            )
            self.kernels.run(self.functions.many, arguments, self.plain, x, y, rounded)
        return y

    def run(
        self,
        weight: ctypes.Structure,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        total: torch.Tensor | None,
        add: torch.Tensor | None,
        y: torch.Tensor,
    ) -> None:
        arguments = CCodedProduct(
            address(weight), x.data_ptr(), pointer(residual), pointer(add), pointer(total), y.data_ptr(), None,
            x.shape[0],
        )  # fmt: skip
        self.kernels.run(self.functions.few, arguments, weight, x, residual, add, total, y)


class PermutedMatmul:
    """A product whose inputs are first put into the order of the weight's columns."""

    def __init__(self, product: Matmul, permutation: torch.Tensor) -> None:
        self.product, self.permutation = product, permutation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x.index_select(-1, self.permutation))
