"""Products with an unquantised weight on a GPU.

Few rows are multiplied by kernels that are limited only by reading the weight from memory, more rows by F.linear.
Import this module only if `quire.kernels.available` returns True.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quire.kernels.activation import gated
from quire.kernels.hopper import rows as hopper
from quire.kernels.hopper.choice import LEAST_ROWS, most_rows_for, variant_for
from quire.kernels.matmul.gemv import gemv, norm_gemv
from quire.kernels.matmul.gemv import most_rows as most_gemv_rows
from quire.kernels.matmul.skinny import BLOCK_N, MOST_ROWS, is_small, skinny, small_weight_product
from quire.kernels.norm import add_rms_norm, rms_norm
from quire.kernels.target import log_choice, target_of
from quire.quant.base import FusingMatmul, NormedProduct


class FewRowsMatmul(FusingMatmul):
    """x W^T + b for 16-bit weights, with kernels for few rows."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight, self.bias = weight, bias  # [outputs, inputs]
        self.gemv_rows = most_gemv_rows(weight.shape[1])
        self.most_rows = MOST_ROWS
        target = target_of(weight.device)
        self.sms = target.sms
        if not target.has_matrix_units:
            log_choice(
                f"products of few rows by PyTorch, because Triton does not use the matrix units of {target}"
            )
            self.most_rows = self.gemv_rows
        self.is_small = is_small(weight)
        tiles = -(-weight.shape[0] // BLOCK_N)
        self.arrived = torch.zeros(tiles, dtype=torch.int32, device=weight.device)  # all 0 between launches
        self.on_hopper = hopper.RowsWeight(weight, bias=bias) if hopper.takes(weight) else None
        self.added_rows = self.gemv_rows
        # Between the rows of `gemv` and of the kernel for Hopper, fused and separate operations are equally fast.
        self.fused_rows = self._most_hopper_rows(True) or self.gemv_rows

    @staticmethod
    def takes(weight: torch.Tensor) -> bool:
        """Return whether rows of `weight` can be read 16 bytes at a time."""
        half = weight.dtype in (torch.bfloat16, torch.float16)
        return half and weight.shape[1] % 16 == 0 and weight.is_contiguous()

    def _most_hopper_rows(self, gated: bool) -> int:
        outputs, inputs = self.weight.shape
        return most_rows_for("half", outputs, inputs, gated) if self.on_hopper else 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        if not x.is_contiguous():
            return F.linear(x, self.weight, self.bias)
        if LEAST_ROWS <= rows <= self._most_hopper_rows(False):
            return self._multiply_on_hopper(x)
        if not 0 < rows <= self.most_rows:
            return F.linear(x, self.weight, self.bias)
        if rows <= self.gemv_rows:
            return gemv(x, self.weight, self.bias)
        if self.is_small:
            return small_weight_product(x, self.weight, self.bias)
        return skinny(x, self.weight, self.bias, self.arrived)

    def _multiply_on_hopper(self, x: torch.Tensor, kind: str | None = None) -> torch.Tensor:
        assert self.on_hopper is not None
        outputs, inputs = self.weight.shape
        variant, split = variant_for("half", x.shape[0], outputs, inputs, x.dtype, kind, self.sms)
        return hopper.rows_product(x, self.on_hopper, variant, split)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return gemv(x, self.weight, self.bias, residual)

    def after_norm(self, norm: torch.Tensor, eps: float, kind: str | None) -> NormedProduct:
        def product(x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
            if 0 < x.shape[0] <= self.gemv_rows:
                return norm_gemv(x, residual, norm, eps, self.weight, self.bias, kind)
            if residual is None:
                normed, total = rms_norm(x, norm, eps), x
            else:
                normed, total = add_rms_norm(x, residual, norm, eps)
            if kind is None:
                return self(normed), total
            if LEAST_ROWS <= x.shape[0] <= self._most_hopper_rows(True):
                return self._multiply_on_hopper(normed, kind=kind), total
            return gated(self(normed), kind), total

        return product
