"""All-reduce, addition of the residual and RMS norm in one kernel, for the few rows of a decode step.

Each program has one row. It sends the row to every rank and adds what arrives, as `collective.py` does in one trip. The
sum and the new residual are rounded to the dtype of x, as by the separate kernels, so both ways give the same bits up to
the order of the norm's reduction.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.collective import NUMBER_TYPES, add_words, join_words, pack, split_word, zero_words
from quire.kernels.jit import kernel

MAX_ROWS = 64  # all programs run at once, because each waits for its peers
MAX_WORDS = 4096  # of a row


def buffer_bytes(size: int) -> int:
    """Return the bytes of the buffer that each of `size` ranks needs, in memory that the others can write."""
    return 2 * MAX_ROWS * size * MAX_WORDS * 8


def takes(x: torch.Tensor) -> bool:
    """Return whether rows x [rows, width] can be summed and normed by `all_reduce_add_norm`."""
    rows, width = x.shape
    words = width * x.dtype.itemsize // 4
    return 0 < rows <= MAX_ROWS and words <= MAX_WORDS and x.dtype in _HALF and width % 2 == 0


_HALF = (torch.bfloat16, torch.float16)


def all_reduce_add_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    buffers: torch.Tensor,
    calls: torch.Tensor,
    rank: int,
    size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the RMS norm of the ranks' summed x plus residual, and that sum, both [rows, width] as new tensors.

    Args:
        x: contiguous [rows, width], this rank's part of the sum, for which `takes` returns True.
        residual: [rows, width], equal on all ranks.
        weight: [width], of the dtype of x.
        eps: added to the mean of squares.
        buffers: int64 [size], addresses of the ranks' buffers, which must be zero before the first call.
        calls: int32 [MAX_ROWS], calls that each program has taken part in.
        rank: of this process.
        size: number of ranks.
    """
    rows, width = x.shape
    words = width // 2
    block = triton.next_power_of_2(words)
    normed, total = torch.empty_like(x), torch.empty_like(x)
    _sum_and_norm[(rows,)](
        *(t.view(torch.int32) for t in (x, residual, weight, normed, total)),
        buffers,
        calls,
        eps,
        RANK=rank,
        SIZE=size,
        TYPE=NUMBER_TYPES[x.dtype],
        WORDS=words,
        BLOCK=block,
        MAX_ROWS=MAX_ROWS,
        MAX_WORDS=MAX_WORDS,
        num_warps=min(max(block // 128, 1), 16),
    )
    return normed, total


@kernel
def _sum_and_norm(
    x,  # words of two numbers each, [rows, WORDS]
    residual,  # [rows, WORDS]
    weight,  # [WORDS]
    normed,  # [rows, WORDS]
    total,  # [rows, WORDS]
    buffers,  # each int64 [halves, MAX_ROWS, SIZE, MAX_WORDS]
    calls,
    eps,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    TYPE: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    MAX_WORDS: tl.constexpr,
):
    row = tl.program_id(0)
    call = tl.load(calls + row) + 1
    lane = tl.arange(0, BLOCK)
    inside = lane < WORDS
    at = row * WORDS + lane
    mine = tl.load(x + at, inside, 0)
    place = ((call & 1) * MAX_ROWS + row) * SIZE * MAX_WORDS
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            theirs = tl.load(buffers + peer).to(tl.pointer_type(tl.int64))
            tl.store(theirs + place + RANK * MAX_WORDS + lane, pack(mine, call), inside)
    # While the words travel.
    scale_low, scale_high = split_word(tl.load(weight + lane, inside, 0), TYPE)
    old_low, old_high = split_word(tl.load(residual + at, inside, 0), TYPE)
    ours = tl.load(buffers + RANK).to(tl.pointer_type(tl.int64))
    low, high = zero_words(BLOCK)
    for source in tl.static_range(SIZE):
        if source == RANK:
            word = mine
        else:
            here = ours + place + source * MAX_WORDS + lane
            got = tl.load(here, inside, 0, volatile=True)
            while tl.sum(((got >> 32).to(tl.int32) != call).to(tl.int32) * inside.to(tl.int32), 0) > 0:
                got = tl.load(here, inside, 0, volatile=True)
            word = got.to(tl.int32)
        low, high = add_words(low, high, word, TYPE)
    low, high = split_word(join_words(low, high, TYPE), TYPE)  # rounded
    new = join_words(low + old_low, high + old_high, TYPE)
    tl.store(total + at, new, inside)
    low, high = split_word(new, TYPE)
    factor = tl.rsqrt(tl.sum(low * low + high * high, 0) / (2 * WORDS) + eps)
    tl.store(normed + at, join_words(low * factor * scale_low, high * factor * scale_high, TYPE), inside)
    tl.store(calls + row, call)
