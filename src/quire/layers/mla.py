"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434).

The KV cache holds one entry per token for all heads: a normed latent c of width `rank`, and a rotated key r. The key
of head h is [K_h c | r] and its value V_h c, where K_h and V_h are parts of `kv_b_proj`. Instead of computing them
for every cached token, K_h is absorbed into the query, since q . K_h c = (K_h^T q) . c, and V_h is applied to the
weighted sum of latents. What remains is attention with a single KV head, whose values are the first `rank` numbers of
its keys.
"""

from __future__ import annotations

import torch

from quire.attention.base import ForwardBatch
from quire.layers.env import Env
from quire.layers.norm import RMSNorm
from quire.layers.rope import Rotation, rotate
from quire.quant.base import Part
from quire.quant.loading import load_dequantised
from quire.types import KVLayout


class LatentAttention:
    """A `LatentLayer` (attention/base.py) bound to its back end: the norm and rotation of entries, and attention."""

    __slots__ = ("backend", "dim", "index", "kv", "norm", "num_heads", "rank", "scale", "span")

    def __init__(
        self,
        env: Env,
        index: int,
        num_heads: int,
        kv: KVLayout,
        rank: int,
        scale: float,
        norm: RMSNorm,
        span: int,
    ) -> None:
        """Take the heads of this rank, the layout of entries, and the norm of their first `rank` numbers.

        The two dimensions of a rotated pair are `span` apart.
        """
        self.backend = env.attention
        self.index = index
        self.num_heads = num_heads
        self.kv = kv
        self.rank = rank
        self.dim = kv.tensors[0].dim
        self.scale = scale
        self.norm = norm
        self.span = span

    def __call__(
        self,
        q: torch.Tensor,
        rotary: torch.Tensor,
        entries: torch.Tensor,
        rotation: Rotation,
        batch: ForwardBatch,
        chosen: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return weighted sums of latents [tokens, heads * rank].

        Args:
            q: absorbed queries [tokens, heads, dim], whose last `rotary dim` numbers are undefined; overwritten.
            rotary: [tokens, heads, rotary dim], that part of the queries before rotation.
            entries: [tokens, dim], before norm and rotation.
            rotation: of the step's tokens.
            batch: the step.
            chosen: positions that each token attends to; None: to all up to its own.
        """
        step = batch.for_layer(self.index)
        return self.backend.forward_latent(self, q, rotary, entries, rotation, step, chosen)

    def prepare(
        self, q: torch.Tensor, rotary: torch.Tensor, entries: torch.Tensor, angles: Rotation
    ) -> torch.Tensor:
        """Write the rotated `rotary` into q, and return the normed and rotated entries."""
        q[..., self.rank :] = rotate(rotary, angles)
        latent, _ = self.norm(entries[:, : self.rank].contiguous(), None)
        return torch.cat((latent, rotate(entries[:, None, self.rank :], angles)[:, 0]), 1)


class LatentExpansion:
    """`kv_b_proj`, which maps a latent to the keys (without their rotated part) and values of all heads.

    Its two parts are applied on the other side of the attention: `absorb` to queries, `values` to sums of latents.
    """

    def __init__(
        self, env: Env, name: str, heads: int, rank: int, content_dim: int, rotary_dim: int, value_dim: int
    ) -> None:
        """Load the weight `name`; `heads` counts those of all ranks."""
        width = content_dim + value_dim
        rows = env.parallel.cut(heads * width, heads)
        part = Part(name + ".weight", (heads * width, rank), rows, slice(0, rank))
        weight = load_dequantised(env, part).view(-1, width, rank)
        self.rank, self.dim = rank, rank + rotary_dim
        self.to_keys = weight[:, :content_dim]  # [heads, content dim, rank]
        self.to_values = weight[:, content_dim:].transpose(1, 2)  # [heads, rank, value dim]

    def absorb(self, q: torch.Tensor) -> torch.Tensor:
        """Return queries of entries [tokens, heads, rank + rotary dim] for q [tokens, heads, content dim].

        Their last `rotary dim` numbers are undefined.
        """
        tokens, heads, _ = q.shape
        absorbed = q.new_empty(tokens, heads, self.dim)
        torch.bmm(q.transpose(0, 1), self.to_keys, out=absorbed[..., : self.rank].transpose(0, 1))
        return absorbed

    def values(self, sums: torch.Tensor) -> torch.Tensor:
        """Return [tokens, heads * value dim] for weighted sums of latents [tokens, heads * rank]."""
        tokens, (heads, _, dim) = sums.shape[0], self.to_values.shape
        out = sums.new_empty(tokens, heads, dim)
        by_head = sums.view(tokens, heads, self.rank).transpose(0, 1)
        torch.bmm(by_head, self.to_values, out=out.transpose(0, 1))
        return out.view(tokens, -1)
