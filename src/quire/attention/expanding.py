"""`ExpandingAttention`: rows that an `ExpansionRule` picks attend to expanded latents, all others to latents.

It wraps the back end of the others. Both share its blocks. In a step with rows of both kinds each sees a batch of its
own rows. A captured step has no rows that expand (`StageFunctions.prefix`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from quire.attention.base import (
    Angles,
    AttentionBackend,
    AttentionLayer,
    ForwardBatch,
    HeadNorms,
    IndexLayer,
    LatentLayer,
    PackedForward,
    Tokens,
)
from quire.attention.expansion_rule import ExpansionRule
from quire.attention.row_batches import select_rows


class LatentRows(Protocol):
    """The part of a back end that computes latent attention."""

    def plan(self, batch: ForwardBatch) -> Any:
        """Do as `AttentionBackend.plan`."""
        ...

    def forward_latent(
        self,
        layer: LatentLayer,
        q: torch.Tensor,
        entries: torch.Tensor,
        angles: Angles,
        batch: ForwardBatch,
        chosen: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Do as `AttentionBackend.forward_latent`."""
        ...


@dataclass(slots=True)
class _LatentShare:
    """The rows of a step of one kind."""

    runs: LatentRows
    batch: ForwardBatch
    tokens: Tokens  # of these rows, on the token axis of the step


class ExpandingAttention:
    """Back end of a model with latent attention.

    Args:
        absorbed: runs the rows that do not expand, and everything else that a back end does.
        expanded: runs the rows that expand, on the same blocks.
        rule: which rows expand.
    """

    plans_blocks = True

    def __init__(self, absorbed: AttentionBackend, expanded: LatentRows, rule: ExpansionRule) -> None:
        self.name, self.capturable = absorbed.name, absorbed.capturable
        self.reads_shared = absorbed.reads_shared
        self.rule = rule
        self._absorbed, self._expanded = absorbed, expanded
        self.forward_packed: PackedForward | None = self._packed if absorbed.forward_packed else None

    def kv_shape(self, num_blocks: int, block_size: int, heads: int, dim: int) -> tuple[int, ...]:
        return self._absorbed.kv_shape(num_blocks, block_size, heads, dim)

    def plan(self, batch: ForwardBatch) -> Any:
        """Return the plan of the wrapped back end, or a share for each kind of rows if some expand."""
        if batch.num_tokens is None:
            return self._absorbed.plan(batch)
        expands = self.rule.rows(batch.num_tokens, batch.seq_bounds)
        if not expands.any():
            return self._absorbed.plan(batch)
        if expands.all():
            return [_latent_share(self._expanded, replace(batch, others=[]), slice(None))]
        return [
            _latent_share(runs, *select_rows(batch, np.flatnonzero(expands == wanted)))
            for runs, wanted in ((self._absorbed, False), (self._expanded, True))
        ]

    def forward_latent(
        self,
        layer: LatentLayer,
        q: torch.Tensor,
        entries: torch.Tensor,
        angles: Angles,
        batch: ForwardBatch,
        chosen: torch.Tensor | None = None,
    ) -> torch.Tensor:
        shares = batch.attn
        if not isinstance(shares, list):
            return self._absorbed.forward_latent(layer, q, entries, angles, batch, chosen)
        assert chosen is None, "rows that attend to chosen tokens do not expand"
        if len(shares) == 1:
            return shares[0].runs.forward_latent(layer, q, entries, angles, shares[0].batch)
        out = q.new_empty(q.shape[0], layer.num_heads * layer.expansion.value_dim)
        for share in shares:
            at = share.tokens
            out[at] = share.runs.forward_latent(layer, q[at], entries[at], angles.select(at), share.batch)
        return out

    def _packed(
        self,
        layer: AttentionLayer,
        qkv: torch.Tensor,
        norms: HeadNorms | None,
        table: torch.Tensor,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        packed = self._absorbed.forward_packed
        assert packed is not None
        return packed(layer, qkv, norms, table, self._unshared(batch))

    def forward(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        return self._absorbed.forward(layer, q, k, v, self._unshared(batch))

    def choose(
        self,
        layer: IndexLayer,
        q: torch.Tensor,
        keys: torch.Tensor,
        weights: torch.Tensor,
        batch: ForwardBatch,
    ) -> torch.Tensor | None:
        return self._absorbed.choose(layer, q, keys, weights, self._unshared(batch))

    def _unshared(self, batch: ForwardBatch) -> ForwardBatch:
        """Return the step with the plan of the wrapped back end, for a drafter's layers without latents."""
        if not isinstance(batch.attn, list):
            return batch
        step = replace(batch, others=[])
        step.attn = self._absorbed.plan(step)
        return step


def _latent_share(runs: LatentRows, batch: ForwardBatch, tokens: Tokens) -> _LatentShare:
    batch.attn = runs.plan(batch)
    return _LatentShare(runs, batch, tokens)
