"""`Indexer`: chooses the tokens that sparse attention attends to (DeepSeek-V3.2, arXiv:2512.02556)."""

from __future__ import annotations

import torch

from quire.attention.base import ForwardBatch
from quire.layers.env import Env
from quire.layers.norm import LayerNorm
from quire.layers.rope import Rotation, rotate
from quire.types import KVLayout

_EPS = 1e-6  # of the norm of index keys


class Indexer:
    """An `IndexLayer` (attention/base.py) bound to its back end. Its projections are part of the attention's.

    All ranks compute all heads, so that they choose the same tokens.
    """

    def __init__(
        self, env: Env, index: int, kv: KVLayout, prefix: str, heads: int, top_k: int, interleaved: bool
    ) -> None:
        self.backend, self.index, self.kv = env.attention, index, kv
        self.heads, self.dim, self.top_k = heads, kv.tensors[1].dim, top_k
        self.interleaved = interleaved
        self.norm = LayerNorm(env, prefix + "k_norm", self.dim, _EPS)
        self.scale = (self.dim * heads) ** -0.5

    def __call__(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        weights: torch.Tensor,
        rotation: Rotation,
        batch: ForwardBatch,
    ) -> torch.Tensor | None:
        """Return the choice of each token, as `AttentionBackend.choose`.

        Args:
            q: [tokens, heads * dim].
            keys: [tokens, dim], before their norm.
            weights: [tokens, heads].
            rotation: of the step's tokens, of the first numbers of a head.
            batch: the step.
        """
        pairs = rotation.pairs if self.interleaved else None
        angles = Rotation(rotation.positions, rotation.table, pairs)
        queries = _rotate_first(q.unflatten(1, (self.heads, self.dim)), angles)
        normed = _rotate_first(self.norm.alone(keys.contiguous()).unsqueeze(1), angles)[:, 0]
        step = batch.for_layer(self.index)
        return self.backend.choose(self, queries, normed, weights.float() * self.scale, step)


def _rotate_first(x: torch.Tensor, angles: Rotation) -> torch.Tensor:
    """Rotate the first numbers of each head of x [tokens, heads, dim], as many as the angles are for."""
    width = angles.table.shape[1]
    return torch.cat((rotate(x[..., :width], angles), x[..., width:]), -1)
