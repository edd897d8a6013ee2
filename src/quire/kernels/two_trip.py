"""All-reduce in two trips, for tensors that are too large to send whole to every rank.

Each rank owns a slice of the words. On the first trip every rank sends the others their slices, and each adds what it
gets. On the second trip each sends its sums to all. Per rank that is 2 (R - 1) / R of the tensor instead of R - 1.

Words travel as in `collective.py`: packed with the number of the call into 8 bytes, so there is no barrier. Every
program exchanges a full block with every rank in every call, so all ranks have ended call n - 2 of a program when one of
them begins its call n.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.collective import NUMBER_TYPES, add_words, join_words, pack, zero_words
from quire.kernels.jit import kernel

BLOCK = 512  # words of 4 bytes that a program exchanges with each rank
MAX_BLOCKS = 512  # programs of the largest call; all run at once, because each waits for its peers


def buffer_bytes(size: int) -> int:
    """Return the bytes of the buffer that each of `size` ranks needs, in memory that the others can write."""
    return 2 * MAX_BLOCKS * 2 * size * BLOCK * 8


def takes(x: torch.Tensor, size: int) -> bool:
    """Return whether `size` ranks can sum `x` by `all_reduce`."""
    words = x.nbytes // 4
    return 0 < words <= size * BLOCK * MAX_BLOCKS and x.nbytes % 4 == 0 and x.dtype in NUMBER_TYPES


def all_reduce(
    x: torch.Tensor, buffers: torch.Tensor, calls: torch.Tensor, rank: int, size: int
) -> torch.Tensor:
    """Return the sum of the ranks' tensors `x`, added in fp32 in the order of ranks, so all ranks get the same bits.

    Args:
        x: contiguous, for which `takes` returns True.
        buffers: int64 [size], addresses of the ranks' buffers, which must be zero before the first call.
        calls: int32 [MAX_BLOCKS], calls that each program has taken part in.
        rank: of this process.
        size: number of ranks.
    """
    out = torch.empty_like(x)
    words = x.nbytes // 4
    owned = triton.cdiv(words, size)
    _two_trips[(triton.cdiv(owned, BLOCK),)](
        x.view(-1).view(torch.int32),
        out.view(-1).view(torch.int32),
        buffers,
        calls,
        words,
        owned,
        RANK=rank,
        SIZE=size,
        TYPE=NUMBER_TYPES[x.dtype],
        BLOCK=BLOCK,
        MAX_BLOCKS=MAX_BLOCKS,
        num_warps=4,
    )
    return out


@kernel
def _two_trips(
    x,
    out,
    buffers,  # each int64 [halves, MAX_BLOCKS, trips, SIZE, BLOCK]
    calls,
    words,
    owned,  # words of each rank's slice
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    TYPE: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
):
    block = tl.program_id(0)
    call = tl.load(calls + block) + 1
    lane = tl.arange(0, BLOCK)
    at = block * BLOCK + lane  # in each slice
    place = ((call & 1) * MAX_BLOCKS + block) * 2 * SIZE * BLOCK
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            inside = (at < owned) & (peer * owned + at < words)
            theirs = tl.load(buffers + peer).to(tl.pointer_type(tl.int64))
            packed = pack(tl.load(x + peer * owned + at, inside, 0), call)
            tl.store(theirs + place + RANK * BLOCK + lane, packed)
    ours = tl.load(buffers + RANK).to(tl.pointer_type(tl.int64))
    own = (at < owned) & (RANK * owned + at < words)
    mine = tl.load(x + RANK * owned + at, own, 0)
    low, high = zero_words(BLOCK)
    for source in tl.static_range(SIZE):
        if source == RANK:
            word = mine
        else:
            here = ours + place + source * BLOCK + lane
            got = tl.load(here, volatile=True)
            while tl.sum(((got >> 32).to(tl.int32) != call).to(tl.int32), 0) > 0:
                got = tl.load(here, volatile=True)
            word = got.to(tl.int32)
        low, high = add_words(low, high, word, TYPE)
    total = join_words(low, high, TYPE)
    second = place + SIZE * BLOCK
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            theirs = tl.load(buffers + peer).to(tl.pointer_type(tl.int64))
            tl.store(theirs + second + RANK * BLOCK + lane, pack(total, call))
    tl.store(out + RANK * owned + at, total, own)
    for owner in tl.static_range(SIZE):
        if owner != RANK:
            here = ours + second + owner * BLOCK + lane
            got = tl.load(here, volatile=True)
            while tl.sum(((got >> 32).to(tl.int32) != call).to(tl.int32), 0) > 0:
                got = tl.load(here, volatile=True)
            inside = (at < owned) & (owner * owned + at < words)
            tl.store(out + owner * owned + at, got.to(tl.int32), inside)
    tl.store(calls + block, call)
