"""Tokens grouped by expert, on the device: a stable counting sort into buffers whose sizes follow from shapes alone.

Each program handles one block of tokens. It needs the counts of all blocks (route.py) to know where every expert's rows
begin and where those of its block belong. It adds them up itself, or, if there are many, reads the sums of `_add_up`.
Then it places its rows and writes its part of the list of tiles.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from quire.kernels.experts.choice import ExpertChoice
from quire.kernels.jit import kernel
from quire.kernels.target import target_of

_COUNTS = 1 << 13  # counts that a program holds at once
_MOST_COUNTS = 1 << 14  # that each program adds up itself
_COUNTED_ROWS = 16  # tokens of a block whose choice comes without counts
_LANES = 32  # of a warp: fewer tiles of a program take as long, and another kernel
_ADDED_EXPERTS, _ADDED_BLOCKS = 16, 128  # counts that a program of `_add_up` holds at once


@kernel(do_not_specialize=["blocks"])
def _add_up(
    counts,  # int32 [blocks, E]
    before,  # int32 [blocks, E]: the sum over earlier blocks
    totals,  # int32 [E]: over all blocks
    blocks,
    E: tl.constexpr,
    BLOCKS: tl.constexpr,
    EXPERTS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (tiles of experts,)."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    e = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    total = tl.zeros([EXPERTS], tl.int32)
    for start in tl.range(0, blocks, BLOCKS, num_stages=2):
        b = start + tl.arange(0, BLOCKS)
        at = b[:, None] * E + e[None, :]
        there = (b < blocks)[:, None] & (e < E)[None, :]
        count = tl.load(counts + at, mask=there, other=0)
        tl.store(before + at, total[None, :] + tl.cumsum(count, 0) - count, mask=there)
        total += tl.sum(count, 0)
    tl.store(totals + e, total, mask=e < E)


@kernel(do_not_specialize=["tokens", "blocks", "most_tiles", "each"])
def _group(
    ids,  # int32 [tokens, TOP_K]
    counts,  # int32 [blocks, E]; with ADDED the sums over earlier blocks
    totals,  # int32 [E], if ADDED
    place,  # int32 [tokens, TOP_K]: the row of a token for each of its experts
    source,  # int32 [tokens * TOP_K]: the token of a row
    ends,  # int32 [E]: the end of each expert's rows
    tile_expert,  # int32 [most_tiles]: the expert of a tile of rows, -1 behind the last tile
    tile_first,  # int32 [most_tiles]: its first row
    tokens,
    blocks,
    most_tiles,
    each,  # tiles that a program writes
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    E_LOG: tl.constexpr,  # E_PAD = 2 ** E_LOG
    TOP_K: tl.constexpr,
    ITEMS: tl.constexpr,  # rows of a block, at least tokens of a block * TOP_K
    OTHERS: tl.constexpr,  # rows of a block that all are compared with at once
    ROWS: tl.constexpr,  # tokens of a block
    TILE: tl.constexpr,  # rows of a tile
    TILES: tl.constexpr,  # at least `each`
    CHUNK: tl.constexpr,  # blocks added up at once
    ADDED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    block = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    e = tl.arange(0, E_PAD)
    if ADDED:
        total = tl.load(totals + e, mask=e < E, other=0)
        before = tl.load(counts + block * E + e, mask=e < E, other=0)
    else:
        total = tl.zeros([E_PAD], tl.int32)
        before = tl.zeros([E_PAD], tl.int32)  # chosen in earlier blocks
        for start in tl.range(0, blocks, CHUNK, num_stages=2):
            b = start + tl.arange(0, CHUNK)
            count = tl.load(
                counts + b[:, None] * E + e[None, :], mask=(b < blocks)[:, None] & (e < E)[None, :], other=0
            )
            total += tl.sum(count, 0)
            before += tl.sum(tl.where((b < block)[:, None], count, 0), 0)
    end = tl.cumsum(total, 0)
    if block == 0:
        tl.store(ends + e, end, mask=e < E)

    item = tl.arange(0, ITEMS)
    first_item = block * (ROWS * TOP_K)
    own = tl.minimum(tokens - block * ROWS, ROWS) * TOP_K
    real = item < own
    at = first_item + item
    mine = tl.load(ids + at, mask=real, other=-1)
    rank = tl.zeros([ITEMS], tl.int32)  # among the rows of the block with the same expert
    for start in range(0, own, OTHERS):
        other = start + tl.arange(0, OTHERS)
        theirs = tl.load(ids + first_item + other, mask=other < own, other=-1)
        earlier = (theirs[None, :] == mine[:, None]) & (other[None, :] < item[:, None])
        rank += tl.sum(earlier.to(tl.int32), 1)
    begin = end - total + before
    row = rank + tl.gather(begin, tl.maximum(mine, 0), 0)
    tl.store(place + at, row, mask=real)
    tl.store(source + row, at // TOP_K, mask=real)

    tiles = (total + TILE - 1) // TILE
    last_tile = tl.cumsum(tiles, 0)
    t = tl.arange(0, TILES)
    tile = block * each + t
    # The expert of a tile is the number of experts that end before it.
    expert = tl.zeros([TILES], tl.int32)
    for half in tl.static_range(1, E_LOG + 1):
        ends_before = tl.gather(last_tile, expert + (E_PAD >> half) - 1, 0) <= tile
        expert += tl.where(ends_before, E_PAD >> half, 0)
    is_real = tile < tl.sum(tiles, 0)
    first = tl.gather(end - total - (last_tile - tiles) * TILE, expert, 0) + tile * TILE
    expert = tl.where(is_real, expert, -1)
    written = (t < each) & (tile < most_tiles)
    tl.store(tile_expert + tile, expert, mask=written)
    tl.store(tile_first + tile, first, mask=written)


@dataclass(frozen=True, slots=True)
class GroupedRows:
    """The rows of a step in the order of experts: one for each token and each of its experts.

    Attributes:
        place: row of a token for each of its experts, int32 [tokens, top_k].
        source: token of a row, int32 [rows].
        ends: end of each expert's rows, int32 [experts].
        tile_expert: expert of a tile of rows; -1 behind the last tile.
        tile_first: first row of a tile.
        tile: rows of a tile; the last tile of an expert may have fewer.
    """

    place: torch.Tensor
    source: torch.Tensor
    ends: torch.Tensor
    tile_expert: torch.Tensor
    tile_first: torch.Tensor
    tile: int


def _counted(choice: ExpertChoice, experts: int) -> ExpertChoice:
    """Return the choice with the counts of its blocks, which routers in plain PyTorch do not make."""
    if choice.counts is not None:
        return choice
    ids, tokens = choice.ids, choice.ids.shape[0]
    counts = torch.zeros(triton.cdiv(tokens, _COUNTED_ROWS), experts, device=ids.device, dtype=torch.int32)
    block = torch.arange(tokens, device=ids.device) // _COUNTED_ROWS
    at = (block[:, None] * experts + ids).flatten()
    counts.view(-1).scatter_add_(0, at, torch.ones_like(at, dtype=torch.int32))
    return replace(choice, ids=ids.int(), counts=counts, rows=_COUNTED_ROWS)


def group(choice: ExpertChoice, experts: int, tile: int) -> GroupedRows:
    """Group the rows of a step by expert, in tiles of at most `tile` rows."""
    choice = _counted(choice, experts)
    ids, counts = choice.ids, choice.counts
    assert counts is not None
    tokens, top_k = ids.shape
    blocks, rows = counts.shape[0], tokens * top_k
    most = rows // tile + min(experts, rows)  # the last tile of each expert may have fewer rows
    each = triton.cdiv(most, blocks)
    items, log = triton.next_power_of_2(choice.rows * top_k), (experts - 1).bit_length()
    tiles = max(triton.next_power_of_2(each), _LANES)

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device=ids.device, dtype=torch.int32)

    grouped = GroupedRows(ints(tokens, top_k), ints(rows), ints(experts), ints(most), ints(most), tile)
    pdl = target_of(ids.device).has_dependent_launch
    totals, added = counts, blocks << log > _MOST_COUNTS
    chunk = 1 if added else min(max(_COUNTS >> log, 1), triton.next_power_of_2(blocks))
    if added:
        before, totals = torch.empty_like(counts), ints(experts)
        _add_up[(triton.cdiv(experts, _ADDED_EXPERTS),)](
            counts, before, totals, blocks, E=experts, BLOCKS=_ADDED_BLOCKS, EXPERTS=_ADDED_EXPERTS, PDL=pdl,
            num_warps=4, launch_pdl=pdl,
        )  # fmt: skip
        counts = before
    _group[(blocks,)](
        ids, counts, totals, grouped.place, grouped.source, grouped.ends, grouped.tile_expert, grouped.tile_first,
        tokens, blocks, most, each,
        E=experts, E_PAD=1 << log, E_LOG=log, TOP_K=top_k,
        ITEMS=items, OTHERS=min(items, 64), ROWS=choice.rows, TILE=tile,
        TILES=tiles, CHUNK=chunk,
        ADDED=added, PDL=pdl,
        num_warps=4 if choice.rows <= 4 else 8, launch_pdl=pdl,
    )  # fmt: skip
    return grouped
