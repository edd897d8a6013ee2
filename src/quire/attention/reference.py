"""Reference attention back end: paged attention in plain PyTorch, for CPUs and as the oracle of the kernels.

The KV cache has the layout [block, token, head, dim], so one gather by KV slot works for every block size. Rows
with one new token are batched in groups of similar length. There the query heads that share a KV head become the
query axis, so each KV byte is read once (GQA packing). Longer rows run one at a time.

Host bounds determine the shapes. Where a bound may exceed the true length, a mask computed on the device hides
the surplus. On a CPU, lengths and block tables can be read without waiting, so shapes are exact there. KV slots
that follow each other are read as a slice, which avoids copying all keys and values: the blocks of a single
request usually do. A prompt without a past attends over the k and v of this step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from quire.attention.base import Angles, AttentionLayer, ForwardBatch, IndexLayer, LatentLayer
from quire.attention.entries import Entries, Slots, block_shape, entries_of, put, take
from quire.attention.expansion_rule import NO_EXPANSION
from quire.attention.gathered import attend_gathered, keeps_scores
from quire.attention.kv_slots import new_slots, part_of_slots, row_slots, table_slots
from quire.attention.latent_reference import attend_latents
from quire.attention.row_batches import to_device
from quire.attention.sparse_reference import chosen_mask, chosen_slots, index_scores, largest

_GROUP_TOKENS = 1 << 18  # KV entries gathered at once; bounds the memory of one group
# Limit for the masks of long rows that exist at once; attention converts them to floats.
_MASK_ELEMENTS = 1 << 24


@dataclass(slots=True)
class _RowGroup:
    """Rows with one new token each, padded to the same length."""

    tokens: torch.Tensor | None  # int64 [rows]: index of each row's token; None: all tokens, in order
    kv: Slots  # [rows * length]
    length: int
    mask: torch.Tensor | None  # bool [rows, 1, 1, length]; None: one row of exactly this length
    distance: torch.Tensor | None  # int64 [rows, 1, 1, length]: query position - key position; None: no mask


@dataclass(slots=True)
class _RowPiece:
    """A range of a row's queries, and the range of keys that any of them attends to."""

    queries: slice
    keys: slice
    mask: torch.Tensor | None  # bool [queries, keys]; None: plain causal


