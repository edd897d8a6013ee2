"""Attention of the rows of prompts over keys and values that were expanded from latents (layers/mla.py).

Keys and values exist for one piece of the cache at a time, in one dense buffer. A piece holds segments of one or more
rows. The kernel runs once per piece; sums and scores of a row that has several segments are carried from one to the
next in memory.
"""

from __future__ import annotations

import torch
import triton.language as tl

from quire.kernels.attention.tile import MASKED, Tile, load_rows, pad, score_factors
from quire.kernels.jit import kernel
from quire.kernels.target import Target, target_of

_SPARE_BYTES = 4096  # of shared memory, for reductions across warps
# A tile is a row of _ENTRY int32: some new tokens of a row, and a segment of the row's keys.
ENTRY = 8
_ENTRY = tl.constexpr(ENTRY)
_ROW = tl.constexpr(0)
_TOKEN = tl.constexpr(1)  # the row's first token, counted within the batch
_FIRST = tl.constexpr(2)  # the tile's first token, counted within its row
_NEW_TOKENS = tl.constexpr(3)  # of the row
_KEY = tl.constexpr(4)  # position of the segment's first key
_COUNT = tl.constexpr(5)  # keys of the segment
_PLACE = tl.constexpr(6)  # of its first key in the piece
_ENDS = tl.constexpr(7)  # BEGINS and ENDS, if the segment is the first or last that the tile sees
BEGINS, ENDS = 1, 2


