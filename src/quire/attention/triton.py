"""Triton back end: blocks of layout [block, kv head, token, dim], and three attention kernels.

- kernels/attention/short.py: rows with few new tokens.
- kernels/attention/shared.py: runs before it on blocks that many such rows share at their beginning.
- kernels/attention/long.py: the other rows of the batch.

Host (grids) and device (work) split the rows by the same token count. Nothing is copied to the device: a batch
reads static tensors only, so it can be replayed as a CUDA graph. If the host knows only upper bounds of tokens and
rows, both kernels are launched for the worst case, and surplus programs end at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from quire.attention.base import Angles, AttentionLayer, ForwardBatch, HeadNorms, IndexLayer, LatentLayer
from quire.attention.entries import coded, holds_codes
from quire.attention.expansion_rule import NO_EXPANSION
from quire.kernels.attention.kv_write import write_kv
from quire.kernels.attention.latent import (
    attend_latent_ones,
    attend_latent_tiles,
    latent_fits,
    latent_splits,
    latent_tile,
    latent_tokens,
)
from quire.kernels.attention.latent_write import store_latent
from quire.kernels.attention.long import attend_long, list_tiles, long_tile, long_tokens, most_tiles
from quire.kernels.attention.shared import SharedPartial, attend_shared, shared_tile
from quire.kernels.attention.short import SHORT_ROWS, attend_short, num_splits, short_tile
from quire.kernels.attention.sparse import attend_chosen, choose_tokens, token_owners, write_keys
from quire.kernels.attention.tile import KVScales, fits
from quire.kernels.rope import norm_rotate_store
from quire.kernels.target import Target, target_of

_MOST_SHORT_ROWS = 64  # query rows of a program for rows that verify draft tokens


@dataclass(slots=True)
class _LayerPlan:
    """The plan of all layers with the same head size and ratio of query to KV heads."""

    layer: int  # index of the first of these layers
    queries: int  # rows with at most this many new tokens are short
    any_short: bool
    tiles: torch.Tensor | None  # of the long rows; None: no long rows


@dataclass(slots=True)
class _TritonPlan:
    """The plan of a step. Each pass over the model adds the part that depends on the kind of layer."""

    ones: bool  # whether every row has one new token
    reach: int  # upper bound of the number of keys of a row
    work: dict[tuple[int, ...], _LayerPlan] = field(default_factory=dict)

    def latent_work_for(self, layer: LatentLayer, batch: ForwardBatch, itemsize: int) -> _LayerPlan:
        """Return the plan of the latent layers, like `work_for`."""
        kind = layer.num_heads, layer.dim
        work = self.work.get(kind)
        if work is None or work.layer == layer.index:
            target = target_of(batch.seq_lens.device)
            per_tile = latent_tokens(layer.num_heads, layer.dim, itemsize, target)
            work = self.work[kind] = self._plan(layer.index, batch, 1, per_tile, 1)
        return work

    def work_for(self, layer: AttentionLayer, batch: ForwardBatch, itemsize: int) -> _LayerPlan:
        """Return the plan of the layer's kind, which the first layer of that kind makes in each pass.

        Making it launches a kernel, which has to be part of the graph that the pass is captured in.
        """
        kind = layer.num_heads // layer.num_kv_heads, layer.head_dim, holds_codes(batch.kv[layer.index])
        work = self.work.get(kind)
        if work is None or work.layer == layer.index:
            work = self.work[kind] = self._plan_layer(layer, batch, itemsize)
        return work

    def _plan_layer(self, layer: AttentionLayer, batch: ForwardBatch, itemsize: int) -> _LayerPlan:
        group = layer.num_heads // layer.num_kv_heads
        queries = self._short_queries(layer, group, itemsize, batch)
        target, has_codes = target_of(batch.seq_lens.device), holds_codes(batch.kv[layer.index])
        per_tile = long_tokens(layer.head_dim, itemsize, group, target, has_codes)
        return self._plan(layer.index, batch, queries, per_tile, layer.num_kv_heads)

    def _plan(
        self, index: int, batch: ForwardBatch, queries: int, per_tile: int, kv_heads: int
    ) -> _LayerPlan:
        if self.ones:
            return _LayerPlan(index, 1, True, None)
        any_short, counts, tokens = True, batch.num_tokens, batch.input_ids.shape[0]
        if batch.decodes_only and batch.decode_tokens <= queries:
            most = usual = 0
        elif counts is None:
            most = most_tiles(tokens, batch.seq_lens.shape[0], queries, per_tile)
            usual = -(-tokens // per_tile)
        else:
            long = counts[counts > queries]
            any_short, most = long.size < counts.size, int((-(-long // per_tile)).sum())
            usual = most
        if not most:
            return _LayerPlan(index, queries, any_short, None)
        tiles = list_tiles(
            batch.query_start, batch.seq_lens, batch.slots, most, queries, per_tile, usual * kv_heads
        )
        return _LayerPlan(index, queries, any_short, tiles)

    @staticmethod
    def _short_queries(layer: AttentionLayer, group: int, itemsize: int, batch: ForwardBatch) -> int:
        """Return the most new tokens of a short row; rows that verify draft tokens are short if their tile fits."""
        queries, wanted = max(SHORT_ROWS // group, 1), batch.decode_tokens
        if wanted <= queries or wanted * group > _MOST_SHORT_ROWS:
            return queries
        target = target_of(batch.seq_lens.device)
        has_codes = holds_codes(batch.kv[layer.index])
        tile = short_tile(layer.head_dim, itemsize, wanted * group, 1, target, has_codes)
        return wanted if fits(tile, layer.head_dim, itemsize, target) else queries


class TritonAttention:
    """Back end for GPUs.

    Args:
        most_splits: most programs that share the context of a row with few new tokens, rounded down to a power of two;
            fewer share it if they fill the GPU.
    """

    name = "triton"
    capturable = True
    reads_shared = True
    plans_blocks = False
    rule = NO_EXPANSION

    def __init__(self, most_splits: int = 1 << 16) -> None:
        self._most_splits = 1 << (most_splits.bit_length() - 1)

    @staticmethod
    def fits(dim: int, itemsize: int, group: int, target: Target) -> bool:
        """Return whether every kernel has a tile for these heads.

        Args:
            dim: head size.
            itemsize: bytes per number.
            group: query heads per KV head.
            target: the GPU.
        """
        rows = max(SHORT_ROWS // group, 1) * group
        tiles = (
            long_tile(dim, itemsize, group, target),
            short_tile(dim, itemsize, rows, 1, target),
            shared_tile(dim, itemsize, group, target),
        )
        return all(fits(tile, dim, itemsize, target) for tile in tiles)

    def kv_shape(self, num_blocks: int, block_size: int, heads: int, dim: int) -> tuple[int, ...]:
        return (num_blocks, heads, block_size, dim)

    def plan(self, batch: ForwardBatch) -> _TritonPlan:
        counts = batch.num_tokens
        ones = counts is not None and bool((counts == 1).all())
        return _TritonPlan(ones, int(batch.seq_bounds.max(initial=1)))

    def forward(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        dim, kv_heads = layer.head_dim, layer.num_kv_heads
        if k is not None and v is not None:
            keys, values, scales = _blocks(layer, batch)
            write_kv(
                k.view(-1, kv_heads, dim), v.view(-1, kv_heads, dim), keys, values, batch.kv_slots, scales
            )
        return self._attend(layer, q.view(-1, layer.num_heads, dim), batch)

    def forward_packed(
        self,
        layer: AttentionLayer,
        qkv: torch.Tensor,
        norms: HeadNorms | None,
        table: torch.Tensor,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        keys, values, scales = _blocks(layer, batch)
        weight, eps = (None, 0.0) if norms is None else (norms.weight, norms.eps)
        q = norm_rotate_store(
            qkv, batch.positions, table, weight, eps, keys, values, batch.kv_slots, layer.span, scales
        )
        return self._attend(layer, q, batch)

    def _attend(self, layer: AttentionLayer, q: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Return [tokens, heads * dim] for q [tokens, heads, dim]; the blocks already hold the new tokens."""
        keys, values, scales = _blocks(layer, batch)
        dim, kv_heads, itemsize = layer.head_dim, layer.num_kv_heads, q.element_size()
        out = torch.empty(q.shape[0], layer.num_heads * dim, dtype=q.dtype, device=q.device)
        plan: _TritonPlan = batch.attn
        work = plan.work_for(layer, batch, itemsize)
        if work.any_short:
            reach = plan.reach if layer.window is None else min(plan.reach, layer.window)
            splits = num_splits(batch.seq_lens.shape[0], kv_heads, reach, dim, itemsize, target_of(q.device))
            splits = min(splits, self._most_splits)
            shared: SharedPartial | None = None
            if batch.shared is not None and splits == 1 and layer.window is None:
                shared = attend_shared(
                    q,
                    keys,
                    values,
                    batch.shared,
                    batch.block_table,
                    batch.slots,
                    layer.scale,
                    layer.soft_cap,
                    scales,
                )
            attend_short(
                q, keys, values, out, batch.seq_lens, None if plan.ones else batch.query_start,
                batch.block_table, batch.slots, layer.scale, layer.window, layer.soft_cap, work.queries, splits, shared,
                layer.sinks, chunked=layer.chunked, scales=scales,
            )  # fmt: skip
        if work.tiles is not None:
            attend_long(
                q, keys, values, out, batch.block_table, work.tiles,
                layer.scale, layer.window, layer.soft_cap, layer.sinks, chunked=layer.chunked, scales=scales,
            )  # fmt: skip
        return out

    @staticmethod
    def fits_latent(heads: int, dim: int, itemsize: int, target: Target) -> bool:
        """Return whether every kernel has a tile for latent entries of `dim` numbers."""
        tiles = (latent_tile(heads, dim, itemsize, target, several) for several in (False, True))
        return all(latent_fits(tile, dim, itemsize, target) for tile in tiles)

    def forward_latent(
        self,
        layer: LatentLayer,
        q: torch.Tensor,
        entries: torch.Tensor,
        angles: Angles,
        batch: ForwardBatch,
        chosen: torch.Tensor | None = None,
    ) -> torch.Tensor:
        blocks = batch.kv[layer.index][0].squeeze(1)  # of the only head
        q, rotary = layer.expansion.absorb(q)
        store_latent(
            q, rotary, entries, layer.norm.weight, layer.norm.eps, batch.positions, angles.table,
            layer.span, blocks, batch.kv_slots,
        )  # fmt: skip
        heads, itemsize = layer.num_heads, q.element_size()
        out = torch.empty(q.shape[0], heads * layer.rank, dtype=q.dtype, device=q.device)
        plan: _TritonPlan = batch.attn
        if chosen is not None:
            owners = token_owners(batch.query_start, batch.slots, q.shape[0])
            attend_chosen(q, blocks, out, chosen, batch.positions, owners, batch.block_table, layer.scale)
            return layer.expansion.values(out)
        work = plan.latent_work_for(layer, batch, itemsize)
        if work.any_short:
            starts, rows = None if plan.ones else batch.query_start, batch.seq_lens.shape[0]
            splits = latent_splits(rows, heads, plan.reach, layer.dim, itemsize, target_of(q.device))
            attend_latent_ones(
                q, blocks, out, batch.seq_lens, starts, batch.block_table, batch.slots, layer.scale, splits
            )
        if work.tiles is not None:
            attend_latent_tiles(q, blocks, out, batch.block_table, work.tiles, layer.scale)
        return layer.expansion.values(out)

    def choose(
        self,
        layer: IndexLayer,
        q: torch.Tensor,
        keys: torch.Tensor,
        weights: torch.Tensor,
        batch: ForwardBatch,
    ) -> torch.Tensor | None:
        blocks = batch.kv[layer.index][1].squeeze(1)  # of the only head
        write_keys(keys, blocks, batch.kv_slots)
        plan: _TritonPlan = batch.attn
        if plan.reach <= layer.top_k:
            return None
        owners = token_owners(batch.query_start, batch.slots, q.shape[0])
        return choose_tokens(
            q.contiguous(), weights.contiguous(), blocks, batch.positions, owners, batch.block_table, layer.top_k,
            plan.reach,
        )  # fmt: skip


def _blocks(layer: AttentionLayer, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor, KVScales | None]:
    """Return the blocks of keys and values, and their scales if they are codes."""
    kv = batch.kv[layer.index]
    found = coded(kv, layer, head_axis=1)
    if found is None:
        return kv[0], kv[1], None
    return found.keys, found.values, KVScales(found.key_scales, found.value_scales, found.static)
