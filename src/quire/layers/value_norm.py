"""`ValueNorm`: the norm of values of Gemma 3n and 4."""

from __future__ import annotations

import torch

from quire.layers.query_key import unit_norm


class ValueNorm:
    """RMS norm of each v head, without weights. It is a `BeforeRotation` (layers/attention.py).

    With `from_keys`, there is no v yet: it is made of k before norm and rotation.
    """

    def __init__(self, heads: int, kv_heads: int, dim: int, eps: float, from_keys: bool = False) -> None:
        self.sizes = [(heads + (0 if from_keys else kv_heads)) * dim, kv_heads * dim]
        self.dim, self.eps, self.from_keys = dim, eps, from_keys

    def __call__(self, qkv: torch.Tensor) -> torch.Tensor:
        """Return q|k|v with normed v, for packed q|k|v [tokens, width], or for q|k with `from_keys`."""
        rest, stored = qkv.split(self.sizes, 1)
        values = unit_norm(stored.unflatten(1, (-1, self.dim)), self.eps).flatten(1)
        return torch.cat((qkv if self.from_keys else rest, values), 1)