@kernel
def _expanded_kernel(
    q, expanded, rotary_keys, out, sums, stats, seq_lens, tiles, rotary_token, scale,
    NUM_HEADS: tl.constexpr, CONTENT: tl.constexpr, CONTENT_PAD: tl.constexpr, ROTARY: tl.constexpr,
    ROTARY_PAD: tl.constexpr, VALUE: tl.constexpr, VALUE_PAD: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    CARRIES: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, heads). Programs of one head follow each other, so that they share its keys in the L2 cache."""
    entry, head = tiles + tl.program_id(0) * _ENTRY, tl.program_id(1)
    token, tile, n = tl.load(entry + _TOKEN), tl.load(entry + _FIRST), tl.load(entry + _NEW_TOKENS)
    first, count, place = tl.load(entry + _KEY), tl.load(entry + _COUNT), tl.load(entry + _PLACE)
    old = tl.load(seq_lens + tl.load(entry + _ROW)) - n  # keys before the row's new tokens

    query = tile + tl.arange(0, ROWS)
    valid, query_pos = query < n, old + query
    # Rows past the last query repeat it and are not stored.
    row = ((token + tl.minimum(query, n - 1)) * NUM_HEADS + head).to(tl.int64)
    q_content = load_rows(q, row * (CONTENT + ROTARY), CONTENT, CONTENT_PAD)
    q_rotary = load_rows(q + CONTENT, row * (CONTENT + ROTARY), ROTARY, ROTARY_PAD)

    dim = tl.arange(0, VALUE_PAD)
    at = row[:, None] * VALUE + dim[None, :]
    stored = valid[:, None] & (dim < VALUE)[None, :]
    if CARRIES:
        ends = tl.load(entry + _ENDS)
        begun = (ends & 1) == 0
        acc = tl.load(sums + at, mask=stored & begun, other=0.0)
        total = tl.load(stats + row * 2, mask=valid & begun, other=0.0)
        top = tl.load(stats + row * 2 + 1, mask=valid & begun, other=MASKED)
    else:
        acc = tl.zeros([ROWS, VALUE_PAD], tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        top = tl.full([ROWS], MASKED, tl.float32)

    end = tl.minimum(count, old + tl.minimum(tile + ROWS, n) - first)
    for start in range(0, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        # Past the end, load the last key again instead of masking; no query sees it.
        there = (place + tl.minimum(key, end - 1)).to(tl.int64)
        offsets = (there * NUM_HEADS + head) * (CONTENT + VALUE)
        content = load_rows(expanded, offsets, CONTENT, CONTENT_PAD)
        rotary = load_rows(rotary_keys, there * rotary_token, ROTARY, ROTARY_PAD)
        scores = tl.dot(q_content, tl.trans(content), input_precision="ieee")
        scores = tl.dot(q_rotary, tl.trans(rotary), scores, input_precision="ieee")
        if (first + start + BLOCK_N - 1 > old + tile) | (start + BLOCK_N > end):
            visible = (first + key[None, :] <= query_pos[:, None]) & (key < end)[None, :]
            scores = tl.where(visible, scores, MASKED)
        new_top = tl.maximum(top, tl.max(scores, 1) * scale)
        p = tl.exp2(scores * scale - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(p, 1)
        values = load_rows(expanded + CONTENT, offsets, VALUE, VALUE_PAD)
        acc = tl.dot(p.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
        top = new_top

    if CARRIES:
        tl.store(sums + at, acc, mask=stored & ((ends & 2) == 0))
        tl.store(stats + row * 2, total, mask=valid & ((ends & 2) == 0))
        tl.store(stats + row * 2 + 1, top, mask=valid & ((ends & 2) == 0))
        stored &= (ends & 2) != 0
    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=stored)


def attend_expanded_tiles(
    q: torch.Tensor,
    expanded: torch.Tensor,
    rotary_keys: torch.Tensor,
    out: torch.Tensor,
    carried: tuple[torch.Tensor, torch.Tensor] | None,
    seq_lens: torch.Tensor,
    tiles: torch.Tensor,
    scale: float,
    tile: Tile | None = None,
) -> None:
    """Attend to the keys and values of one piece.

    Args:
        q: rotated queries [tokens, heads, content dim + rotary dim], contiguous.
        expanded: [keys, heads, content dim + value dim], contiguous: keys without their rotated part, and values.
        rotary_keys: [keys, rotary dim], the last dimension contiguous: the rotated part of keys, of all heads.
        out: [tokens, heads, value dim], contiguous; written by tiles with ENDS.
        carried: fp32 [tokens, heads, value dim] and [tokens, heads, 2], which carry sums from piece to piece; None if
            all tiles have BEGINS and ENDS.
        seq_lens: int32 [rows], new tokens included.
        tiles: int32 [tiles, 8], with as many tokens per tile as `tile` has rows.
        scale: factor of the scores.
        tile: sizes of a program; None: those of `expanded_tile`.
    """
    heads, value = out.shape[1:]
    rotary, content = rotary_keys.shape[1], expanded.shape[2] - value
    used = tile or expanded_tile(content, rotary, value, q.element_size(), target_of(q.device))
    sums, stats = carried or (out, out)
    _expanded_kernel[(tiles.shape[0], heads)](
        q, expanded, rotary_keys, out, sums, stats, seq_lens, tiles, rotary_keys.stride(0), score_factors(scale, None)[0],
        NUM_HEADS=heads, CONTENT=content, CONTENT_PAD=pad(content), ROTARY=rotary, ROTARY_PAD=pad(rotary),
        VALUE=value, VALUE_PAD=pad(value), ROWS=used.rows, BLOCK_N=used.keys,
        CARRIES=carried is not None, num_warps=used.warps, num_stages=used.stages,
    )  # fmt: skip


def expanded_tile(content: int, rotary: int, value: int, itemsize: int, target: Target) -> Tile:
    """Return the tile for heads of these sizes, or the smallest one if none fits in shared memory.

    The tiles are those of heads of 128 and 256 numbers (long.py); they have not been tuned.
    """
    tiles = [Tile(32, 32, 4, 1), Tile(32, 16, 4, 1), Tile(16, 16, 4, 1)]
    if target.has_matrix_units and itemsize == 2:
        tiles = [Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(64, 64, 4, 2), Tile(64, 32, 4, 2), *tiles]
    size = itemsize if target.has_matrix_units else 4  # others keep fp32 copies
    needed = ((tile, _expanded_bytes(tile, content, rotary, value, size)) for tile in tiles)
    return next((tile for tile, size in needed if size <= target.shared_bytes), tiles[-1])


def _expanded_bytes(tile: Tile, content: int, rotary: int, value: int, itemsize: int) -> int:
    """Return an upper bound of the shared memory of a program: queries, stages of keys and values, probabilities."""
    key = pad(content) + pad(rotary)
    numbers = tile.rows * (key + tile.keys) + tile.stages * tile.keys * (key + pad(value))
    return numbers * itemsize + _SPARE_BYTES
