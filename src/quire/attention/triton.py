"""The Triton back end: pages [page, kv head, token, dim], attended over by three kernels.

Rows with few new tokens go to kernels/attend_short.py, after kernels/attend_shared.py where many of them
begin with the same pages; the others of the same batch go to kernels/attend_long.py. Which rows are whose is
decided by the same count on the host (grids) and on the device (work). Nothing is sent: a batch reads static
tensors only, so it can be replayed as a CUDA graph. Where the host knows only how many tokens and rows there
are at most, both kernels get grids for the worst case and surplus programs end at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from quire.attention.base import AttentionLayer, ForwardBatch, HeadNorms
from quire.kernels.attend_long import attend_long, long_tokens, most_tiles
from quire.kernels.attend_shared import Begun, attend_shared
from quire.kernels.attend_short import SHORT_ROWS, attend_short, num_splits
from quire.kernels.kv_write import write_kv
from quire.kernels.rope import norm_rotate_store


@dataclass(slots=True)
class _Work:
    """The grids of one batch for one ratio of query to KV heads."""

    queries: int  # rows with at most so many new tokens are short
    any_short: bool
    tiles: int  # of the long rows, at most


@dataclass(slots=True)
class _Plan:
    counts: np.ndarray | None  # new tokens per row; None: the device knows
    tokens: int
    rows: int
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
        queries = max(SHORT_ROWS // group, 1)
        tile = long_tokens(head_dim, itemsize, group)
        if self.counts is None:
            return _Work(queries, True, most_tiles(self.tokens, self.rows, queries, tile))
        long = self.counts[self.counts > queries]
        return _Work(queries, long.size < self.counts.size, int((-(-long // tile)).sum()))


class TritonAttention:
    name = "triton"
    capturable = True
    takes_packed = True
    reads_shared = True

    def kv_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return (num_blocks, num_kv_heads, block_size, head_dim)

    def plan(self, batch: ForwardBatch) -> _Plan:
        counts = batch.num_tokens
        return _Plan(
            counts,
            tokens=batch.input_ids.shape[0],
            rows=batch.seq_lens.shape[0],
            ones=counts is not None and bool((counts == 1).all()),
            max_len=batch.block_table.shape[1] * batch.block_size,
        )

    def forward(
        self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        keys, values = batch.kv[layer.index]
        dim, kv_heads = layer.head_dim, layer.num_kv_heads
        write_kv(k.view(-1, kv_heads, dim), v.view(-1, kv_heads, dim), keys, values, batch.kv_slots)
        return self._attend(layer, q.view(-1, layer.num_heads, dim), batch)

    def forward_packed(
        self,
        layer: AttentionLayer,
        qkv: torch.Tensor,
        norms: HeadNorms | None,
        table: torch.Tensor,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        keys, values = batch.kv[layer.index]
        weight, eps = (None, 0.0) if norms is None else (norms.weight, norms.eps)
        q = norm_rotate_store(qkv, batch.positions, table, weight, eps, keys, values, batch.kv_slots)
        return self._attend(layer, q, batch)

    def _attend(self, layer: AttentionLayer, q: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """q [tokens, heads, dim] -> [tokens, heads * dim]; the pages hold the new tokens already."""
        keys, values = batch.kv[layer.index]
        heads, dim = layer.num_heads, layer.head_dim
        out = torch.empty(q.shape[0], heads * dim, dtype=q.dtype, device=q.device)
        plan: _Plan = batch.attn
        work = plan.work_for(heads // layer.num_kv_heads, dim, q.element_size())
        if work.any_short:
            reach = plan.max_len if layer.window is None else min(plan.max_len, layer.window)
            splits = num_splits(plan.rows, layer.num_kv_heads, reach, dim, q.element_size())
            begun: Begun | None = None
            if batch.shared is not None and splits == 1 and layer.window is None:
                begun = attend_shared(
                    q, keys, values, batch.shared, batch.block_table, layer.scale, layer.soft_cap
                )
            attend_short(
                q, keys, values, out, batch.seq_lens, None if plan.ones else batch.query_start,
                batch.block_table, layer.scale, layer.window, layer.soft_cap, work.queries, splits, begun,
            )  # fmt: skip
        if work.tiles:
            attend_long(
                q, keys, values, out, batch.seq_lens, batch.query_start, batch.block_table,
                layer.scale, work.tiles, layer.window, layer.soft_cap, work.queries,
            )  # fmt: skip
        return out
