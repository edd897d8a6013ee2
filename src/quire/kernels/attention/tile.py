"""The inner step of all attention kernels, and the tile sizes that follow from the size of a head.

Blocks are [block, kv head, token, dim], so a tile of keys of one head is a few contiguous runs. Sums are fp32, and
fp32 inputs are multiplied in full precision.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from quire.kernels.attention.codes import key_numbers, paired_numbers, value_numbers
from quire.kernels.target import Target

_LOG2E = 1.4426950408889634
LOG2E = tl.constexpr(_LOG2E)
# The score of a masked key. It is finite, so that a tile without any visible key produces no NaN: its contribution to
# the sums is multiplied by exp2(MASKED - top) = 0 at the first visible key. It is a power of two, so that its product
# with the scale is exact, and a fused multiply-subtract of equal scores is exactly 0.
MASKED = tl.constexpr(-(2.0**100))


@triton.jit
def load_rows(base, offsets, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """Load rows of DIM elements at base + offsets, padded with 0 to DIM_PAD."""
    dim = tl.arange(0, DIM_PAD)
    at = base + offsets[:, None] + dim[None, :]
    if DIM == DIM_PAD:
        return tl.load(at)
    else:
        return tl.load(at, mask=(dim < DIM)[None, :], other=0.0)


@triton.jit
def loaded_once(offsets):
    """Return `offsets` [N] in a form from which Triton loads each number, and what it leads to, only once.

    Triton takes loads of fewer numbers than threads for cheap, and repeats them for each of their users in the layout of
    that user, in which a thread may have 16 of them. It repeats no scan, which here is one of single numbers.
    """
    return tl.reshape(tl.cumsum(offsets[:, None], 1), [offsets.shape[0]])


ALL_KEYS, LAST_KEYS, OWN_CHUNK = 0, 1, 2  # values of a kernel's WINDOW


def window_kind(window: int | None, chunked: bool) -> int:
    """Return the constant WINDOW of a kernel."""
    return ALL_KEYS if window is None else OWN_CHUNK if chunked else LAST_KEYS


@triton.jit
def first_key(pos, window, WINDOW: tl.constexpr):
    """Return the first key that a query at `pos` sees; it may be negative. WINDOW is not ALL_KEYS."""
    if WINDOW == 2:
        return pos // window * window
    else:
        return pos + 1 - window


@triton.jit
def attend_tile(
    acc, total, top, q, query_pos, low_pos, high_pos, start, end, keys, values, key_scales, value_scales, table,
    scale, cap, window, block_stride, token_stride, scale_block, scale_token,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, CODED: tl.constexpr, PAIRS: tl.constexpr, TO: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Advance the online softmax over the keys start .. start + BLOCK_N.

    `table` points to the row's block table, `keys` and `values` to the head. The queries are at positions low_pos ..
    high_pos; a tile that all of them see entirely needs no mask.

    CODED: keys and values are codes, whose scales are applied to scores and probabilities, so that the matrix unit
    multiplies exact codes. Then `q` and `scale` are those of `fp16_queries`, and TO is the dtype of probabilities and values.
    PAIRS: load values in pairs; `acc` is that of `split_sums`.
    ASM: whether to convert codes with PTX.

    Returns the new (acc, total, top).
    """
    pos = start + tl.arange(0, BLOCK_N)
    # Past the end, load the last key again instead of masking; no query sees it.
    there = tl.minimum(pos, end - 1)
    place = there // BLOCK_SIZE
    if CODED and BLOCK_N < 128:  # no program of codes has fewer threads
        place = loaded_once(place)
    block = tl.load(table + place)
    offsets = block.to(tl.int64) * block_stride + there % BLOCK_SIZE * token_stride
    k = load_rows(keys, offsets, DIM, DIM_PAD)
    of_score = scale
    if CODED:
        k = key_numbers(k, ASM)
        of_score = scale[:, None]
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
    if CODED:
        scale_offsets = block.to(tl.int64) * scale_block + there % BLOCK_SIZE * scale_token
        scores *= tl.load(key_scales + scale_offsets)[None, :]
    if CAPPED:
        scores = capped(scores, of_score, cap)
        scale = 1.0
        of_score = 1.0
    edge = start + BLOCK_N - 1 > low_pos
    if WINDOW:
        edge |= start < first_key(high_pos, window, WINDOW)
    if edge:
        visible = pos[None, :] <= query_pos[:, None]
        if WINDOW:
            visible &= pos[None, :] >= first_key(query_pos, window, WINDOW)[:, None]
        scores = tl.where(visible, scores, MASKED)
    new_top = tl.maximum(top, tl.max(scores, 1) * scale)
    p = tl.exp2(scores * of_score - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(p, 1)
    if CODED:
        p *= tl.load(value_scales + scale_offsets)[None, :]
    if PAIRS:
        pairs = values.to(tl.pointer_type(tl.int16), bitcast=True)
        pairs = load_rows(pairs, offsets // 2, DIM // 2, DIM_PAD // 2)
        v_even, v_odd = paired_numbers(pairs, values.dtype.element_ty, TO, ASM)
        even, odd = acc
        p = p.to(TO)
        even = tl.dot(p, v_even, even * shrink[:, None], input_precision="ieee")
        odd = tl.dot(p, v_odd, odd * shrink[:, None], input_precision="ieee")
        return (even, odd), total, new_top
    else:
        acc = acc * shrink[:, None]
        v = load_rows(values, offsets, DIM, DIM_PAD)
        if CODED:
            v = value_numbers(v, TO, ASM)
        return tl.dot(p.to(TO), v.to(TO), acc, input_precision="ieee"), total, new_top


@triton.jit
def add_sinks(acc, total, top, sinks, head):
    """Add each row's sink to the online softmax: a score that has no value, so only the sum grows."""
    score = tl.load(sinks + head) * LOG2E
    new_top = tl.maximum(top, score)
    shrink = tl.exp2(top - new_top)
    return acc * shrink[:, None], total * shrink + tl.exp2(score - new_top), new_top


@triton.jit
def capped(scores, scale, cap):
    """Return cap * tanh(x), where `scale` includes the 2 * log2(e) / cap that exp2 needs."""
    return cap - 2.0 * cap / (tl.exp2(scores * scale) + 1.0)


def score_factors(scale: float, soft_cap: float | None) -> tuple[float, float]:
    """Return the factors of q k^T and of a capped score that let the kernels use exp2 instead of exp."""
    if soft_cap is None:
        return scale * _LOG2E, 0.0
    return scale * 2 * _LOG2E / soft_cap, soft_cap * _LOG2E


class KVScales(NamedTuple):
    """The scales of keys and values that are codes: fp32 [blocks, kv heads, block size, 1], of equal strides.

    Static scales have strides of 0 on all axes but that of the heads, and are not written.
    """

    keys: torch.Tensor
    values: torch.Tensor
    static: bool


def scale_pointers(scales: KVScales | None, unused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tensors of scales for a kernel, or twice `unused`."""
    return (unused, unused) if scales is None else (scales.keys, scales.values)


def scale_strides(scales: KVScales | None) -> tuple[int, int, int]:
    """Return the strides of scales from block to block, head to head and token to token."""
    if scales is None:
        return 0, 0, 0
    block, head, token, _ = scales.keys.stride()
    return block, head, token


def pad(dim: int) -> int:
    """Round a head size up to a power of two that a matrix unit takes."""
    return max(16, triton.next_power_of_2(dim))


class Tile(NamedTuple):
    """The sizes of an attention program, and its compiler options."""

    rows: int  # query rows: tokens times the query heads of one KV head
    keys: int  # per iteration
    warps: int
    stages: int  # of the pipeline that loads keys and values
    registers: int | None = None  # limit per thread

    def with_rows(self, least: int) -> Tile:
        """Return the tile with at least `least` query rows."""
        return self._replace(rows=max(self.rows, triton.next_power_of_2(least)))

    def shared_bytes(self, dim: int, itemsize: int, target: Target) -> int:
        """Return an upper bound of the shared memory that a program takes.

        On sm90 and sm100, which have twice as much, it is an estimate. Matrix units read queries, keys, values and
        probabilities from shared memory; more than four stages double keys and values. Without matrix units, shared
        memory holds fp32 copies of two factors at a time. tests/kernels/compile_all.py compares the compiler's actual
        figure with the limit.
        """
        width = pad(dim)
        if not target.has_matrix_units:
            return (
                4 * max((self.rows + self.keys) * width, self.rows * self.keys + self.keys * width)
                + _SPARE_BYTES
            )
        buffers = 4 if self.stages > 4 else 2
        return itemsize * (self.rows * (width + self.keys) + buffers * self.keys * width) + _SPARE_BYTES


_SPARE_BYTES = 2048  # for reductions across warps


def fits(tile: Tile, dim: int, itemsize: int, target: Target) -> bool:
    """Return whether a program with this tile fits in the shared memory of `target`."""
    return tile.shared_bytes(dim, itemsize, target) <= target.shared_bytes


def first_fit(tiles: list[Tile], dim: int, itemsize: int, target: Target) -> Tile:
    """Return the first of `tiles` that fits in shared memory, or the last one, the smallest, if none does."""
    return next((tile for tile in tiles if fits(tile, dim, itemsize, target)), tiles[-1])
