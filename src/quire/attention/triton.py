"""The Triton back end: pages [page, kv head, token, dim], attended over by kernels/paged_attention.py.

Rows with few new tokens go to the short kernel, the others of the same batch to the long one; which rows
are whose is decided by the same count on the host (grids) and on the device (work). Nothing is sent: a
batch of rows with one token each reads static tensors only, so it can be replayed as a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from quire.attention.base import AttentionLayer, ForwardBatch
from quire.kernels import paged_attention as kernels


@dataclass(slots=True)
class _Work:
    """The grids of one batch for one ratio of query to KV heads."""

    queries: int  # rows with at most so many new tokens are short
    any_short: bool
    tiles: int  # of the long rows


@dataclass(slots=True)
class _Plan:
    num_tokens: np.ndarray | None  # None: `tokens` tokens in any rows
    rows: int
    tokens: int
    ones: bool  # every row has one new token
    max_len: int  # that the block table has room for
    work: dict[tuple[int, int], _Work] = field(default_factory=dict)

    def work_for(self, group: int, head_dim: int, itemsize: int) -> _Work:
        """Counted when the first layer of its kind asks; a model nearly always has one kind."""
        work = self.work.get((group, head_dim))
        if work is None:
            work = _Work(1, True, 0) if self.ones else self._count(group, head_dim, itemsize)
            self.work[group, head_dim] = work
        return work

    def _count(self, group: int, head_dim: int, itemsize: int) -> _Work:
        counts = self.num_tokens
        queries = max(kernels.SHORT_ROWS // group, 1)
        tile = kernels.long_tokens(head_dim, itemsize, group)
        if counts is None:  # at most so many tiles are full, and each long row has at most one that is not
            return _Work(queries, True, self.tokens // tile + min(self.rows, self.tokens // (queries + 1)))
        long = counts[counts > queries]
        tiles = int((-(-long // tile)).sum())
        return _Work(queries, long.size < counts.size, tiles)


class TritonAttention:
    name = "triton"
    capturable = True

    def __init__(self) -> None:
        # Hopper can launch a kernel while the one before it still runs.
        self._pdl = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)

    def kv_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return (num_blocks, num_kv_heads, block_size, head_dim)

    def plan(self, batch: ForwardBatch) -> _Plan:
        counts = batch.num_tokens
        ones = counts is not None and bool((counts == 1).all())
        rows, tokens = batch.seq_lens.shape[0], batch.input_ids.shape[0]
        return _Plan(counts, rows, tokens, ones, batch.block_table.shape[1] * batch.block_size)

    def forward(
        self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        keys, values = batch.kv[layer.index]
        dim, kv_heads = layer.head_dim, layer.num_kv_heads
        kernels.write_kv(k.view(-1, kv_heads, dim), v.view(-1, kv_heads, dim), keys, values, batch.kv_slots)
        return self.attend(layer, q, batch)

    def attend(self, layer: AttentionLayer, q: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """q [tokens, heads, dim] -> [tokens, heads * dim], over pages that hold the new tokens already."""
        keys, values = batch.kv[layer.index]
        heads, dim = layer.num_heads, layer.head_dim
        q = q.view(-1, heads, dim)
        out = torch.empty(q.shape[0], heads * dim, dtype=q.dtype, device=q.device)
        plan: _Plan = batch.attn
        group = heads // layer.num_kv_heads
        work = plan.work_for(group, dim, q.element_size())
        if work.any_short:
            reach = plan.max_len if layer.window is None else min(plan.max_len, layer.window)
            splits = kernels.num_splits(plan.rows, layer.num_kv_heads, reach, dim, q.element_size())
            kernels.attend_short(
                q, keys, values, out, batch.seq_lens, None if plan.ones else batch.query_start,
                batch.block_table, layer.scale, layer.window, layer.soft_cap, work.queries,
                splits, self._pdl,
            )  # fmt: skip
        if work.tiles:
            kernels.attend_long(
                q, keys, values, out, batch.seq_lens, batch.query_start,
                batch.block_table, layer.scale, work.tiles, layer.window, layer.soft_cap, work.queries,
            )  # fmt: skip
        return out