@dataclass(slots=True)
class LongRow:
    """One row with several new tokens."""

    start: int  # tokens [start, end) of the token axis
    end: int
    kv: Slots | None  # [length]; None: no past, so the k and v of this step are all there is
    length: int
    positions: torch.Tensor  # int64 [new]
    # Pieces by window and whether it is a chunk, shared by layers; None: not kept.
    cache: dict[tuple[int | None, bool], list[_RowPiece]] | None

    def pieces(self, layer: AttentionLayer) -> Iterable[_RowPiece]:
        """Yield the row in pieces whose masks, or scores if `keeps_scores`, have a bounded size."""
        window = None if layer.window is None or self.length <= layer.window else layer.window
        if window is None and self.kv is None and not keeps_scores(layer):
            return [_RowPiece(slice(None), slice(None), None)]
        heads = layer.num_heads if keeps_scores(layer) else 1
        if self.cache is None:
            return self.cut(window, heads, layer.chunked)
        kind = window, layer.chunked
        if kind not in self.cache:
            self.cache[kind] = list(self.cut(window, heads, layer.chunked))
        return self.cache[kind]

    def cut(self, window: int | None, heads: int, chunked: bool = False) -> Iterator[_RowPiece]:
        """Yield pieces with at most `_MASK_ELEMENTS` scores of `heads` heads, or with one query if that is more."""
        device, new = self.positions.device, self.end - self.start
        limit = max(1, _MASK_ELEMENTS // (self.length * heads))
        for begin in range(0, new, limit):
            end = min(begin + limit, new)
            last = self.length - new + end  # exact on a CPU; elsewhere a bound, so the first key is unknown
            first = max(0, last - (end - begin) + 1 - window) if window and device.type == "cpu" else 0
            query = self.positions[begin:end, None]
            key = torch.arange(first, last, device=device)
            mask = key <= query
            if window is not None:
                mask &= key >= first_key(query, window, chunked)
            yield _RowPiece(slice(begin, end), slice(first, last), mask)


@dataclass(slots=True)
class _ReferencePlan:
    writes: Slots  # [tokens]: where the new keys and values go
    groups: list[_RowGroup]
    long_rows: list[LongRow]


class ReferenceAttention:
    """Back end for every device and dtype; see the module's docstring.

    Args:
        head_axis: of the block layout. 1 is that of the Triton back end, beside which this one may run some rows.
    """

    name = "reference"
    capturable = False  # shapes depend on the lengths of the rows
    forward_packed = None
    reads_shared = False
    plans_blocks = True
    rule = NO_EXPANSION

    def __init__(self, head_axis: int = 2) -> None:
        self._head_axis = head_axis

    def kv_shape(self, num_blocks: int, block_size: int, heads: int, dim: int) -> tuple[int, ...]:
        return block_shape(self._head_axis, num_blocks, block_size, heads, dim)

    # ------------------------------------------------------------------------------- per step

    def plan(self, batch: ForwardBatch) -> _ReferencePlan:
        # Reading the lengths on a CPU does not wait for a device, so bounds are exact there.
        bounds = (batch.seq_lens if batch.seq_lens.device.type == "cpu" else batch.seq_bounds).tolist()
        ones: list[int] = []
        long_rows: list[LongRow] = []
        counts = batch.num_tokens
        assert counts is not None, "this back end cannot be captured, so it needs the row lengths"
        starts = [0, *counts.cumsum().tolist()]
        keeps = sum(n * bound for n, bound in zip(counts.tolist(), bounds) if n > 1) <= _MASK_ELEMENTS
        for row, n in enumerate(counts.tolist()):
            if n == 1:
                ones.append(row)
            else:
                long_rows.append(self._long(batch, row, starts[row], starts[row + 1], bounds[row], keeps))
        ones.sort(key=bounds.__getitem__)
        groups, begin = [], 0
        for end in range(1, len(ones) + 1):
            if end == len(ones) or self._splits(bounds[ones[begin]], bounds[ones[end]], end + 1 - begin):
                groups.append(self._group(batch, ones[begin:end], starts, bounds[ones[end - 1]]))
                begin = end
        return _ReferencePlan(new_slots(batch), groups, long_rows)

    def _splits(self, shortest: int, longest: int, rows: int) -> bool:
        """Return whether a longer row should start a new group instead of padding the shorter ones."""
        return longest > 2 * shortest + 64 or rows * longest > _GROUP_TOKENS

    def _group(self, batch: ForwardBatch, rows: list[int], starts: list[int], length: int) -> _RowGroup:
        device = batch.seq_lens.device
        rows = sorted(rows)
        everything = len(rows) == batch.seq_lens.shape[0]
        tokens = None if everything else to_device(np.array([starts[row] for row in rows]), device)
        slots, lens = batch.slots, batch.seq_lens
        if device.type == "cpu" and len(rows) == 1:
            return _RowGroup(tokens, row_slots(batch, rows[0], length), length, None, None)
        if not everything:
            index = to_device(np.array(rows), device)
            slots, lens = slots.index_select(0, index), lens.index_select(0, index)
        positions = torch.arange(length, device=device)
        tables = batch.block_table[:, : -(-length // batch.block_size)].index_select(0, slots)
        kv = table_slots(tables, positions, batch.block_size)
        distance = (lens.long().unsqueeze(1) - 1 - positions)[:, None, None, :]
        return _RowGroup(tokens, kv.flatten(), length, distance >= 0, distance)

    def _long(self, batch: ForwardBatch, row: int, start: int, end: int, length: int, keeps: bool) -> LongRow:
        kv = None if length == end - start else row_slots(batch, row, length)
        return LongRow(start, end, kv, length, batch.positions[start:end], {} if keeps else None)

    # ------------------------------------------------------------------------------ per layer

    def forward(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        entries = entries_of(layer, batch.kv[layer.index], q.dtype, self._head_axis)
        plan: _ReferencePlan = batch.attn
        if k is not None and v is not None:
            k, v = (x.view(-1, layer.num_kv_heads, layer.head_dim) for x in (k, v))
            k, v = entries.write(plan.writes, k, v)
        q = q.view(-1, layer.num_heads, layer.head_dim)
        if len(plan.groups) == 1 and plan.groups[0].tokens is None:
            return self._attend_group(layer, plan.groups[0], q, entries)
        out = q.new_empty(q.shape[0], layer.num_heads * layer.head_dim)
        for group in plan.groups:
            assert group.tokens is not None
            rows = q.index_select(0, group.tokens)
            out.index_copy_(0, group.tokens, self._attend_group(layer, group, rows, entries))
        for long in plan.long_rows:
            new = slice(long.start, long.end)
            if long.kv is None and k is not None and v is not None:
                row_k, row_v = k[new], v[new]
            else:
                row_k, row_v = entries.read(part_of_slots(plan.writes, new) if long.kv is None else long.kv)
            out[new] = self._attend_long(layer, long, q[new], row_k, row_v)
        return out

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
        plan: _ReferencePlan = batch.attn
        blocks = batch.kv[layer.index][0].view(-1, layer.dim)
        put(blocks, plan.writes, entries)
        out = q.new_empty(q.shape[0], layer.num_heads, layer.rank)
        for group in plan.groups:
            tokens = slice(None) if group.tokens is None else group.tokens
            if chosen is None:
                keys = take(blocks, group.kv).view(-1, group.length, layer.dim)
                mask = None if group.mask is None else group.mask[:, 0]
            else:
                keys = blocks[chosen_slots(group.kv, group.length, chosen[tokens])]
                mask = (chosen[tokens] >= 0).unsqueeze(1)
            out[tokens] = attend_latents(q[tokens], keys, mask, layer)
        for long in plan.long_rows:
            new = slice(long.start, long.end)
            keys = entries[new] if long.kv is None else take(blocks, long.kv)
            for piece in long.cut(None, layer.num_heads):
                assert piece.mask is not None
                mask = piece.mask
                if chosen is not None:
                    mask = mask & chosen_mask(chosen[new][piece.queries], long.length)
                mask = mask.repeat_interleave(layer.num_heads, 0).unsqueeze(0)
                query = q[new][piece.queries].reshape(1, -1, layer.dim)
                result = attend_latents(query, keys[piece.keys].unsqueeze(0), mask, layer)
                out[new][piece.queries] = result.view(-1, layer.num_heads, layer.rank)
        return layer.expansion.values(out.flatten(1))

    def choose(
        self,
        layer: IndexLayer,
        q: torch.Tensor,
        keys: torch.Tensor,
        weights: torch.Tensor,
        batch: ForwardBatch,
    ) -> torch.Tensor | None:
        plan: _ReferencePlan = batch.attn
        blocks = batch.kv[layer.index][1].view(-1, layer.dim)
        put(blocks, plan.writes, keys)
        lengths = [*(group.length for group in plan.groups), *(long.length for long in plan.long_rows)]
        if max(lengths, default=0) <= layer.top_k:
            return None
        out = torch.full((q.shape[0], layer.top_k), -1, dtype=torch.int32, device=q.device)
        for group in plan.groups:
            tokens = slice(None) if group.tokens is None else group.tokens
            rows = take(blocks, group.kv).view(-1, group.length, layer.dim)
            mask = None if group.mask is None else group.mask[:, 0, 0]
            found = largest(index_scores(q[tokens], rows, weights[tokens]), mask, layer.top_k)
            out[tokens, : found.shape[1]] = found
        for long in plan.long_rows:
            new = slice(long.start, long.end)
            row = keys[new] if long.kv is None else take(blocks, long.kv)
            for piece in long.cut(None, q.shape[1]):
                assert piece.mask is not None
                part = slice(long.start + (piece.queries.start or 0), long.start + piece.queries.stop)
                scores = index_scores(q[part], row[piece.keys].unsqueeze(0), weights[part])
                found = largest(scores, piece.mask, layer.top_k)
                out[part, : found.shape[1]] = found
        return out

    def _attend_group(
        self, layer: AttentionLayer, group: _RowGroup, q: torch.Tensor, entries: Entries
    ) -> torch.Tensor:
        """Return [rows, heads * dim] for q [rows, heads, dim]."""
        rows, heads, dim = q.shape[0], layer.num_kv_heads, layer.head_dim
        found = entries.read(group.kv)
        k, v = (x.view(rows, group.length, heads, dim).transpose(1, 2) for x in found)
        mask = group.mask
        if layer.window is not None and group.length > layer.window:
            if mask is None or group.distance is None:
                last = torch.tensor(group.length - 1)
                first = int(first_key(last, layer.window, layer.chunked))
                k, v = k[:, :, first:], v[:, :, first:]
            else:
                position = group.distance[..., :1]  # of the query: its distance to the first key
                mask = mask & (position - group.distance >= first_key(position, layer.window, layer.chunked))
        packed = q.view(rows, heads, layer.num_heads // heads, dim)
        return attend_gathered(packed, k, v, mask, False, layer).reshape(rows, layer.num_heads * dim)

    def _attend_long(
        self, layer: AttentionLayer, long: LongRow, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Return [new, heads * dim] for q [new, heads, dim], k and v [length, kv heads, dim]."""
        parts = []
        for piece in long.pieces(layer):
            # [1, heads, queries or keys, dim]
            query = q[piece.queries].transpose(0, 1).unsqueeze(0)
            key, value = (x[piece.keys].transpose(0, 1).unsqueeze(0) for x in (k, v))
            out = attend_gathered(query, key, value, piece.mask, piece.mask is None, layer)[0]
            parts.append(out.transpose(0, 1).reshape(out.shape[1], -1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def first_key(positions: torch.Tensor, window: int, chunked: bool) -> torch.Tensor:
    """Return the position of the first key that a query at each of `positions` sees; it may be negative."""
    return positions // window * window if chunked else positions - (window - 1)
