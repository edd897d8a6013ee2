"""Normalisation layers, with the addition of the residual stream folded in.

`norm(x, residual)` returns the normed sum and the sum itself, which is the next residual; a residual of
None is the beginning of the stream. Back ends with a fused kernel only have to replace this call.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quire.layers.env import Env


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * w (arXiv:1910.07467); `offset` is added to w (Gemma stores w - 1)."""

    def __init__(self, env: Env, name: str, width: int, eps: float, offset: float = 0.0) -> None:
        self.shape = (width,)
        self.eps = eps
        self.weight = load_norm_weight(env, name, width, offset)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        residual = x if residual is None else residual + x
        return F.rms_norm(residual, self.shape, self.weight, self.eps), residual

    def alone(self, x: torch.Tensor) -> torch.Tensor:
        """The norm without a residual."""
        return F.rms_norm(x, self.shape, self.weight, self.eps)


class HeadNorm:
    """RMSNorm over each head of q and k at once, with a weight for q heads and one for k heads."""

    def __init__(
        self, env: Env, names: tuple[str, str], heads: tuple[int, int], dim: int, eps: float, offset: float = 0.0
    ) -> None:
        self.shape = (dim,)
        self.eps = eps
        rows = [load_norm_weight(env, name, dim, offset).expand(n, dim) for name, n in zip(names, heads)]
        self.weight = torch.cat(rows).contiguous()  # [q heads + k heads, dim]

    def __call__(self, qk: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(qk, self.shape, None, self.eps) * self.weight  # [tokens, q heads + k heads, dim]


class LayerNorm:
    """(x - mean) / sqrt(var + eps) * w + b (arXiv:1607.06450)."""

    def __init__(self, env: Env, name: str, width: int, eps: float) -> None:
        self.shape = (width,)
        self.eps = eps
        self.weight = load_norm_weight(env, name, width)
        bias = env.weights.tensor(name + ".bias", (width,))
        self.bias = torch.empty_like(self.weight).copy_(bias)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        residual = x if residual is None else residual + x
        return F.layer_norm(residual, self.shape, self.weight, self.bias, self.eps), residual


def load_norm_weight(env: Env, name: str, width: int, offset: float = 0.0) -> torch.Tensor:
    """The weight in the model's dtype; the offset is added in fp32, before rounding."""
    weight = env.weights.tensor(name + ".weight", (width,))
    if offset:
        weight = weight.float() + offset
    return torch.empty(width, device=env.device, dtype=env.dtype).copy_(weight)
