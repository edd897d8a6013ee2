"""Products with a quantised weight: the fastest one that takes it, or plain PyTorch.

A fast product is offered by a function in `FAST`, tried in order. On a GPU the numbers of a weight may still be on
their way when its product is built: only shapes and dtypes are known until the checkpoint is finished. A product that
wants another order of the numbers rearranges them in a function passed to `Weights.when_loaded`. Steps are captured
before that, so the memory that its kernels read must not move (kernel_order.py).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from quire.kernels.target import log_choice
from quire.layers.env import Env
from quire.quant.base import Matmul, make_matmul
from quire.quant.forms import QuantisedWeight
from quire.quant.rounding import rounding_of

# Returns a product with the weight and bias, or None if it does not take them.
ProductOffer = Callable[[Env, QuantisedWeight, torch.Tensor | None], Matmul | None]


def _by_c_kernels(env: Env, weight: QuantisedWeight, bias: torch.Tensor | None) -> Matmul | None:
    if env.device.type != "cpu" or env.kernels is None:
        return None
    from quire.quant.coded import coded_product

    return coded_product(env, weight, bias)


def _by_triton_kernels(env: Env, weight: QuantisedWeight, bias: torch.Tensor | None) -> Matmul | None:
    if env.device.type != "cuda" or env.kernels is None:
        return None
    from quire.quant.packed_codes import packed_codes_product

    return packed_codes_product(env, weight, bias)


FAST: list[ProductOffer] = [_by_c_kernels, _by_triton_kernels]


def stays_packed(device: torch.device, has_kernels: bool, is_fp8: bool) -> bool:
    """Return whether quantised weights stay packed in memory. A CPU unpacks those that no C kernel takes."""
    return device.type != "cpu" or (has_kernels and not is_fp8)


def any_product(env: Env, weight: torch.Tensor | QuantisedWeight, bias: torch.Tensor | None) -> Matmul:
    """Return the product with a plain or a quantised matrix, and `bias` [outputs]."""
    if isinstance(weight, torch.Tensor):
        return make_matmul(weight, bias, env.kernels)
    return quantised_product(env, weight, bias)


def quantised_product(env: Env, weight: QuantisedWeight, bias: torch.Tensor | None) -> Matmul:
    """Return the product with `weight`, one matrix, and `bias` [outputs]."""
    for offer in FAST:
        if product := offer(env, weight, bias):
            return product
    if env.device.type != "cpu":
        return DequantisingMatmul(weight, bias)
    # On a CPU numbers are loaded at once, and unpacking them in every step would take longer than reading them whole.
    log_choice(f"{weight.label}: weights are unpacked and computed in {str(env.dtype)[6:]}")
    product = make_matmul(weight.dequantised(env.dtype), bias, env.kernels)
    rounded = rounding_of(weight)
    return product if rounded is None else RoundedMatmul(rounded, product)


class DequantisingMatmul:
    """Product by F.linear with the weight unpacked in each call."""

    def __init__(self, weight: QuantisedWeight, bias: torch.Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self.rounded = rounding_of(weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.rounded is None else self.rounded(x)
        return F.linear(x, self.weight.dequantised(x.dtype), self.bias)


class RoundedMatmul:
    """A product whose activations are first rounded as the format demands."""

    def __init__(self, rounded: Callable[[torch.Tensor], torch.Tensor], product: Matmul) -> None:
        self.rounded, self.product = rounded, product

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(self.rounded(x))
