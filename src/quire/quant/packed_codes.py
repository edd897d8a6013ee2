"""Products with quantised weights on a GPU.

Few rows are multiplied by a kernel that converts the weight in registers; the inputs are not rounded then, whatever the
format says. More rows of an FP8 weight are multiplied in FP8, with inputs rounded per row, or per 128 columns for a
weight in blocks: mostly by the library. The other formats unpack the weight to 16 bits for it. Import this module only if `quire.kernels.available` returns True.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quire.kernels.activation import gated
from quire.kernels.hopper import rows as hopper
from quire.kernels.hopper.choice import LEAST_ROWS, most_rows_for, variant_for, variants_for
from quire.kernels.jit import compiles_only
from quire.kernels.matmul.gemv import gemv, most_rows, norm_gemv
from quire.kernels.matmul.nibble_gemv import MOST_ROWS as NIBBLE_ROWS
from quire.kernels.matmul.nibble_gemv import nibble_gemv, takes_nibbles
from quire.kernels.matmul.nibble_rows import nibble_rows, takes_rows
from quire.kernels.matmul.packed import (
    MOST_TILES,
    PackedTensors,
    half_for,
    packed_product,
)
from quire.kernels.matmul.rescale import rescale
from quire.kernels.matmul.round_fp8 import norm_and_round, round_fp8
from quire.kernels.matmul.tiles import ANY_ROWS, NARROW_ROWS, rows_in_fp8, rows_in_registers
from quire.kernels.matmul.unpack import unpack
from quire.kernels.norm import add_rms_norm, rms_norm
from quire.kernels.target import target_of
from quire.layers.env import Env
from quire.quant.base import FusingMatmul, Matmul, NormedProduct, RoundedRows, ScaleOrder
from quire.quant.forms import Fp4Weight, Fp8Weight, Int8Weight, IntGroupWeight, QuantisedWeight
from quire.quant.kernel_order import KernelOrder

# Results up to which an FP8 product of the library is faster without scales, and a kernel behind it that applies them.
# Beyond, the library applies them, and sums up faster, with the 14 bits of Hopper's FP8 accumulators: on an H200, the
# four products of a layer of Llama-3.1-8B take 2,242 instead of 2,758 us for 7,168 rows.
_MOST_UNSCALED = 1 << 21


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
    product = PackedCodesMatmul(tensors, weight, bias, env.dtype)
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

    One or two rows are multiplied by kernels that fuse all operations around the product, if they take the weight. For
    more rows, the sum and the gate are computed in the kernel of the product or behind the library's, and the norm in
    front in the kernel that rounds the inputs.
    """

    def __init__(
        self, weight: PackedTensors, form: QuantisedWeight, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> None:
        self.order = KernelOrder.of(weight, form)
        self.weight, self.form, self.bias, self.dtype = self.order.ordered, form, bias, dtype
        self.numbers = weight.codes.view(torch.int8 if weight.format == "byte" else torch.float8_e4m3fn)
        self.rounding = form.rounding if isinstance(form, Fp8Weight) else "none"
        self.input_scale = form.input_scale if isinstance(form, Fp8Weight) else None
        self.by_group = weight.scale_rows > 1
        # The library wants the scales of blocks four inputs' blocks at a time.
        multiples = (128, 512) if self.by_group else (16, 128)
        # Weights with a part of a block of outputs are narrow, and faster unpacked than a few hundred rows at a time.
        is_whole = weight.outputs % multiples[0] == 0
        self.rounds = self.rounding != "none" and is_whole and target_of(weight.codes.device).capability >= 90
        self.narrow_rows = NARROW_ROWS if takes_rows(weight) else ANY_ROWS
        self.on_hopper = self._weight_on_hopper()
        self.most_in_registers = max(
            rows_in_registers(self.rounds, weight.outputs, takes_rows(weight)),
            0 if self.rounds else self._most_hopper_rows(None),
        )
        self.most_in_fp8 = rows_in_fp8(weight.inputs) if self.by_group else 0
        self.in_library = is_whole and weight.inputs % multiples[1] == 0
        # Beyond the kernels with an epilogue, the next norm adds the residual at less cost.
        self.gemv_rows = self._most_gemv_rows()
        most_in_kernels = max(self.most_in_registers, self.most_in_fp8)
        many_in_fp8 = self.rounds and self.in_library
        self.fused_rows = ANY_ROWS if many_in_fp8 else most_in_kernels
        # The library takes scales of rows with bf16 results only.
        takes_scales = many_in_fp8 and not self.by_group and dtype == torch.bfloat16
        self.most_unscaled = _MOST_UNSCALED // weight.outputs if takes_scales else ANY_ROWS
        self.added_rows = most_in_kernels if self.by_group else min(self.fused_rows, self.most_unscaled)
        if many_in_fp8 and (self.by_group or takes_scales):
            most_with_gate = self.most_in_fp8 if self.by_group else self.most_unscaled
            self.apart_rows = 1 + max(
                most_with_gate, most_rows_for("fp8", weight.outputs, weight.inputs, True)
            )
        if self.rounds:
            self.gated_rows = 1 + self.most_in_registers
        self.library_scale = weight.scale.mT
        self.row_scale = self.weight.scale.view(1, -1) if weight.group == 0 else self.weight.scale
        device = weight.codes.device
        self.arrived = torch.zeros(MOST_TILES, dtype=torch.int32, device=device)
        self.one = torch.ones((), device=device)

    def _most_gemv_rows(self) -> int:
        """Return the largest number of rows for `gemv`, which takes 8-bit numbers with scales per row or block."""
        w = self.weight
        if takes_nibbles(w):
            return NIBBLE_ROWS
        narrow = w.format == "byte" or target_of(w.codes.device).has_fp8
        if w.half or (w.group > 0 and not self.by_group) or not narrow or (self.by_group and w.outputs % 128):
            return 0
        return most_rows(w.inputs, 1)

    def rearrange(self) -> None:
        """Put codes and scales into the kernels' order, once the checkpoint is there."""
        self.order.fill()
        if self.on_hopper is not None and self.on_hopper.scale is not None:
            self.on_hopper.scale.copy_(self.weight.scale)

    def _weight_on_hopper(self) -> hopper.RowsWeight | None:
        """Return the weight for the kernel of 17 to 256 rows on Hopper, or None if it does not take it."""
        w = self.weight
        if w.format == "fp8" and self.rounds and w.group == 0 and hopper.takes(self.numbers):
            return hopper.RowsWeight(self.numbers, w.scale.float(), bias=self.bias)
        if w.format == "int4" and takes_rows(w) and w.half >= 64 and hopper.takes(w.codes):
            return hopper.RowsWeight(w.codes, w.scale.to(self.dtype), w.zero, self.bias)
        if w.format == "byte" and w.group == 0 and hopper.takes(self.numbers):
            return hopper.RowsWeight(self.numbers, w.scale.float(), bias=self.bias)
        return None

    def _most_hopper_rows(self, kind: str | None) -> int:
        if self.on_hopper is None:
            return 0
        w = self.weight
        return most_rows_for(self.on_hopper.format, w.outputs, w.inputs, kind is not None)

    def _suits_hopper(self, rows: int, kind: str | None) -> bool:
        """Return whether the kernel of Hopper multiplies so many rows, and is faster than the others."""
        least = self.most_in_registers + 1 if self.rounds else LEAST_ROWS
        return least <= rows <= self._most_hopper_rows(kind)

    def _multiply_on_hopper(
        self, x: torch.Tensor, scales: torch.Tensor | None, residual: torch.Tensor | None, kind: str | None
    ) -> torch.Tensor:
        w, rows = self.weight, x.shape[0]
        assert self.on_hopper is not None
        sizes = w.outputs, w.inputs, self.dtype, kind, target_of(x.device).sms, w.group, w.half or 128
        variant, split = variant_for(self.on_hopper.format, rows, *sizes)
        if compiles_only():  # of other numbers of rows too: compiling one between steps would take seconds
            for other in variants_for(self.on_hopper.format, *sizes):
                hopper.prepare(other, x.device)
        return hopper.rows_product(x, self.on_hopper, variant, split, scales, residual)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.multiply(x.contiguous())

    def multiply(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, kind: str | None = None
    ) -> torch.Tensor:
        """Return the product, then act(gate) * up with a `kind`, plus the residual [rows, outputs]."""
        rows = x.shape[0]
        if not rows:
            return x.new_empty(0, self.weight.outputs if kind is None else self.weight.outputs // 2)
        if rows <= self.gemv_rows and kind is None:
            if self.weight.half:
                return nibble_gemv(x, self.weight, self.bias, add=residual)[0]
            return gemv(x, self.numbers, self.bias, residual, self.weight.scale)
        if not self.rounds and self._suits_hopper(rows, kind):
            return self._multiply_on_hopper(x, None, residual, kind)
        if rows <= self.most_in_registers:
            product = nibble_rows if rows > self.narrow_rows else packed_product
            return product(x, self.weight, self.bias, self.arrived, add=residual, kind=kind)
        if self.rounds:
            codes, scales, _ = self._round(x)
            return self.multiply_rounded(codes, scales, x.dtype, residual, kind)
        y = F.linear(x, unpack(self.weight, x.dtype), self.bias)
        y = y if kind is None else gated(y, kind)
        return y if residual is None else y + residual

    def _round(
        self,
        x: torch.Tensor,
        *,
        kind: str | None = None,
        norm: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return `round_fp8` of x, with its scales in the order of the product with so many rows."""
        return round_fp8(
            x,
            self.by_group,
            self.input_scale,
            kind=kind,
            norm=norm,
            residual=residual,
            eps=eps,
            by_column=self.scale_order(x.shape[0]) == "columns",
        )

    def scale_order(self, rows: int) -> ScaleOrder | None:
        if (
            not (self.rounds and self.by_group)
            or self.input_scale is not None
            or rows <= self.most_in_registers
        ):
            return None
        return "columns" if self.in_library and rows > self.most_in_fp8 else "rows"

    def of_rounded(self, x: RoundedRows, residual: torch.Tensor | None = None) -> torch.Tensor:
        return self.multiply_rounded(x.codes, x.scales, x.dtype, residual)

    def norm_and_round(
        self, x: torch.Tensor, residual: torch.Tensor | None, norm: torch.Tensor, eps: float
    ) -> tuple[RoundedRows, torch.Tensor, torch.Tensor]:
        by_column = self.scale_order(x.shape[0]) == "columns"
        codes, scales, total, normed = norm_and_round(x, residual, norm, eps, self.by_group, by_column)
        return RoundedRows(codes, scales, x.dtype), normed, total

    def multiply_rounded(
        self,
        codes: torch.Tensor,
        scales: torch.Tensor,
        dtype: torch.dtype,
        residual: torch.Tensor | None = None,
        kind: str | None = None,
    ) -> torch.Tensor:
        """Return `multiply` of rounded inputs.

        Args:
            codes: e4m3 [rows, inputs].
            scales: fp32 [rows, 1], or [rows, inputs / 128] for a weight in blocks.
            dtype: of the result.
            residual, kind: as for `multiply`.
        """
        w = self.weight
        if self._suits_hopper(codes.shape[0], kind):
            return self._multiply_on_hopper(codes, scales, residual, kind)
        if codes.shape[0] <= self.most_in_fp8 or not self.in_library:
            return packed_product(
                codes.view(torch.uint8),
                w,
                self.bias,
                self.arrived,
                add=residual,
                kind=kind,
                x_scale=scales,
                dtype=dtype,
            )
        numbers = self.numbers.t()
        if self.by_group:
            y = self._multiply_blocks(codes, scales, dtype)
            y = y if self.bias is None else y + self.bias
        elif codes.shape[0] <= self.most_unscaled:
            sums = torch._scaled_mm(codes, numbers, self.one, self.one, out_dtype=torch.bfloat16)
            return rescale(sums, scales, w.scale, self.bias, residual, kind, dtype)
        else:
            y = torch._scaled_mm(
                codes, numbers, scales, self.row_scale, self.bias, out_dtype=dtype, use_fast_accum=True
            )
        y = y if kind is None else gated(y, kind)
        return y if residual is None else y + residual

    def _multiply_blocks(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the library's product with scales of blocks, which takes multiples of four rows only."""
        from torch.nn.functional import ScalingType, scaled_mm

        rows = codes.shape[0]
        if surplus := -rows % 4:
            codes = F.pad(codes.view(torch.uint8), (0, 0, 0, surplus)).view(codes.dtype)
            scales = F.pad(scales, (0, 0, 0, surplus))
        return scaled_mm(
            codes, self.numbers.t(), scales.t().contiguous().t(), ScalingType.BlockWise1x128, self.library_scale,
            ScalingType.BlockWise128x128, output_dtype=dtype,
        )[:rows]  # fmt: skip

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self.multiply(x.contiguous(), residual)

    def of_gated(self, gate_up: torch.Tensor, kind: str, residual: torch.Tensor | None) -> torch.Tensor:
        codes, scales, _ = self._round(gate_up, kind=kind)
        return self.multiply_rounded(codes, scales, gate_up.dtype, residual)

    def after_norm(self, norm: torch.Tensor, eps: float, kind: str | None) -> NormedProduct:
        def product(x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
            if x.shape[0] <= self.gemv_rows and self.weight.half:
                return nibble_gemv(
                    x, self.weight, self.bias, residual=residual, norm=norm, eps=eps, kind=kind
                )
            if x.shape[0] <= self.gemv_rows:
                return norm_gemv(x, residual, norm, eps, self.numbers, self.bias, kind, self.weight.scale)
            if self.rounds and x.shape[0] > self.most_in_registers:
                codes, scales, total = self._round(x, norm=norm, residual=residual, eps=eps)
                return self.multiply_rounded(codes, scales, x.dtype, None, kind), total
            if residual is None:
                normed, total = rms_norm(x, norm, eps), x
            else:
                normed, total = add_rms_norm(x, residual, norm, eps)
            return self.multiply(normed, None, kind), total

        return product


class PermutedInputs:
    """A product whose inputs are first put into the order of the weight's columns."""

    def __init__(self, product: Matmul, permutation: torch.Tensor) -> None:
        self.product, self.permutation = product, permutation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x.index_select(-1, self.permutation))
