"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434).

The KV cache holds one entry per token for all heads: a normed latent c of width `rank`, and a rotated key r. The key
of head h is [K_h c | r] and its value V_h c, where K_h and V_h are parts of `kv_b_proj`. There are two ways to attend:

- Absorbed: K_h is applied to the query, since q . K_h c = (K_h^T q) . c, and V_h to the weighted sum of latents. What
  remains is attention with a single KV head, whose values are the first `rank` numbers of its keys.
- Expanded: the keys and values of all heads are computed from the latents, and attended to as usual.

The back end chooses between them (attention/expansion_rule.py).
"""

from __future__ import annotations

import torch

from quire.attention.base import ForwardBatch
from quire.kernels import available
from quire.layers.env import Env
from quire.layers.norm import RMSNorm
from quire.layers.rope import Rotation, rotate
from quire.quant.base import Part
from quire.quant.loading import load_dequantised
from quire.types import KVLayout


class LatentAttention:
    """A `LatentLayer` (attention/base.py) bound to its back end: the norm and rotation of entries, and attention."""

    __slots__ = ("backend", "dim", "expansion", "index", "kv", "norm", "num_heads", "rank", "scale", "span")

    def __init__(
        self,
        env: Env,
        index: int,
        num_heads: int,
        kv: KVLayout,
        expansion: LatentExpansion,
        scale: float,
        norm: RMSNorm,
        span: int,
    ) -> None:
        """Take the heads of this rank, the layout of entries, `kv_b_proj`, and the norm of latents.

        The two dimensions of a rotated pair are `span` apart.
        """
        self.backend = env.attention
        self.index = index
        self.num_heads = num_heads
        self.kv = kv
        self.expansion = expansion
        self.rank = expansion.rank
        self.dim = kv.tensors[0].dim
        self.scale = scale
        self.norm = norm
        self.span = span

    def __call__(
        self,
        q: torch.Tensor,
        entries: torch.Tensor,
        rotation: Rotation,
        batch: ForwardBatch,
        chosen: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the results of all heads [tokens, heads * value dim].

        Args:
            q: queries [tokens, heads, content dim + rotary dim], before rotation.
            entries: [tokens, dim], before norm and rotation.
            rotation: of the step's tokens.
            batch: the step.
            chosen: positions that each token attends to; None: to all up to its own.
        """
        step = batch.for_layer(self.index)
        return self.backend.forward_latent(self, q, entries, rotation, step, chosen)

    def prepare(
        self, q: torch.Tensor, rotary: torch.Tensor, entries: torch.Tensor, angles: Rotation
    ) -> torch.Tensor:
        """Write the rotated `rotary` to the end of each query, and return the normed and rotated entries."""
        q[..., q.shape[-1] - rotary.shape[-1] :] = rotate(rotary, angles)
        latent, _ = self.norm(entries[:, : self.rank].contiguous(), None)
        return torch.cat((latent, rotate(entries[:, None, self.rank :], angles)[:, 0]), 1)


class LatentExpansion:
    """`kv_b_proj`, which maps a latent to the keys (without their rotated part) and values of all heads.

    `expand` does so. In absorbed attention its two parts are applied on the other side: `absorb` to queries, `values`
    to sums of latents.
    """

    def __init__(
        self, env: Env, name: str, heads: int, rank: int, content_dim: int, rotary_dim: int, value_dim: int
    ) -> None:
        """Load the weight `name`; `heads` counts those of all ranks."""
        width = content_dim + value_dim
        rows = env.parallel.cut(heads * width, heads)
        part = Part(name + ".weight", (heads * width, rank), rows, slice(0, rank))
        self._bind(load_dequantised(env, part), content_dim, rotary_dim, value_dim)

    @classmethod
    def of_weight(
        cls, weight: torch.Tensor, content_dim: int, rotary_dim: int, value_dim: int
    ) -> LatentExpansion:
        """Return the expansion by `weight` [heads * (content dim + value dim), rank], without a checkpoint."""
        expansion = object.__new__(cls)
        expansion._bind(weight, content_dim, rotary_dim, value_dim)
        return expansion

    def _bind(self, weight: torch.Tensor, content_dim: int, rotary_dim: int, value_dim: int) -> None:
        self.weight = weight  # [heads * (content dim + value dim), rank]
        self.rank, self.content_dim, self.value_dim = weight.shape[1], content_dim, value_dim
        self.dim = self.rank + rotary_dim  # of an entry
        by_head = weight.view(-1, content_dim + value_dim, self.rank)
        self.to_keys = by_head[:, :content_dim]  # [heads, content dim, rank]
        self.to_values = by_head[:, content_dim:].transpose(1, 2)  # [heads, rank, value dim]

    def expand(self, latents: torch.Tensor) -> torch.Tensor:
        """Return the keys, without their rotated part, and values of all heads for latents [n, rank].

        Returns:
            [n, heads, content dim + value dim], the key in front of the value.
        """
        return torch.mm(latents, self.weight.t()).view(len(latents), -1, self.content_dim + self.value_dim)

    def absorb(self, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries of entries for queries of keys [tokens, heads, content dim + rotary dim].

        Returns:
            [tokens, heads, rank + rotary dim], whose last `rotary dim` numbers are undefined, and the last `rotary dim`
            numbers of each query in `q`, which are to be rotated and written there.
        """
        tokens, heads, width = q.shape
        content, rotary = q.split([self.content_dim, width - self.content_dim], 2)
        absorbed = q.new_empty(tokens, heads, self.dim)
        _by_head(content, self.to_keys, absorbed[..., : self.rank])
        return absorbed, rotary

    def values(self, sums: torch.Tensor) -> torch.Tensor:
        """Return [tokens, heads * value dim] for weighted sums of latents [tokens, heads * rank]."""
        tokens, (heads, _, dim) = sums.shape[0], self.to_values.shape
        out = sums.new_empty(tokens, heads, dim)
        _by_head(sums.view(tokens, heads, self.rank), self.to_values, out)
        return out.view(tokens, -1)


def _by_head(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> None:
    """Write x[:, h] @ weight[h] to y[:, h], for every head h.

    Args:
        x: [tokens, heads, inputs].
        weight: [heads, inputs, outputs].
        y: [tokens, heads, outputs].
    """
    if available(x.device):
        from quire.kernels.matmul.by_head import product_by_head, takes_heads

        if takes_heads(x, weight):
            return product_by_head(x, weight, y)
    torch.bmm(x.transpose(0, 1), weight, out=y.transpose(0, 1))
    return None
