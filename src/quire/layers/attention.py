"""`Attention`: the layer that passes q, k and v to the attention back end. It has no weights.

`rotary_attention` adds the norm and rotation of q and k in front. If the back end takes packed q|k|v, all of it is
one call; otherwise the operations run one after the other.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.attention.base import ForwardBatch
from quire.kernels import Kernels
from quire.layers.env import Env
from quire.layers.norm import HeadNorm
from quire.layers.rope import RotaryHeads, Rotation
from quire.types import KVLayout

# Maps packed q|k|v [tokens, (heads + 2 kv heads) * dim], which may be overwritten, to [tokens, heads * dim].
PackedAttention = Callable[[torch.Tensor, Rotation, ForwardBatch], torch.Tensor]


class Attention:
    """An `AttentionLayer` (attention/base.py) bound to its back end. Head counts are those of this rank."""

    __slots__ = (
        "backend",
        "head_dim",
        "index",
        "kv",
        "num_heads",
        "num_kv_heads",
        "scale",
        "soft_cap",
        "window",
    )

    def __init__(
        self,
        env: Env,
        index: int,
        num_heads: int,
        kv: KVLayout,
        scale: float,
        soft_cap: float | None = None,
    ) -> None:
        self.backend = env.attention
        self.index = index
        self.num_heads = num_heads
        self.kv = kv
        self.num_kv_heads, self.head_dim = kv.tensors[0].heads, kv.tensors[0].dim
        self.scale = scale
        self.window = kv.window
        self.soft_cap = soft_cap

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """Return [tokens, heads * dim] for q [tokens, heads, dim], k and v [tokens, kv heads, dim].

        The last dimension must be contiguous.
        """
        return self.backend.forward(self, q, k, v, batch.for_layer(self.index))


def rotary_attention(
    attention: Attention, norms: HeadNorm | None, kernels: Kernels | None
) -> PackedAttention:
    """Return `attention` with the heads' norms (if any) and rotation in front."""
    packed = attention.backend.forward_packed
    if packed and kernels:
        return lambda qkv, rotation, batch: packed(
            attention, qkv, norms, rotation.table, batch.for_layer(attention.index)
        )
    heads = RotaryHeads(attention.num_heads, attention.num_kv_heads, attention.head_dim, norms, kernels)
    return lambda qkv, rotation, batch: attention(*heads(qkv, rotation), batch)
