"""Latent attention over expanded keys and values in plain PyTorch, for CPUs and as the oracle of the kernels.

A row runs alone. Its latents are expanded in pieces of bounded memory. Each piece advances an online softmax ("Online
normalizer calculation for softmax", arXiv:1805.02867), so pieces can be cut anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.attention.base import Angles, ForwardBatch, LatentLayer
from quire.attention.entries import Slots, put, take
from quire.attention.kv_slots import new_slots, row_slots

_PIECE_NUMBERS = 1 << 21  # of expanded keys and values that exist at once
_SCORES = 1 << 21  # scores that exist at once
_LEAST_KEYS, _LEAST_QUERIES = 64, 16


@dataclass(slots=True)
class _ExpandedRow:
    """One row of a step."""

    tokens: slice  # its new tokens
    positions: torch.Tensor  # int64 [new]
    kv: Slots  # [length]
    length: int  # exact on a CPU, elsewhere an upper bound


@dataclass(slots=True)
class _ExpandedPlan:
    writes: Slots  # [tokens]: where the new entries go
    rows: list[_ExpandedRow]


class ExpandedReference:
    """`LatentRows` (expanding.py) for every device and dtype. Numbers are multiplied in fp32."""

    def plan(self, batch: ForwardBatch) -> _ExpandedPlan:
        counts = batch.num_tokens
        assert counts is not None, "rows that expand are not captured"
        on_cpu = batch.seq_lens.device.type == "cpu"
        lengths = (batch.seq_lens if on_cpu else batch.seq_bounds).tolist()
        rows, start = [], 0
        for row, (new, length) in enumerate(zip(counts.tolist(), lengths)):
            tokens = slice(start, start + new)
            rows.append(_ExpandedRow(tokens, batch.positions[tokens], row_slots(batch, row, length), length))
            start += new
        return _ExpandedPlan(new_slots(batch), rows)

    def forward_latent(
        self,
        layer: LatentLayer,
        q: torch.Tensor,
        entries: torch.Tensor,
        angles: Angles,
        batch: ForwardBatch,
        chosen: torch.Tensor | None = None,
    ) -> torch.Tensor:
        plan: _ExpandedPlan = batch.attn
        queries = q.clone()
        new = layer.prepare(queries, q[..., layer.expansion.content_dim :], entries, angles)
        blocks = batch.kv[layer.index][0].view(-1, layer.dim)
        put(blocks, plan.writes, new)
        out = q.new_empty(q.shape[0], layer.num_heads, layer.expansion.value_dim)
        for row in plan.rows:
            entries = take(blocks, row.kv)
            out[row.tokens] = attend_expanded(queries[row.tokens], entries, row.positions, layer)
        return out.flatten(1)


def attend_expanded(
    q: torch.Tensor, entries: torch.Tensor, positions: torch.Tensor, layer: LatentLayer
) -> torch.Tensor:
    """Return attention over the keys and values of one row, whose entry i is at position i.

    An entry behind a query contributes nothing to it, even if it is not finite.

    Args:
        q: rotated queries [new, heads, content dim + rotary dim].
        entries: [length, dim].
        positions: int64 [new], ascending by 1. On a CPU the last one is length - 1, elsewhere at most that.
        layer: supplies the expansion and the scale.

    Returns:
        [new, heads, value dim].
    """
    new, heads, _ = q.shape
    expansion, length = layer.expansion, len(entries)
    keys = max(_LEAST_KEYS, _PIECE_NUMBERS // (heads * (expansion.content_dim + expansion.value_dim)))
    keys = min(keys, length)
    queries = max(_LEAST_QUERIES, _SCORES // (heads * keys))
    by_head = q.float().transpose(0, 1)
    softmaxes = [
        _OnlineSoftmax(by_head[:, at : at + queries], positions[at : at + queries], length - new + at, layer)
        for at in range(0, new, queries)
    ]
    for first in range(0, length, keys):
        piece = _ExpandedPiece(entries[first : first + keys], first, layer)
        for softmax in softmaxes:
            softmax.add(piece)
    return torch.cat([softmax.result() for softmax in softmaxes], 1).transpose(0, 1).to(q.dtype)


class _ExpandedPiece:
    """The keys [heads, n, content + rotary dim] and values [heads, n, value dim] of some entries of a row, fp32."""

    def __init__(self, entries: torch.Tensor, first: int, layer: LatentLayer) -> None:
        self.first, self.size = first, len(entries)
        finite = entries.float().sum(1).isfinite()
        # Not finite numbers of entries become scores that are NaN, because 0 * NaN would reach other queries.
        self.faults = None if entries.device.type == "cpu" and bool(finite.all()) else ~finite
        if self.faults is not None:
            entries = entries.masked_fill(self.faults.unsqueeze(1), 0)
        expansion = layer.expansion
        heads = expansion.expand(entries[:, : layer.rank].contiguous()).float().transpose(0, 1)
        content, self.values = heads.split([expansion.content_dim, expansion.value_dim], 2)
        rotary = entries[:, layer.rank :].float().expand(len(heads), -1, -1)
        self.keys = torch.cat((content, rotary), 2)


class _OnlineSoftmax:
    """The attention of some queries over the pieces added so far."""

    def __init__(self, q: torch.Tensor, positions: torch.Tensor, first: int, layer: LatentLayer) -> None:
        """Take q [heads, queries, dim] at `positions`, the first of which is `first` at most."""
        self._q, self._positions, self._scale = q, positions, layer.scale
        self._first, self._last = first, first + q.shape[1] - 1
        self._is_exact = positions.device.type == "cpu"
        self._acc = self._total = self._top = torch.empty(0)
        self._is_empty = True

    def add(self, piece: _ExpandedPiece) -> None:
        """Attend to the keys of a piece."""
        if piece.first > self._last:
            return
        scores = torch.bmm(self._q, piece.keys.mT).mul_(self._scale)
        if piece.faults is not None:
            scores.masked_fill_(piece.faults, float("nan"))
        if not (self._is_exact and piece.first + piece.size - 1 <= self._first):
            keys = torch.arange(piece.first, piece.first + piece.size, device=scores.device)
            scores.masked_fill_(keys > self._positions.unsqueeze(1), float("-inf"))
        top = scores.amax(2, keepdim=True)
        if not self._is_empty:
            top = torch.maximum(top, self._top)
        weights = scores.sub_(top).exp_()
        acc, total = torch.bmm(weights, piece.values), weights.sum(2, keepdim=True)
        if not self._is_empty:
            shrink = (self._top - top).exp_()
            acc, total = acc.addcmul_(self._acc, shrink), total.addcmul_(self._total, shrink)
        self._acc, self._total, self._top, self._is_empty = acc, total, top, False

    def result(self) -> torch.Tensor:
        """Return the results [heads, queries, value dim]."""
        return self._acc / self._total
