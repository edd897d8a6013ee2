"""`Attention`: where a model hands q, k and v to the attention back end. Holds no weights.

`rotary` is the way there for q and k that are turned first: as one with the back end where it takes packed
q|k|v, and step by step elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.attention.base import ForwardBatch
from quire.kernels import Kernels
from quire.layers.env import Env
from quire.layers.norm import HeadNorm
from quire.layers.rope import RotaryHeads, Rotation

# packed q|k|v [tokens, (heads + 2 kv heads) * dim], which may be overwritten -> [tokens, heads * dim]
PackedAttention = Callable[[torch.Tensor, Rotation, ForwardBatch], torch.Tensor]


class Attention:
    """Satisfies attention.base.AttentionLayer; head counts are this rank's."""

    __slots__ = ("backend", "head_dim", "index", "num_heads", "num_kv_heads", "scale", "soft_cap", "window")

    def __init__(
        self,
        env: Env,
        index: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> None:
        self.backend = env.attention
        self.index = index
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = scale
        self.window = window
        self.soft_cap = soft_cap

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """q [tokens, heads, dim], k and v [tokens, kv heads, dim] (dim contiguous) -> [tokens, heads * dim]."""
        return self.backend.forward(self, q, k, v, batch)


def rotary(attention: Attention, norms: HeadNorm | None, kernels: Kernels | None) -> PackedAttention:
    """`attention` over heads that are first normed, if there are norms, and turned to their positions."""
    packed = attention.backend.forward_packed
    if packed and kernels:
        return lambda qkv, rotation, batch: packed(attention, qkv, norms, rotation.table, batch)
    heads = RotaryHeads(attention.num_heads, attention.num_kv_heads, attention.head_dim, norms, kernels)
    return lambda qkv, rotation, batch: attention(*heads(qkv, rotation), batch)
