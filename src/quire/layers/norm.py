"""Normalisation layers, with the addition of the residual stream folded in.

`norm(x, residual)` returns the normed sum and the sum itself, which is the next residual; a residual of
None is the beginning of the stream. Back ends with a fused kernel only have to replace this call.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from quire.layers.env import Env

Rms = Callable[[torch.Tensor], torch.Tensor]


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * w (arXiv:1910.07467)."""

    def __init__(self, env: Env, name: str, width: int, eps: float) -> None:
        self.weight = self.load(env, name + ".weight", width)
        self.alone = make_rms(self.weight, width, eps)  # the norm without a residual

    def load(self, env: Env, name: str, width: int) -> torch.Tensor:
        return load_vector(env, name, width)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        residual = x if residual is None else residual + x
        return self.alone(residual), residual


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
        self.rms = make_rms(torch.cat(rows), dim, eps)

    def __call__(self, qk: torch.Tensor) -> torch.Tensor:
        return self.rms(qk)  # [tokens, q heads + k heads, dim]


class LayerNorm:
    """(x - mean) / sqrt(var + eps) * w + b (arXiv:1607.06450)."""

    def __init__(self, env: Env, name: str, width: int, eps: float) -> None:
        self.shape = (width,)
        self.eps = eps
        self.weight = load_vector(env, name + ".weight", width)
        self.bias = load_vector(env, name + ".bias", width)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        residual = x if residual is None else residual + x
        return F.layer_norm(residual, self.shape, self.weight, self.bias, self.eps), residual


def make_rms(weight: torch.Tensor, width: int, eps: float) -> Rms:
    """RMS norm over the last dimension, times `weight` [width] or [heads, width], in the quickest form.

    A CPU has no fused kernel, and five plain calls beat F.rms_norm's eight (4.6 instead of 7.0 us for a
    row of 256). They work in fp32, whatever x is, as does Gemma everywhere (its weight comes in fp32).
    """
    shape = (width,)
    if weight.device.type == "cpu":
        product, offset = weight.float(), torch.tensor([eps])

        def on_cpu(x: torch.Tensor) -> torch.Tensor:
            norm = torch.linalg.vector_norm(x, 2, -1, True, dtype=torch.float32)
            y = x * torch.addcmul(offset, norm, norm, value=1 / width).rsqrt_()
            return y.mul_(product).to(x.dtype)

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
