"""Attention of whole sequences without a KV cache, in plain PyTorch: for calibration, and for tests of models."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from quire.attention.base import Angles, AttentionLayer, ForwardBatch, IndexLayer, LatentLayer
from quire.attention.expansion_rule import NO_EXPANSION
from quire.attention.reference import first_key


def _ends(batch: ForwardBatch) -> list[int]:
    assert batch.num_tokens is not None  # the host knows it, because nothing is captured
    found: list[int] = np.cumsum(batch.num_tokens).tolist()
    return found


class WholeSequenceAttention:
    """Attention over rows that start at position 0, so that no keys or values precede the step's."""

    name = "whole"
    forward_packed = None
    reads_shared = False
    capturable = False
    plans_blocks = False
    rule = NO_EXPANSION

    def __init__(self) -> None:
        self.written: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # keys and values of a step, by layer

    def kv_shape(self, num_blocks: int, block_size: int, heads: int, dim: int) -> tuple[int, ...]:
        return (num_blocks, block_size, heads, dim)

    def plan(self, batch: ForwardBatch) -> Any:
        return None

    def forward(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        if k is None or v is None:
            k, v = self.written[layer.index]
        self.written[layer.index] = k, v
        outs = []
        ends = _ends(batch)
        for start, end in zip([0, *ends], ends):
            group = layer.num_heads // layer.num_kv_heads
            keys = k[start:end].repeat_interleave(group, 1)
            values = v[start:end].repeat_interleave(group, 1)
            scores = torch.einsum("qhd,khd->hqk", q[start:end], keys) * layer.scale
            if layer.soft_cap is not None:
                scores = torch.tanh(scores / layer.soft_cap) * layer.soft_cap
            at = torch.arange(end - start)
            hidden = at[None, :] > at[:, None]
            if layer.window is not None:
                hidden |= at[None, :] < first_key(at[:, None], layer.window, layer.chunked)
            scores = scores.masked_fill(hidden, float("-inf"))
            if layer.sinks is not None:
                sinks = layer.sinks.view(-1, 1, 1).expand(-1, end - start, 1)
                scores = torch.cat((scores, sinks), -1)
            probs = scores.softmax(-1)[..., : end - start].to(values.dtype)
            outs.append(torch.einsum("hqk,khd->qhd", probs, values).flatten(1))
        return torch.cat(outs)

    def forward_latent(
        self,
        layer: LatentLayer,
        q: torch.Tensor,
        entries: torch.Tensor,
        angles: Angles,
        batch: ForwardBatch,
        chosen: torch.Tensor | None = None,
    ) -> torch.Tensor:
        q, rotary = layer.expansion.absorb(q)
        entries = layer.prepare(q, rotary, entries, angles)
        outs = []
        ends = _ends(batch)
        for start, end in zip([0, *ends], ends):
            keys = entries[start:end]
            scores = torch.einsum("qhd,kd->hqk", q[start:end], keys) * layer.scale
            at = torch.arange(end - start)
            hidden = at[None, :] > at[:, None]
            if chosen is not None:
                hidden |= ~(at == chosen[start:end, :, None]).any(1)
            probs = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            outs.append(torch.einsum("hqk,kd->qhd", probs, keys[:, : layer.rank]).flatten(1))
        return layer.expansion.values(torch.cat(outs))

    def choose(
        self,
        layer: IndexLayer,
        q: torch.Tensor,
        keys: torch.Tensor,
        weights: torch.Tensor,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        chosen = torch.full((q.shape[0], layer.top_k), -1, dtype=torch.int32)
        ends = _ends(batch)
        for start, end in zip([0, *ends], ends):
            for token in range(start, end):
                products = torch.einsum("hd,kd->hk", q[token], keys[start : token + 1]).relu()
                best = (weights[token] @ products).argsort(descending=True)[: layer.top_k]
                chosen[token, : len(best)] = best
        return chosen


def sequences_batch(rows: list[list[int]]) -> ForwardBatch:
    """Build a ragged batch of whole sequences of token ids, on the CPU."""
    lengths = np.array([len(row) for row in rows], dtype=np.int32)
    empty = torch.empty(0, dtype=torch.int64)
    return ForwardBatch(
        input_ids=torch.tensor([t for row in rows for t in row]),
        positions=torch.cat([torch.arange(len(row)) for row in rows]),
        kv_slots=empty,
        query_start=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
        seq_lens=torch.tensor(lengths),
        block_table=torch.empty(len(rows), 0, dtype=torch.int32),
        slots=torch.arange(len(rows)),
        logit_index=empty,
        kv=[],
        num_tokens=lengths,
        seq_bounds=lengths,
        block_size=1,
    )
