"""Rounding of activations to 8 bits, as W8A8 formats define it: from x to the numbers that the product sees.

The functions return values in the dtype of x. They define what a kernel that multiplies codes must compute.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.quant.forms import FP8_BLOCK, FP8_MAX, Fp8Weight, Int8Weight, QuantisedWeight

INT8_MAX = 127.0
_TINY = 1e-12  # scale of a row of zeros


def rounding_of(weight: QuantisedWeight) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return the function that rounds activations for a product with `weight`; None if they stay as they are."""
    if isinstance(weight, Int8Weight) and weight.rounding == "token":
        return round_int8
    if not isinstance(weight, Fp8Weight) or weight.rounding == "none":
        return None
    if weight.rounding == "tensor":
        scale = weight.input_scale
        assert scale is not None
        return lambda x: round_fp8(x, scale)
    return round_fp8_blocks if weight.rounding == "block" else round_fp8_tokens


def round_int8(x: torch.Tensor) -> torch.Tensor:
    """Round each row of x [tokens, inputs] to 127 steps of its largest magnitude, halves to even."""
    values = x.float()
    scale = (values.abs().amax(-1, keepdim=True) / INT8_MAX).clamp_(min=_TINY)
    return (values / scale).round_().mul_(scale).to(x.dtype)


def round_fp8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Round x / scale to e4m3, saturating, and multiply by `scale` (broadcast) again."""
    codes = (x.float() / scale).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return (codes.float() * scale).to(x.dtype)


def round_fp8_tokens(x: torch.Tensor) -> torch.Tensor:
    """Round each row of x [tokens, inputs] to e4m3, scaled so that its largest magnitude is the largest number."""
    scale = (x.float().abs().amax(-1, keepdim=True) / FP8_MAX).clamp_(min=_TINY)
    return round_fp8(x, scale)


def round_fp8_blocks(x: torch.Tensor) -> torch.Tensor:
    """Round each 128 columns of each row of x [tokens, inputs] as `round_fp8_tokens` rounds a row."""
    inputs = x.shape[-1]
    blocks = torch.nn.functional.pad(x, (0, -inputs % FP8_BLOCK)).unflatten(-1, (-1, FP8_BLOCK))
    return round_fp8_tokens(blocks).flatten(-2)[..., :inputs]
