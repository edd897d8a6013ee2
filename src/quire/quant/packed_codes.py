"""Products with quantised weights on a GPU.

Few rows are multiplied by a kernel that converts the weight in registers and is limited only by reading it; the inputs
are not rounded then, whatever the format says. More rows of an FP8 weight are multiplied in FP8, with inputs rounded
per row, or per 128 columns for a weight in blocks. Prompts take the library's FP8 product; the other formats unpack the
weight to 16 bits for it. Import this module only if `quire.kernels.available` returns True.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from quire.kernels.matmul.packed import (
    MOST_TILES,
    PackedTensors,
    half_for,
    packed_product,
    reorder_nibbles,
)
from quire.kernels.matmul.round_fp8 import round_fp8
from quire.kernels.matmul.tiles import fused_rows, rows_in_fp8, rows_in_registers
from quire.kernels.matmul.unpack import unpack
from quire.kernels.target import target_of
from quire.layers.env import Env
from quire.quant.base import FusingMatmul, Matmul, NormedProduct
from quire.quant.forms import Fp4Weight, Fp8Weight, Int8Weight, IntGroupWeight, QuantisedWeight


def packed_codes_product(env: Env, weight: QuantisedWeight, bias: torch.Tensor | None) -> Matmul | None:
    """Return the product with a weight on a GPU that runs the kernels, or None if they do not take it."""
    half = env.dtype in (torch.bfloat16, torch.float16)
    if not half or torch.version.hip or not target_of(env.device).has_matrix_units:  # the kernels contain PTX
        return None
    return make_packed_codes(env, weight, bias)


def make_packed_codes(env: Env, weight: QuantisedWeight, bias: torch.Tensor | None) -> Matmul | None:
    """Return the product with a weight that the kernels take; None for others."""
    tensors = packed_tensors(weight)
    if tensors is None:
        return None
    product = PackedCodesMatmul(tensors, weight, bias)
    env.weights.when_loaded(product.rearrange)
    permutation = weight.permutation if isinstance(weight, IntGroupWeight) else None
    return product if permutation is None else PermutedInputs(product, permutation)


def packed_tensors(weight: QuantisedWeight) -> PackedTensors | None:
    """Describe the weight to the kernels; its nibbles and scales may not be in their order yet.

    Return None for what the kernels do not take: stacks of experts, and groups that do not fit.
    """
    if len(weight.shape) != 2 or weight.shape[1] % 16:
        return None
    inputs = weight.shape[1]
    if isinstance(weight, Fp8Weight):
        group, rows = (128, 128) if weight.by_block else (0, 1)
        return PackedTensors("fp8", weight.weight.view(torch.uint8), inputs, weight.scale, group, rows)
    if isinstance(weight, Int8Weight):
        return PackedTensors("byte", weight.weight.view(torch.uint8), inputs, weight.scale, 0)
    if not isinstance(weight, IntGroupWeight | Fp4Weight):
        return None
    group = weight.group_size
    if isinstance(weight, IntGroupWeight) and weight.bits == 8:
        if group < 16 or (group & group - 1 and group % 128):
            return None
        return PackedTensors(
            "byte", weight.packed, inputs, weight.scale, group, 1, weight.zero, weight.offset
        )
    half = half_for(group, inputs)
    if not half:
        return None
    if isinstance(weight, Fp4Weight):
        factor = None if weight.global_scale is None else weight.global_scale.view(-1)
        return PackedTensors("fp4", weight.packed, inputs, weight.scale, group, factor=factor, half=half)
    return PackedTensors(
        "int4", weight.packed, inputs, weight.scale, group, 1, weight.zero, weight.offset, half=half
    )


class PackedCodesMatmul(FusingMatmul):
    """x W^T + b with a quantised W.

    For a step of few rows, the factor of a fused norm multiplies the sums instead of the inputs. So a result may differ
    from the separate operations by the rounding of the normed inputs.
    """

    def __init__(self, weight: PackedTensors, form: QuantisedWeight, bias: torch.Tensor | None) -> None:
        self.weight, self.form, self.bias = weight, form, bias
        self.fused_rows = fused_rows(weight.format)
        self.most_in_registers = rows_in_registers(weight.format, weight.outputs, weight.inputs)
        rounds = isinstance(form, Fp8Weight) and form.rounding != "none"
        target = target_of(weight.codes.device)
        self.input_scale = form.input_scale if isinstance(form, Fp8Weight) else None
        self.by_group = weight.scale_rows > 1
        self.most_in_fp8 = (
            rows_in_fp8(weight.outputs, weight.inputs) if rounds and target.capability >= 90 else 0
        )
        self.in_library = self.most_in_fp8 > 0 and weight.inputs % 128 == 0
        self.in_library &= weight.outputs % (128 if self.by_group else 16) == 0
        self.arrived = torch.zeros(MOST_TILES, dtype=torch.int32, device=weight.codes.device)

    def rearrange(self) -> None:
        """Put codes and scales into the kernels' order, once the checkpoint is there."""
        w = self.weight
        scale, zero, offset = w.scale, w.zero, w.offset
        if w.half:
            w.codes.copy_(reorder_nibbles(w.codes, w.half))
        elif isinstance(self.form, IntGroupWeight):  # unsigned codes become signed, and zeros offsets
            w.codes.bitwise_xor_(128)
            if offset is not None:
                offset = offset.float() + 128 * scale.float()
            elif zero is not None:
                offset, zero = scale.float() * (128 - zero.float()), None
        if scale.dtype == torch.float8_e4m3fn:
            scale = scale.bfloat16()
        scale = scale.reshape(-1) if w.group == 0 else scale.t().contiguous()
        self.weight = replace(
            w, scale=scale, zero=None if zero is None else zero.t().contiguous(),
            offset=None if offset is None else offset.t().contiguous(),
        )  # fmt: skip
        if self.in_library and self.by_group:
            self.library_scale = scale.t().contiguous().t()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        x = x.contiguous()
        if not rows:
            return x.new_empty(0, self.weight.outputs)
        if rows <= self.most_in_registers:
            return packed_product(x, self.weight, self.bias, self.arrived)[0]
        if not self.most_in_fp8:
            return F.linear(x, unpack(self.weight, x.dtype), self.bias)
        codes, scales, _ = round_fp8(x, self.by_group, self.input_scale)
        if rows <= self.most_in_fp8 or not self.in_library:
            return packed_product(
                codes.view(torch.uint8), self.weight, self.bias, self.arrived, x_scale=scales, dtype=x.dtype
            )[0]
        return self._in_library(codes, scales, x.dtype)

    def _in_library(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the product by the library's FP8 kernels."""
        w = self.weight
        numbers = w.codes.view(torch.float8_e4m3fn).t()
        if self.by_group:
            from torch.nn.functional import ScalingType, scaled_mm

            y = scaled_mm(
                codes, numbers, scales.t().contiguous().t(), ScalingType.BlockWise1x128, self.library_scale,
                ScalingType.BlockWise128x128, output_dtype=dtype,
            )  # fmt: skip
        else:
            y = torch._scaled_mm(codes, numbers, scales, w.scale.view(1, -1), out_dtype=dtype)
        return y if self.bias is None else y + self.bias

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return packed_product(x.contiguous(), self.weight, self.bias, self.arrived, add=residual)[0]

    def after_norm(self, norm: torch.Tensor, eps: float, kind: str | None) -> NormedProduct:
        def product(x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
            return packed_product(
                x, self.weight, self.bias, self.arrived, residual=residual, norm=norm, eps=eps, kind=kind
            )

        return product


class PermutedInputs:
    """A product whose inputs are first put into the order of the weight's columns."""

    def __init__(self, product: Matmul, permutation: torch.Tensor) -> None:
        self.product, self.permutation = product, permutation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x.index_select(-1, self.permutation))
