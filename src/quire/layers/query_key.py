"""Operations on queries and keys that kernels do not fuse with the rotation (layers/attention.py).

Norms of single heads in front of the rotation are fused: see `HeadNorm` in layers/norm.py.
"""

from __future__ import annotations

import torch

from quire.layers.env import Env
from quire.layers.norm import HeadNorm


class ProjectionNorm:
    """RMS norm of all q heads of a token together, and of all its k heads, before the rotation (OLMo 2)."""

    def __init__(
        self, env: Env, names: tuple[str, str], heads: tuple[int, int], dim: int, eps: float
    ) -> None:
        """Load the weights; `heads` are the q and k heads before sharding."""
        parts = [
            env.weights.tensor(name + ".weight", (count * dim,), env.parallel.cut(count * dim, count))
            for name, count in zip(names, heads)
        ]
        self.weight = torch.cat(parts).to(env.device, torch.float32)
        self.sizes = [len(part) for part in parts]
        # Heads that several ranks hold are counted several times, here and in the sum of squares.
        counted = [size * env.parallel.size for size in self.sizes]
        self.widths = torch.tensor(counted, dtype=torch.float32, device=env.device)
        self.eps, self.parallel = eps, env.parallel

    def __call__(self, qkv: torch.Tensor) -> torch.Tensor:
        """Apply the norms to packed q|k|v [tokens, width], in place."""
        packed = qkv[:, : sum(self.sizes)]
        q, k = packed.float().split(self.sizes, 1)
        squares = torch.stack((q.square().sum(1), k.square().sum(1)), 1)  # [tokens, 2], of this rank's heads
        scale = (self.parallel.all_reduce(squares) / self.widths + self.eps).rsqrt()
        packed.copy_(torch.cat((q * scale[:, :1], k * scale[:, 1:]), 1) * self.weight)
        return qkv


class HeadLayerNorm:
    """LayerNorm of each q and k head, with a weight per head and no bias, before the rotation (Command R+)."""

    def __init__(
        self, env: Env, names: tuple[str, str], heads: tuple[int, int], dim: int, eps: float
    ) -> None:
        """Load the weights; `heads` are the q and k heads before sharding."""
        parts = [
            env.weights.tensor(name + ".weight", (count, dim), env.parallel.cut(count))
            for name, count in zip(names, heads)
        ]
        self.weight = torch.cat(parts).to(env.device, torch.float32)  # [q heads + k heads, dim]
        self.eps = eps

    def __call__(self, qkv: torch.Tensor) -> torch.Tensor:
        """Apply the norms to packed q|k|v [tokens, width], in place."""
        heads, dim = self.weight.shape
        packed = qkv[:, : heads * dim]
        normed = torch.nn.functional.layer_norm(
            packed.float().unflatten(1, (heads, dim)), (dim,), eps=self.eps
        )
        packed.copy_((normed * self.weight).flatten(1))
        return qkv


class RotatedHeadNorm:
    """`HeadNorm` behind the rotation instead of in front of it (Hunyuan)."""

    def __init__(self, norm: HeadNorm) -> None:
        self.norm = norm

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the normed q [tokens, heads, dim] and k [tokens, kv heads, dim]."""
        heads, kv_heads = q.shape[1], k.shape[1]
        normed = self.norm(torch.cat((q, k), 1)).split([heads, kv_heads], 1)
        return normed[0], normed[1]


class UnitNorm:
    """RMS norm of each rotated q and k head, without weights (Llama 4)."""

    def __init__(self, eps: float) -> None:
        self.eps = eps

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the normed q [tokens, heads, dim] and k [tokens, kv heads, dim]."""
        return unit_norm(q, self.eps), unit_norm(k, self.eps)


def unit_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the RMS norm of x over its last dimension, without weights."""
    return torch.nn.functional.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype)


class GrowingQueries:
    """Queries that grow with their position p: times 1 + beta * ln(1 + floor((p + offset) / length))."""

    def __init__(self, beta: float, length: int, offset: int = 0) -> None:
        self.beta, self.length, self.offset = beta, length, offset

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scaled q [tokens, heads, dim], and k."""
        return q * self.factor(positions).to(q.dtype)[:, None, None], k

    def factor(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the factor of each of the positions, float32."""
        return 1 + self.beta * torch.log1p(((positions + self.offset) // self.length).float())
