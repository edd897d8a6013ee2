"""`ByRowsAttention`: rows with one new token run on one back end, rows with more on another.

Both share the blocks, so they agree on their layout. In a step with rows of both kinds each back end sees a batch of
its own rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from quire.attention.base import AttentionBackend, AttentionLayer, ForwardBatch, NoLatents, Tokens
from quire.attention.expansion_rule import NO_EXPANSION
from quire.attention.row_batches import select_rows


@dataclass(slots=True)
class _Share:
    """The rows of a step that one back end runs."""

    backend: AttentionBackend
    batch: ForwardBatch
    tokens: Tokens  # of these rows, on the token axis of the step


class ByRowsAttention(NoLatents):
    """Back end that gives each row to one of two.

    Args:
        prefill: for rows with several new tokens.
        decode: for rows with one.
    """

    capturable = False  # the rows of a kind are known only with the lengths
    forward_packed = None
    plans_blocks = True
    rule = NO_EXPANSION

    def __init__(self, prefill: AttentionBackend, decode: AttentionBackend) -> None:
        self.name = f"{prefill.name} for prompts, {decode.name} for decoding"
        self.reads_shared = decode.reads_shared
        self._prefill, self._decode = prefill, decode
        if prefill.kv_shape(2, 3, 5, 7) != decode.kv_shape(2, 3, 5, 7):
            raise ValueError(f"{prefill.name} and {decode.name} have different layouts of blocks")

    def kv_shape(self, num_blocks: int, block_size: int, heads: int, dim: int) -> tuple[int, ...]:
        return self._decode.kv_shape(num_blocks, block_size, heads, dim)

    def plan(self, batch: ForwardBatch) -> list[_Share]:
        counts = batch.num_tokens
        assert counts is not None, "this back end cannot be captured, so it needs the row lengths"
        ones = counts == 1
        if ones.all() or not ones.any():
            backend = self._decode if ones.all() else self._prefill
            return [_share(backend, replace(batch, others=[]), slice(None))]
        return [
            _share(backend, *select_rows(batch, np.flatnonzero(ones == wanted)))
            for backend, wanted in ((self._decode, True), (self._prefill, False))
        ]

    def forward(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        shares: list[_Share] = batch.attn
        if len(shares) == 1:
            return shares[0].backend.forward(layer, q, k, v, shares[0].batch)
        q = q.view(-1, layer.num_heads, layer.head_dim)
        out = q.new_empty(q.shape[0], layer.num_heads * layer.head_dim)
        for share in shares:
            at = share.tokens
            new_k = None if k is None else _heads(k, layer)[at]
            new_v = None if v is None else _heads(v, layer)[at]
            out[at] = share.backend.forward(layer, q[at], new_k, new_v, share.batch)
        return out


def _heads(x: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
    return x.view(-1, layer.num_kv_heads, layer.head_dim)


def _share(backend: AttentionBackend, batch: ForwardBatch, tokens: Tokens) -> _Share:
    batch.attn = backend.plan(batch)
    return _Share(backend, batch, tokens)
