"""Normalisation layers, with the addition of the residual stream folded in.

`norm(x, residual)` returns the normed sum and the sum itself, which is the next residual; a residual of
None is the beginning of the stream. How it is computed is chosen when the layer is built: by kernels
or by plain torch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from quire.kernels import Kernels
from quire.layers.env import Env

NormFunction = Callable[[torch.Tensor], torch.Tensor]  # x -> normed
AddNorm = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]  # -> normed sum, sum


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * w (arXiv:1910.07467)."""

    def __init__(self, env: Env, name: str, width: int, eps: float) -> None:
        self.weight, self.eps = self.load(env, name + ".weight", width), eps
        # the norm without a residual, and with one
        if env.kernels:
            self.alone, self.add = fused_rms(env.kernels, self.weight, eps)
        else:
            self.alone = make_rms(self.weight, width, eps)
            self.add = after_add(self.alone)

    def load(self, env: Env, name: str, width: int) -> torch.Tensor:
        return load_vector(env, name, width)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        return (self.alone(x), x) if residual is None else self.add(x, residual)


class OffsetRMSNorm(RMSNorm):
    """Gemma's: the checkpoint stores w - 1, and the product with w is taken in fp32, before rounding."""

    def load(self, env: Env, name: str, width: int) -> torch.Tensor:
        return load_vector(env, name, width, torch.float32) + 1


class HeadNorm:
    """RMSNorm over each head of q and k at once, with one weight for the q heads and one for the k heads."""

    def __init__(
        self,
        norm: type[RMSNorm],
        env: Env,
        names: tuple[str, str],
        heads: tuple[int, int],
        dim: int,
        eps: float,
    ) -> None:
        rows = [norm(env, name, dim, eps).weight.expand(n, dim) for name, n in zip(names, heads)]
        self.weight, self.eps = torch.cat(rows), eps  # [q heads + k heads, dim]
        self.rms = make_rms(self.weight, dim, eps)

    def __call__(self, qk: torch.Tensor) -> torch.Tensor:
        return self.rms(qk)  # [tokens, q heads + k heads, dim]


class LayerNorm:
    """(x - mean) / sqrt(var + eps) * w + b (arXiv:1607.06450)."""

    def __init__(self, env: Env, name: str, width: int, eps: float) -> None:
        weight = load_vector(env, name + ".weight", width)
        bias = load_vector(env, name + ".bias", width)
        if env.kernels:
            self.alone, self.add = fused_layer_norm(env.kernels, weight, bias, eps)
        else:
            self.alone = make_layer_norm(weight, bias, eps)
            self.add = after_add(self.alone)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        return (self.alone(x), x) if residual is None else self.add(x, residual)


def after_add(norm: NormFunction) -> AddNorm:
    """The addition of the residual, then the norm."""

    def add(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = residual + x
        return norm(total), total

    return add


def fused_rms(kernels: Kernels, weight: torch.Tensor, eps: float) -> tuple[NormFunction, AddNorm]:
    return (lambda x: kernels.rms_norm(x, weight, eps)), (
        lambda x, r: kernels.add_rms_norm(x, r, weight, eps)
    )


def fused_layer_norm(
    kernels: Kernels, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[NormFunction, AddNorm]:
    return (lambda x: kernels.layer_norm(x, weight, bias, eps)), (
        lambda x, r: kernels.add_layer_norm(x, r, weight, bias, eps)
    )


def make_layer_norm(weight: torch.Tensor, bias: torch.Tensor, eps: float) -> NormFunction:
    return lambda x: F.layer_norm(x, weight.shape, weight, bias, eps)


def make_rms(weight: torch.Tensor, width: int, eps: float) -> NormFunction:
    """RMS norm over the last dimension, times `weight` [width] or [heads, width], in the quickest form.

    On a CPU F.rms_norm is eight calls. These seven convert only once each way and
    otherwise work in place on one fp32 copy, which stays in the cache: for 256 rows of 1024 in bf16 that halves
    the time. Gemma's weight comes in fp32, and is multiplied before rounding everywhere.
    """
    shape = (width,)
    if weight.device.type == "cpu":
        product, offset = weight.float(), torch.tensor([eps])

        def on_cpu(x: torch.Tensor) -> torch.Tensor:
            y = x.to(torch.float32, copy=True)
            norm = torch.linalg.vector_norm(y, 2, -1, True)
            y.mul_(torch.addcmul(offset, norm, norm, value=1 / width).rsqrt_()).mul_(product)
            return y.to(x.dtype)

        return on_cpu

    def in_fp32(x: torch.Tensor) -> torch.Tensor:
        return (F.rms_norm(x.float(), shape, None, eps) * weight).to(x.dtype)

    def plain(x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, shape, weight, eps)

    return plain if weight.dim() == 1 and weight.dtype != torch.float32 else in_fp32


def load_vector(env: Env, name: str, width: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The vector `name` on the model's device, in its dtype unless another is given."""
    vector = torch.empty(width, device=env.device, dtype=dtype or env.dtype)
    return vector.copy_(env.weights.tensor(name, (width,)))
