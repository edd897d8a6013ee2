"""Normalisation layers, with the addition of the residual stream folded in.

`norm(x, residual)` returns the normed sum and the sum itself, which is the next residual; a residual of
None is the beginning of the stream. Back ends with a fused kernel only have to replace this call.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quire.layers.env import Env


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * w (arXiv:1910.07467)."""

    def __init__(self, env: Env, name: str, width: int, eps: float) -> None:
        self.shape = (width,)
        self.eps = eps
        self.weight = self.load(env, name, width)

    def load(self, env: Env, name: str, width: int) -> torch.Tensor:
        return load_vector(env, name + ".weight", width)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        residual = x if residual is None else residual + x
        return self.alone(residual), residual

    def alone(self, x: torch.Tensor) -> torch.Tensor:
        """The norm without a residual."""
        return F.rms_norm(x, self.shape, self.weight, self.eps)


class OffsetRMSNorm(RMSNorm):
    """Gemma's: the checkpoint stores w - 1, and the product with w is taken in fp32, before rounding."""

    def load(self, env: Env, name: str, width: int) -> torch.Tensor:
        return load_vector(env, name + ".weight", width, torch.float32) + 1

    def alone(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), self.shape, self.weight, self.eps).to(x.dtype)


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
        self.shape = (dim,)
        self.eps = eps
        rows = [norm(env, name, dim, eps).weight.expand(n, dim) for name, n in zip(names, heads)]
        self.weight = torch.cat(rows)  # [q heads + k heads, dim], fp32 if the norm wants its product so

    def __call__(self, qk: torch.Tensor) -> torch.Tensor:
        normed = F.rms_norm(qk.to(self.weight.dtype), self.shape, None, self.eps)
        return (normed * self.weight).to(qk.dtype)  # [tokens, q heads + k heads, dim]


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


def load_vector(env: Env, name: str, width: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The vector `name` on the model's device, in its dtype unless another is given."""
    vector = torch.empty(width, device=env.device, dtype=dtype or env.dtype)
    return vector.copy_(env.weights.tensor(name, (width,)))
