"""Latent attention over expanded keys and values with Triton kernels and cuBLAS, for GPUs.

The keys of all rows form one axis, row after row. It is cut into pieces of bounded memory: for each, latents are
gathered, expanded by one product, and attended to by one launch (kernels/attention/expanded.py). A row is cut at
multiples of the piece's size from its own beginning, so its results depend on no other row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch.nn.functional import pad as pad_with_zeros

from quire.attention.base import Angles, ForwardBatch, LatentLayer
from quire.attention.row_batches import to_device
from quire.kernels.attention.expanded import BEGINS, ENDS, ENTRY, attend_expanded_tiles, expanded_tile
from quire.kernels.attention.latent_write import store_latent
from quire.kernels.attention.tile import Tile
from quire.kernels.target import target_of


@dataclass(frozen=True, slots=True)
class ExpandedSizes:
    """The sizes of a model's heads on one rank."""

    heads: int
    content_dim: int
    rotary_dim: int
    value_dim: int
    itemsize: int  # bytes per number

    @property
    def key_bytes(self) -> int:
        """Return the bytes of the expanded keys and values of one token."""
        return self.heads * (self.content_dim + self.value_dim) * self.itemsize


@dataclass(slots=True)
class _Piece:
    """Keys that are expanded together, and the tiles that attend to them."""

    keys: slice  # on the axis of all rows' keys
    tiles: slice  # in the list of all tiles


@dataclass(slots=True)
class _PiecesPlan:
    kv: torch.Tensor  # int64 [bound of all keys]: KV slots; behind the end of a row that of its last key
    pieces: list[_Piece]
    tiles: torch.Tensor  # int32 [all tiles, 8]
    tile: Tile  # its rows are the tokens of a listed tile
    carries: bool  # a row has several segments


class ExpandedTriton:
    """`LatentRows` (expanding.py) on the blocks of the Triton back end.

    Args:
        sizes: of the model's heads.
        piece_bytes: of expanded keys and values that exist at once.
    """

    def __init__(self, sizes: ExpandedSizes, piece_bytes: int) -> None:
        self._sizes = sizes
        self._most_keys = max(piece_bytes // sizes.key_bytes, 1)

    def plan(self, batch: ForwardBatch) -> _PiecesPlan:
        counts, device = batch.num_tokens, batch.seq_lens.device
        assert counts is not None, "rows that expand are not captured"
        sizes = self._sizes
        widths = sizes.content_dim, sizes.rotary_dim, sizes.value_dim
        tile = expanded_tile(*widths, sizes.itemsize, target_of(device))
        pieces: list[_Piece] = []
        tiles: list[tuple[int, ...]] = []
        begin = 0
        for segments in _packed(batch.seq_bounds.tolist(), self._most_keys):
            before, place = len(tiles), 0
            for row, first, count in segments:
                bound, new = int(batch.seq_bounds[row]), int(counts[row])
                token = int(counts[:row].sum())
                tiles += _tiles(row, token, new, bound, first, count, place, tile.rows)
                place += count
            pieces.append(_Piece(slice(begin, begin + place), slice(before, len(tiles))))
            begin += place
        carries = int(batch.seq_bounds.max()) > self._most_keys
        listed = to_device(np.array(tiles, np.int32).reshape(-1, ENTRY), device)
        return _PiecesPlan(_kv_slots(batch), pieces, listed, tile, carries)

    def forward_latent(
        self,
        layer: LatentLayer,
        q: torch.Tensor,
        entries: torch.Tensor,
        angles: Angles,
        batch: ForwardBatch,
        chosen: torch.Tensor | None = None,
    ) -> torch.Tensor:
        plan: _PiecesPlan = batch.attn
        (tokens, heads, _), expansion = q.shape, layer.expansion
        blocks = batch.kv[layer.index][0].squeeze(1)  # of the only head
        queries = q.clone(memory_format=torch.contiguous_format)
        store_latent(
            queries, q[..., expansion.content_dim :], entries, layer.norm.weight, layer.norm.eps, batch.positions,
            angles.table, layer.span, blocks, batch.kv_slots,
        )  # fmt: skip
        out = q.new_empty(tokens, heads, expansion.value_dim)
        carried = None
        if plan.carries:
            fp32 = partial(torch.empty, dtype=torch.float32, device=q.device)
            carried = fp32(out.shape), fp32((tokens, heads, 2))
        by_slot = blocks.view(-1, layer.dim)
        for piece in plan.pieces:
            found = by_slot.index_select(0, plan.kv[piece.keys])
            expanded = expansion.expand(found[:, : layer.rank])
            attend_expanded_tiles(
                queries, expanded, found[:, layer.rank :], out, carried, batch.seq_lens, plan.tiles[piece.tiles],
                layer.scale, plan.tile,
            )  # fmt: skip
        return out.flatten(1)


def _packed(lengths: list[int], most: int) -> Iterator[list[tuple[int, int, int]]]:
    """Yield pieces of at most `most` keys: lists of segments (row, first key, number of keys) in order."""
    piece: list[tuple[int, int, int]] = []
    room = most
    for row, length in enumerate(lengths):
        for first in range(0, length, most):
            count = min(most, length - first)
            if count > room:
                yield piece
                piece, room = [], most
            piece.append((row, first, count))
            room -= count
    if piece:
        yield piece


def _tiles(
    row: int, token: int, new: int, bound: int, first: int, count: int, place: int, per_tile: int
) -> list[tuple[int, ...]]:
    """Return the tiles of a row that may see a segment of its keys, from the row's end.

    Args:
        row: the row.
        token: its first token.
        new: its new tokens.
        bound: upper bound of its length.
        first: position of the segment's first key.
        count: keys of the segment.
        place: of the first key in its piece.
        per_tile: tokens per tile.
    """
    found: list[tuple[int, ...]] = []
    for tile in range((new - 1) // per_tile * per_tile, -1, -per_tile):
        last = (
            bound - new + min(tile + per_tile, new) - 1
        )  # upper bound of the position of the tile's last token
        if last < first:
            break
        ends = BEGINS * (first == 0) + ENDS * (last < first + count)
        found.append((row, token, tile, new, first, count, place, ends))
    return found


def _kv_slots(batch: ForwardBatch) -> torch.Tensor:
    """Return the KV slots of the keys of all rows, of each as many as its bound, int64."""
    lens, size, device = batch.seq_lens, batch.block_size, batch.seq_lens.device
    bounds = to_device(batch.seq_bounds.astype(np.int64), device)
    start = pad_with_zeros(bounds.cumsum(0), (1, 0))
    places = torch.arange(int(batch.seq_bounds.sum()), device=device)
    row = torch.bucketize(places, start[1:], right=True)
    offset = torch.minimum(places - start[row], lens[row] - 1)
    return batch.block_table[batch.slots[row], offset // size].long() * size + offset % size
