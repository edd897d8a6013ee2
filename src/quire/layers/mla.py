"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434).

The KV cache holds one vector per token for all heads: a normed latent c of width `rank`, and a rotated key r. The
key of head h is [K_h c | r] and its value V_h c, where K_h and V_h are parts of `kv_b_proj`. Instead of computing
them for every cached token, K_h is absorbed into the query, since q . K_h c = (K_h^T q) . c, and V_h is applied to
the sum of latents. What remains is attention with a single KV head, whose values are the first `rank` numbers of its
keys.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.attention.base import AttentionBackend, ForwardBatch
from quire.kernels import Kernels
from quire.layers.env import Env
from quire.layers.norm import RMSNorm
from quire.layers.rope import Rotation, rotate

# Maps queries [tokens, heads, rank + rotary dim], of which the rotary part is not yet rotated, and unnormed entries
# [tokens, rank + rotary dim] to sums of latents [tokens, heads * rank]. Both arguments may be overwritten.
PackedLatentAttention = Callable[[torch.Tensor, torch.Tensor, Rotation, ForwardBatch], torch.Tensor]


class LatentAttention:
    """A `LatentLayer` (attention/base.py) bound to its back end. It has no weights."""

    __slots__ = ("backend", "dim", "index", "interleaved", "num_heads", "rank", "scale")

    def __init__(
        self, env: Env, index: int, num_heads: int, dim: int, rank: int, scale: float, interleaved: bool
    ) -> None:
        self.backend: AttentionBackend = env.attention
        self.index = index
        self.num_heads = num_heads
        self.dim = dim
        self.rank = rank
        self.scale = scale
        self.interleaved = interleaved

    def __call__(self, q: torch.Tensor, entries: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Return [tokens, heads * rank] for q [tokens, heads, dim] and entries [tokens, dim]."""
        return self.backend.forward_latent(self, q, entries, batch)


class LatentExpansion:
    """`kv_b_proj`, which maps a latent to the keys (without their rotated part) and values of all heads.

    Its two parts are applied on the other side of the attention: `absorb` to queries, `values` to sums of latents.
    """

    def __init__(
        self, env: Env, name: str, heads: int, rank: int, content_dim: int, rotary_dim: int, value_dim: int
    ) -> None:
        """Load the weight `name`; `heads` counts those of all ranks."""
        width = content_dim + value_dim
        part = env.parallel.cut(heads * width)
        weight = torch.empty(part.stop - part.start, rank, device=env.device, dtype=env.dtype)
        env.weights.copy_into(weight, name + ".weight", (heads * width, rank), part)
        weight = weight.view(-1, width, rank)
        self.rank, self.content_dim, self.stored_dim = rank, content_dim, rank + rotary_dim
        self.to_keys = weight[:, :content_dim]  # [heads, content dim, rank]
        self.to_values = weight[:, content_dim:].transpose(1, 2)  # [heads, rank, value dim]

    def absorb(self, q: torch.Tensor) -> torch.Tensor:
        """Return queries of latents [tokens, heads, stored dim] for q [tokens, heads, content + rotary dim]."""
        tokens, heads, _ = q.shape
        absorbed = q.new_empty(tokens, heads, self.stored_dim)
        content = q[..., : self.content_dim].transpose(0, 1)
        torch.bmm(content, self.to_keys, out=absorbed[..., : self.rank].transpose(0, 1))
        absorbed[..., self.rank :] = q[..., self.content_dim :]
        return absorbed

    def values(self, sums: torch.Tensor) -> torch.Tensor:
        """Return [tokens, heads * value dim] for sums of latents [tokens, heads * rank]."""
        tokens, (heads, _, dim) = sums.shape[0], self.to_values.shape
        out = sums.new_empty(tokens, heads, dim)
        by_head = sums.view(tokens, heads, self.rank).transpose(0, 1)
        torch.bmm(by_head, self.to_values, out=out.transpose(0, 1))
        return out.view(tokens, -1)


def latent_attention(
    attention: LatentAttention, norm: RMSNorm, kernels: Kernels | None
) -> PackedLatentAttention:
    """Return `attention` with the norm of the latent, and the rotation of queries and keys, in front."""
    packed = attention.backend.forward_latent_packed
    if packed and kernels:
        return lambda q, entries, rotation, batch: packed(attention, q, entries, norm, rotation.table, batch)
    turn = rotate_pairs if attention.interleaved else rotate
    rank = attention.rank

    def plain(
        q: torch.Tensor, entries: torch.Tensor, rotation: Rotation, batch: ForwardBatch
    ) -> torch.Tensor:
        latent, _ = norm(entries[:, :rank].contiguous(), None)
        key = turn(entries[:, None, rank:], rotation)[:, 0]
        q[..., rank:] = turn(q[..., rank:], rotation)
        return attention(q, torch.cat((latent, key), 1), batch)

    return plain


def rotate_pairs(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotate neighbouring pairs of x [tokens, heads, dim], and return the first of all pairs, then the second."""
    return rotate(torch.cat((x[..., 0::2], x[..., 1::2]), -1), rotation)
