"""`Attention`: where a model hands q, k and v to the attention back end. Holds no weights."""

from __future__ import annotations

import torch

from quire.attention.base import ForwardBatch
from quire.layers.env import Env


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
