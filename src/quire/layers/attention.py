"""`Attention`: the layer that passes q, k and v to the attention back end. It has no weights.

`rotary_attention` adds the norm and rotation of q and k in front. If the back end takes packed q|k|v, all of it is
one call; otherwise the operations run one after the other. `layers/query_key.py` has the rarer operations on q and k.
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

# Maps packed q|k|v [tokens, (heads + 2 kv heads) * dim], which may be overwritten and has contiguous rows, to
# [tokens, heads * dim].
PackedAttention = Callable[[torch.Tensor, Rotation, ForwardBatch], torch.Tensor]
# Maps packed q|k|v to packed q|k|v; it may overwrite its argument.
BeforeRotation = Callable[[torch.Tensor], torch.Tensor]
# Maps q [tokens, heads, dim], k [tokens, kv heads, dim] and positions int64 [tokens] to new q and k.
AfterRotation = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class Attention:
    """An `AttentionLayer` (attention/base.py) bound to its back end. Head counts are those of this rank."""

    __slots__ = (
        "backend", "chunked", "head_dim", "index", "kv", "kv_scales", "num_heads", "num_kv_heads", "scale", "sinks",
        "soft_cap", "span",
        "window",
    )  # fmt: skip

    def __init__(
        self,
        env: Env,
        index: int,
        num_heads: int,
        kv: KVLayout,
        scale: float,
        soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,
        span: int = 0,
        kv_scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        self.backend = env.attention
        self.index = index
        self.num_heads = num_heads
        self.kv = kv
        self.num_kv_heads, self.head_dim = kv.tensors[0].heads, kv.tensors[0].dim
        self.scale = scale
        self.window, self.chunked = kv.window, kv.chunked
        self.soft_cap = soft_cap
        self.sinks = sinks
        self.span = span
        self.kv_scales = kv_scales

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, batch: ForwardBatch
    ) -> torch.Tensor:
        """Return [tokens, heads * dim] for q [tokens, heads, dim], k and v [tokens, kv heads, dim].

        The last dimension must be contiguous. k and v are None if an earlier layer with this index has written them.
        """
        return self.backend.forward(self, q, k, v, batch.for_layer(self.index))


def rotary_attention(
    attention: Attention,
    norms: HeadNorm | None,
    kernels: Kernels | None,
    before: BeforeRotation | None = None,
    after: AfterRotation | None = None,
) -> PackedAttention:
    """Return `attention` with the operations on q and k in front.

    Args:
        attention: the layer.
        norms: norms of the heads, which kernels fuse with the rotation; None: no norms.
        kernels: those of the model's layers.
        before: an operation on packed q|k|v.
        after: an operation on rotated q and k; nothing is fused then.
    """
    packed = attention.backend.forward_packed
    if packed and kernels and after is None:

        def attend(qkv: torch.Tensor, rotation: Rotation, batch: ForwardBatch) -> torch.Tensor:
            return packed(attention, qkv, norms, rotation.table, batch.for_layer(attention.index))
    else:
        sizes = attention.num_heads, attention.num_kv_heads, attention.head_dim
        heads = RotaryHeads(*sizes, norms, kernels, attention.span)

        def attend(qkv: torch.Tensor, rotation: Rotation, batch: ForwardBatch) -> torch.Tensor:
            q, k, v = heads(qkv.contiguous(), rotation)
            if after is not None:
                q, k = after(q, k, rotation.positions)
            return attention(q, k, v, batch)

    if before is None:
        return attend
    return lambda qkv, rotation, batch: attend(before(qkv), rotation, batch)
