"""Attention over latent entries: one KV head, whose values are the first RANK numbers of its keys (layers/mla.py).

An entry is read once for scores and sums, and by all heads of a program. A program handles some tokens of a row, each
with all heads or a part of them. `attend_latent_ones` runs the rows with one new token, like short.py, and splits their
keys over several programs if the rows are few. `attend_latent_tiles` runs the others, in the tiles that
`list_tiles` (long.py) lists.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.attention.long import load_entry
from quire.kernels.attention.short import merge_splits
from quire.kernels.attention.tile import MASKED, Tile, load_rows, pad, score_factors
from quire.kernels.jit import kernel
from quire.kernels.target import Target, target_of

_MAX_SPLITS = 64
_SPARE_BYTES = 4096  # of shared memory, for reductions and block numbers


@triton.jit
def _attend_entries(
    acc, total, top, ids, q, q_rotary, query_pos, start, end, blocks, table, scale, block_stride, token_stride,
    RANK: tl.constexpr, RANK_PAD: tl.constexpr, ROTARY: tl.constexpr, ROTARY_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Advance the online softmax over the entries start .. start + BLOCK_N, like `attend_tile` (tile.py)."""
    pos = start + tl.arange(0, BLOCK_N)
    there = tl.minimum(pos, end - 1)
    offsets = ids.to(tl.int64) * block_stride + there % BLOCK_SIZE * token_stride
    ids = tl.load(table + tl.minimum(pos + BLOCK_N, end - 1) // BLOCK_SIZE)
    latent = load_rows(blocks, offsets, RANK, RANK_PAD)
    rotary = load_rows(blocks + RANK, offsets, ROTARY, ROTARY_PAD)
    scores = tl.dot(q, tl.trans(latent), input_precision="ieee")
    scores = tl.dot(q_rotary, tl.trans(rotary), scores, input_precision="ieee")
    scores = tl.where(pos[None, :] <= query_pos[:, None], scores, MASKED)
    new_top = tl.maximum(top, tl.max(scores, 1) * scale)
    p = tl.exp2(scores * scale - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(latent.dtype), latent, acc * shrink[:, None], input_precision="ieee")
    return acc, total, new_top, ids


@triton.jit
def _attend_entries_swapped(
    acc, total, top, ids, q, q_rotary, query_pos, start, end, blocks, table, scale, block_stride, token_stride,
    RANK: tl.constexpr, RANK_PAD: tl.constexpr, ROTARY: tl.constexpr, ROTARY_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Do the same as `_attend_entries` with all matrices transposed: q [RANK, ROWS], acc [RANK, ROWS]."""
    pos = start + tl.arange(0, BLOCK_N)
    there = tl.minimum(pos, end - 1)
    offsets = ids.to(tl.int64) * block_stride + there % BLOCK_SIZE * token_stride
    ids = tl.load(table + tl.minimum(pos + BLOCK_N, end - 1) // BLOCK_SIZE)
    latent = load_rows(blocks, offsets, RANK, RANK_PAD)
    rotary = load_rows(blocks + RANK, offsets, ROTARY, ROTARY_PAD)
    scores = tl.dot(latent, q, input_precision="ieee")
    scores = tl.dot(rotary, q_rotary, scores, input_precision="ieee")
    scores = tl.where(pos[:, None] <= query_pos[None, :], scores, MASKED)
    new_top = tl.maximum(top, tl.max(scores, 0) * scale)
    p = tl.exp2(scores * scale - new_top[None, :])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(p, 0)
    acc = tl.dot(tl.trans(latent), p.to(latent.dtype), acc * shrink[None, :], input_precision="ieee")
    return acc, total, new_top, ids


@kernel
def _latent_kernel(
    q, blocks, out, sums, stats, seq_lens, query_start, table, slots, tiles,
    block_stride, token_stride, table_row, scale, splits,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    RANK: tl.constexpr, RANK_PAD: tl.constexpr, ROTARY: tl.constexpr, ROTARY_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    LISTED: tl.constexpr, ONES: tl.constexpr, SPLIT: tl.constexpr, SWAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (parts of the heads, tiles or rows, splits). A program handles TOKENS tokens, each with GROUP heads.

    LISTED: the tokens come from a list of tiles. Otherwise from a row, which is skipped unless it has one new token;
    ONES: every row has, and query_start is not read.
    """
    part, index, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if LISTED:
        slot, tile, token, n, seq_len = load_entry(tiles, index)
        if n == 0:
            return
    else:
        token, n, tile = index, 1, 0
        if not ONES:
            token = tl.load(query_start + index)
            n = tl.load(query_start + index + 1) - token
            if n != 1:
                return
        seq_len = tl.load(seq_lens + index)
        slot = tl.load(slots + index).to(tl.int32)
    old = seq_len - n  # entries before the row's new tokens
    begin, end = 0, old + tl.minimum(tile + TOKENS, n)
    if SPLIT:
        each = tl.cdiv(tl.cdiv(end, BLOCK_N), splits) * BLOCK_N
        begin = split * each
        end = tl.minimum(begin + each, end)
        if begin >= end:  # a split without entries, which the merge does not read
            return

    m = tl.arange(0, ROWS)
    query, head = m // GROUP, part * GROUP + m % GROUP
    valid = (tile + query < n) & (m < TOKENS * GROUP) & (head < NUM_HEADS)
    query_pos = old + tile + query
    # Rows without a query repeat another one, so that loads need no mask. They are not stored.
    row = (token + tile).to(tl.int64) + tl.minimum(query, n - 1 - tile)
    q_offsets = (row * NUM_HEADS + tl.minimum(head, NUM_HEADS - 1)) * (RANK + ROTARY)
    q_tile = load_rows(q, q_offsets, RANK, RANK_PAD)
    q_rotary = load_rows(q + RANK, q_offsets, ROTARY, ROTARY_PAD)

    total = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], MASKED, tl.float32)
    row_table = table + slot.to(tl.int64) * table_row
    ids = tl.load(row_table + tl.minimum(begin + tl.arange(0, BLOCK_N), end - 1) // BLOCK_SIZE)
    if SWAP:
        acc = tl.zeros([RANK_PAD, ROWS], tl.float32)
        q_tile, q_rotary = tl.trans(q_tile), tl.trans(q_rotary)
        for start in range(begin, end, BLOCK_N):
            acc, total, top, ids = _attend_entries_swapped(
                acc, total, top, ids, q_tile, q_rotary, query_pos, start, end, blocks, row_table, scale,
                block_stride, token_stride, RANK, RANK_PAD, ROTARY, ROTARY_PAD, BLOCK_SIZE, BLOCK_N,
            )  # fmt: skip
        acc = tl.trans(acc)
    else:
        acc = tl.zeros([ROWS, RANK_PAD], tl.float32)
        for start in range(begin, end, BLOCK_N):
            acc, total, top, ids = _attend_entries(
                acc, total, top, ids, q_tile, q_rotary, query_pos, start, end, blocks, row_table, scale,
                block_stride, token_stride, RANK, RANK_PAD, ROTARY, ROTARY_PAD, BLOCK_SIZE, BLOCK_N,
            )  # fmt: skip

    dim = tl.arange(0, RANK_PAD)
    mask = valid[:, None] & (dim < RANK)[None, :]
    if SPLIT:  # sums [row, head, split, rank]; stats [..., 2]: sum of exponentials, and top score
        to = (index * NUM_HEADS + head) * splits + split
        tl.store(sums + to[:, None].to(tl.int64) * RANK + dim[None, :], acc, mask=mask)
        tl.store(stats + to * 2, total, mask=valid)
        tl.store(stats + to * 2 + 1, top, mask=valid)
    else:
        result = acc / tl.where(total > 0, total, 1.0)[:, None]  # a row of length 0 pads a graph
        at = (row * NUM_HEADS + head) * RANK
        tl.store(out + at[:, None] + dim[None, :], result.to(out.dtype.element_ty), mask=mask)


def attend_latent_ones(
    q: torch.Tensor,
    blocks: torch.Tensor,
    out: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start: torch.Tensor | None,
    table: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
    splits: int = 1,
    tile: Tile | None = None,
) -> None:
    """Compute attention for all rows with one new token and write it to `out`.

    Args:
        q: [tokens, heads, rank + rotary dim], contiguous.
        blocks: [blocks, block size, rank + rotary dim], the last dimension contiguous.
        out: written, [tokens, heads * rank].
        seq_lens: int32 [rows], new tokens included; 0 for padding.
        query_start: int32 [rows + 1], or None if every row has exactly one token.
        table: the block table, int32 [slots, blocks].
        slots: int64 [rows], the row of `table` of each row.
        scale: factor of the scores.
        splits: programs that the entries of a row are divided among (see `latent_splits`).
        tile: sizes of a program, for benchmarks; None to choose them.
    """
    rows, heads, rank = seq_lens.shape[0], q.shape[1], out.shape[1] // q.shape[1]
    used = tile or latent_tile(heads, q.shape[2], q.element_size(), target_of(q.device))
    sums = stats = out
    if splits > 1:
        sums = torch.empty(rows * heads * splits * rank, dtype=torch.float32, device=q.device)
        stats = torch.empty(rows * heads * splits * 2, dtype=torch.float32, device=q.device)
    ones = query_start is None
    starts = seq_lens if query_start is None else query_start
    _launch(
        q, blocks, out, sums, stats, seq_lens, starts, table, slots, seq_lens, rows, scale, splits, used,
        listed=False, ones=ones, tokens=1,
    )  # fmt: skip
    if splits > 1:
        merge_splits(sums, stats, out, seq_lens, query_start, heads, splits, used.keys)


def attend_latent_tiles(
    q: torch.Tensor,
    blocks: torch.Tensor,
    out: torch.Tensor,
    table: torch.Tensor,
    tiles: torch.Tensor,
    scale: float,
    tile: Tile | None = None,
) -> None:
    """Compute causal attention for the listed tiles and write it to `out`.

    Args:
        q, blocks, out, table, scale: as in `attend_latent_ones`.
        tiles: the list from `list_tiles`, with `latent_tokens(...)` tokens per tile.
        tile: sizes of a program, for benchmarks; None to choose them.
    """
    heads = q.shape[1]
    used = tile or latent_tile(heads, q.shape[2], q.element_size(), target_of(q.device), several=True)
    tokens = max(used.rows // heads, 1)
    _launch(
        q, blocks, out, out, out, tiles, tiles, table, tiles, tiles, tiles.shape[0], scale, 1, used,
        listed=True, ones=False, tokens=tokens,
    )  # fmt: skip


def _launch(
    q: torch.Tensor,
    blocks: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    stats: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start: torch.Tensor,
    table: torch.Tensor,
    slots: torch.Tensor,
    tiles: torch.Tensor,
    programs: int,
    scale: float,
    splits: int,
    tile: Tile,
    *,
    listed: bool,
    ones: bool,
    tokens: int,
) -> None:
    heads, dim = q.shape[1:]
    rank = out.shape[1] // heads
    group = min(heads, tile.rows)
    pdl = target_of(q.device).has_dependent_launch
    _latent_kernel[(triton.cdiv(heads, group), programs, splits)](
        q, blocks, out, sums, stats, seq_lens, query_start, table, slots, tiles,
        blocks.stride(0), blocks.stride(1), table.stride(0), score_factors(scale, None)[0], splits,
        NUM_HEADS=heads, GROUP=group, TOKENS=tokens, ROWS=tile.rows,
        RANK=rank, RANK_PAD=pad(rank), ROTARY=dim - rank, ROTARY_PAD=pad(dim - rank),
        BLOCK_SIZE=blocks.shape[1], BLOCK_N=tile.keys, LISTED=listed, ONES=ones, SPLIT=splits > 1, SWAP=swaps(tile),
        PDL=pdl, num_warps=tile.warps, num_stages=tile.stages, launch_pdl=pdl,
    )  # fmt: skip


# ------------------------------------------------------------------------------------ sizes of the work


def latent_tile(heads: int, dim: int, itemsize: int, target: Target, several: bool = False) -> Tile:
    """Return the tile for entries of `dim` numbers, or the smallest one if none fits in shared memory.

    The first tile of each list was tuned on an H200 (benchmarks/latent.py).

    Args:
        heads: query heads.
        dim: numbers of an entry.
        itemsize: bytes per number.
        target: the GPU.
        several: the program handles several tokens of a row.
    """
    smallest = [Tile(16, 32, 4, 1), Tile(16, 16, 4, 1)]
    tiles = smallest
    if target.has_matrix_units and itemsize == 2:
        many = [Tile(64, 64, 8, 2), Tile(64, 32, 8, 2), Tile(32, 32, 4, 2)]
        few = [Tile(16, 64, 4, 3), Tile(16, 32, 4, 2)]
        tiles = [*(many if several or heads > 16 else few), *smallest]
    return next((tile for tile in tiles if latent_fits(tile, dim, itemsize, target)), tiles[-1])


def swaps(tile: Tile) -> bool:
    """Return whether a program multiplies transposed matrices, which is faster with many query rows."""
    return tile.rows > 16


def latent_fits(tile: Tile, dim: int, itemsize: int, target: Target) -> bool:
    """Return whether a program with this tile fits in the shared memory of `target`."""
    width = dim if target.has_matrix_units else 2 * dim
    buffers = max(tile.stages, 1)
    elements = (tile.rows + buffers * tile.keys) * width + tile.rows * tile.keys
    return elements * max(itemsize, 2) + _SPARE_BYTES <= target.shared_bytes


def latent_tokens(heads: int, dim: int, itemsize: int, target: Target) -> int:
    """Return the number of new tokens that one listed tile covers."""
    return max(latent_tile(heads, dim, itemsize, target, several=True).rows // heads, 1)


def latent_splits(rows: int, heads: int, max_len: int, dim: int, itemsize: int, target: Target) -> int:
    """Return the number of programs per row and part of the heads that fills the device, a power of two."""
    tile = latent_tile(heads, dim, itemsize, target)
    programs = rows * triton.cdiv(heads, tile.rows)
    tiles = triton.cdiv(max_len, tile.keys)
    wanted = max(1, min(target.sms * 2 // programs, tiles, _MAX_SPLITS))
    return 1 << (wanted.bit_length() - 1)
