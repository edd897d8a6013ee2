"""Rounding to 4 bits that minimises the error of a layer's outputs on calibration data (GPTQ, arXiv:2210.17323).

Columns are rounded one after the other. The error of each is compensated by the columns that are not rounded yet, with
the inverse of the Hessian H = X^T X of the layer's inputs X.
"""

from __future__ import annotations

import torch

from quire.quant.export import search_symmetric

_DAMPING = 0.01  # of the mean of the Hessian's diagonal, which is added to it


class InputMoments:
    """The sum of x^T x over the inputs of a product."""

    def __init__(self, inputs: int, device: torch.device) -> None:
        self.hessian = torch.zeros(inputs, inputs, device=device)

    def add(self, x: torch.Tensor) -> None:
        """Add the rows x [tokens, inputs]."""
        x = x.float()
        self.hessian.addmm_(x.t(), x)


def round_by_hessian(
    weight: torch.Tensor, hessian: torch.Tensor, group_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales, bfloat16 [outputs, groups], and codes, uint8 [outputs, inputs] with 8 for zero.

    Args:
        weight: [outputs, inputs].
        hessian: fp32 [inputs, inputs]; inputs that were always 0 have a zero on the diagonal.
        group_size: columns with a common scale; it divides the inputs.
    """
    left, outputs, inputs = weight.float().clone(), *weight.shape
    inverse = _inverse_factor(hessian)
    codes = torch.empty(outputs, inputs, dtype=torch.uint8, device=weight.device)
    scales = []
    for start in range(0, inputs, group_size):
        end = start + group_size
        block = left[:, start:end].clone()
        own = inverse[start:end, start:end]
        # The error of a column counts as much as it costs after the compensation by later columns.
        scale, _ = search_symmetric(block.unsqueeze(1), own.diagonal().square().reciprocal().unsqueeze(0))
        scales.append(scale)
        step = scale.float().squeeze(1)
        errors = torch.empty_like(block)
        for column in range(group_size):
            values = block[:, column]
            rounded = (values / step).round().clamp_(-8, 7)
            codes[:, start + column] = (rounded + 8).to(torch.uint8)
            errors[:, column] = (values - rounded * step) / own[column, column]
            block[:, column + 1 :] -= errors[:, column, None] * own[column, column + 1 :]
        left[:, end:] -= errors @ inverse[start:end, end:]
    return torch.cat(scales, 1), codes


def _inverse_factor(hessian: torch.Tensor) -> torch.Tensor:
    """Return the upper Cholesky factor of the inverse of the damped Hessian."""
    damped = hessian.clone()
    diagonal = damped.diagonal()
    mean = diagonal.mean().clamp(min=1e-12)
    diagonal[diagonal == 0] = mean
    diagonal += _DAMPING * mean
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    return torch.linalg.cholesky(inverse, upper=True)
