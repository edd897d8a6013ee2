"""Products with an unquantised weight on a GPU.

Few rows are multiplied by kernels that are limited only by reading the weight from memory, more rows by F.linear.
Import this module only if `quire.kernels.available` returns True.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quire.kernels.matmul.gemv import gemv, most_rows, norm_gemv
from quire.kernels.matmul.skinny import BLOCK_N, MOST_ROWS, is_small, skinny, whole
from quire.kernels.target import log_choice, target_of
from quire.quant.base import FusingMatmul, NormedProduct


class FewRowsMatmul(FusingMatmul):
    """x W^T + b for 16-bit weights, with kernels for few rows."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight, self.bias = weight, bias  # [outputs, inputs]
        self.fused_rows = most_rows(weight.shape[1])
        self.most_rows = MOST_ROWS
        target = target_of(weight.device)
        if not target.has_matrix_units:
            log_choice(
                f"products of few rows by PyTorch, because Triton does not use the matrix units of {target}"
            )
            self.most_rows = self.fused_rows
        self.is_small = is_small(weight)
        tiles = -(-weight.shape[0] // BLOCK_N)
        self.arrived = torch.zeros(tiles, dtype=torch.int32, device=weight.device)  # all 0 between launches

    @staticmethod
    def takes(weight: torch.Tensor) -> bool:
        """Return whether rows of `weight` can be read 16 bytes at a time."""
        half = weight.dtype in (torch.bfloat16, torch.float16)
        return half and weight.shape[1] % 16 == 0 and weight.is_contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        if not 0 < rows <= self.most_rows or not x.is_contiguous():
            return F.linear(x, self.weight, self.bias)
        if rows <= self.fused_rows:
            return gemv(x, self.weight, self.bias)
        if self.is_small:
            return whole(x, self.weight, self.bias)
        return skinny(x, self.weight, self.bias, self.arrived)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return gemv(x, self.weight, self.bias, residual)

    def after_norm(self, norm: torch.Tensor, eps: float, kind: str | None) -> NormedProduct:
        def product(x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
            return norm_gemv(x, residual, norm, eps, self.weight, self.bias, kind)

        return product
