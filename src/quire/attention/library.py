"""Library back end: PyTorch's FlashAttention over ragged rows, whose keys and values are gathered before it.

It measures what a kernel that reads blocks in place saves: the attention is as fast as the library's, and the copy of
all keys and values is added to it.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn

from quire.attention.base import AttentionLayer, ForwardBatch, NoLatents
from quire.attention.entries import block_shape, entries_of
from quire.attention.expansion_rule import NO_EXPANSION

# PyTorch 2.11 shares KV heads without being asked.
_ASKS = "enable_gqa" in inspect.signature(varlen_attn).parameters
_SHARED_HEADS: dict[str, Any] = {"enable_gqa": True} if _ASKS else {}


@dataclass(slots=True)
class _LibraryPlan:
    """The plan of a step: where the keys of all rows are, one row after the other."""

    kv: torch.Tensor  # int64 [bound of all keys]; behind the last key any slot
    key_start: torch.Tensor  # int32 [rows + 1]
    most_queries: int
    most_keys: int


class LibraryAttention(NoLatents):
    """Back end for GPUs and 16 bits, for layers without soft cap, sinks and chunks.

    Args:
        head_axis: of the block layout; 1 is that of the Triton back end.
    """

    name = "library"
    capturable = False  # shapes depend on the lengths of the rows
    forward_packed = None
    reads_shared = False
    plans_blocks = True
    rule = NO_EXPANSION

    def __init__(self, head_axis: int = 2) -> None:
        self._head_axis = head_axis

    def kv_shape(self, num_blocks: int, block_size: int, heads: int, dim: int) -> tuple[int, ...]:
        return block_shape(self._head_axis, num_blocks, block_size, heads, dim)

    def plan(self, batch: ForwardBatch) -> _LibraryPlan:
        counts, size = batch.num_tokens, batch.block_size
        assert counts is not None, "this back end cannot be captured, so it needs the row lengths"
        lens, device = batch.seq_lens, batch.seq_lens.device
        key_start = torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
        # The host knows bounds of the lengths, so keys behind the true end are of no row.
        places = torch.arange(int(batch.seq_bounds.sum()), device=device)
        row = torch.bucketize(places, key_start[1:], right=True).clamp_(max=len(lens) - 1)
        offset = torch.minimum(places - key_start[row], lens[row] - 1)
        blocks = batch.block_table[batch.slots[row], offset // size].long()
        most_keys = int(batch.seq_bounds.max(initial=1))
        return _LibraryPlan(blocks * size + offset % size, key_start, int(counts.max(initial=1)), most_keys)

    def forward(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        plan: _LibraryPlan = batch.attn
        entries = entries_of(layer, batch.kv[layer.index], q.dtype, self._head_axis)
        if k is not None and v is not None:
            k, v = (x.view(-1, layer.num_kv_heads, layer.head_dim) for x in (k, v))
            entries.write(batch.kv_slots, k, v)
        q = q.view(-1, layer.num_heads, layer.head_dim)
        keys, values = entries.read(plan.kv)
        before = -1 if layer.window is None else layer.window - 1
        out = flash(
            q.contiguous(), keys, values, batch.query_start, plan.key_start, plan.most_queries, plan.most_keys,
            layer.scale, before,
        )  # fmt: skip
        return out.reshape(-1, layer.num_heads * layer.head_dim)


def flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_start: torch.Tensor,
    key_start: torch.Tensor,
    most_queries: int,
    most_keys: int,
    scale: float,
    before: int,
) -> torch.Tensor:
    """Return causal attention over packed rows: the last query of a row sees its last key.

    Args:
        q: [tokens, heads, dim].
        k, v: [keys, kv heads, dim].
        query_start, key_start: int32 [rows + 1].
        most_queries, most_keys: bounds for a row.
        scale: of the scores.
        before: how many keys before its own a query sees; -1: all.
    """
    out = varlen_attn(
        q,
        k,
        v,
        query_start,
        key_start,
        most_queries,
        most_keys,
        scale=scale,
        window_size=(before, 0),
        **_SHARED_HEADS,
    )
    assert isinstance(out, torch.Tensor)  # a tuple if it was asked for more
    return out
