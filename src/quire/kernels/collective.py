"""All-reduce of few bytes between GPUs that can write each other's memory.

Every rank writes its words into the buffers of the others, each packed with the number of the call into 8 bytes, which
arrive together. A rank waits until the numbers in its own buffer are those of the call, and adds. So a sum takes one
trip over the link: no barrier, no fence, no read of remote memory (the LL protocol of NCCL, for any number of ranks).

A program owns the same place of the buffer in every call, and uses its two halves in turn. The half that a rank writes
in call n was read by its owner in call n - 2, which ended before the owner took part in call n - 1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.jit import kernel

BLOCK = 512  # words of 4 bytes per program
MAX_BLOCKS = 512  # programs of the largest call; all run at once, because each waits for its peers
MAX_BYTES = 4 * BLOCK * MAX_BLOCKS  # of the largest tensor


def buffer_bytes(size: int) -> int:
    """Return the bytes of the buffer that each of `size` ranks needs, in memory that the others can write."""
    return 2 * MAX_BLOCKS * size * BLOCK * 8


def takes(x: torch.Tensor) -> bool:
    """Return whether `x` can be summed by `all_reduce`."""
    return 0 < x.nbytes <= MAX_BYTES and x.nbytes % 4 == 0 and x.dtype in NUMBER_TYPES


NUMBER_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


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
    grid = (triton.cdiv(words, BLOCK),)
    _all_reduce[grid](
        x.view(-1).view(torch.int32),
        out.view(-1).view(torch.int32),
        buffers,
        calls,
        words,
        RANK=rank,
        SIZE=size,
        TYPE=NUMBER_TYPES[x.dtype],
        BLOCK=BLOCK,
        MAX_BLOCKS=MAX_BLOCKS,
        num_warps=4,
    )
    return out


@triton.jit
def pack(word, call):
    """Return 32-bit words with the number of the call above them, int64."""
    return (word.to(tl.int64) & 0xFFFFFFFF) | (call.to(tl.int64) << 32)


@triton.jit
def zero_words(BLOCK: tl.constexpr):
    """Return zeros for the lower and the upper number of each word, fp32."""
    return tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)


@triton.jit
def split_word(word, TYPE: tl.constexpr):
    """Return the lower and the upper 16-bit number of each word, in fp32."""
    low = (word & 0xFFFF).to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
    high = ((word >> 16) & 0xFFFF).to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def add_words(low, high, word, TYPE: tl.constexpr):
    """Return the sums with the numbers of each word added. A word of fp32 has only a lower number."""
    if tl.float32 == TYPE:
        low += word.to(tl.float32, bitcast=True)
    else:
        more_low, more_high = split_word(word, TYPE)
        low += more_low
        high += more_high
    return low, high


@triton.jit
def join_words(low, high, TYPE: tl.constexpr):
    """Return the words of the numbers, rounded to TYPE."""
    if tl.float32 == TYPE:
        word = low.to(tl.int32, bitcast=True)
    else:
        lower = low.to(TYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        word = lower | (high.to(TYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16)
    return word


@kernel
def _all_reduce(
    x,
    out,
    buffers,
    calls,
    words,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    TYPE: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
):
    block = tl.program_id(0)
    call = tl.load(calls + block) + 1
    lane = tl.arange(0, BLOCK)
    at = block * BLOCK + lane
    inside = at < words
    mine = tl.load(x + at, inside, 0)
    packed = (mine.to(tl.int64) & 0xFFFFFFFF) | (call.to(tl.int64) << 32)
    place = ((call & 1) * MAX_BLOCKS + block) * SIZE * BLOCK
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            theirs = tl.load(buffers + peer).to(tl.pointer_type(tl.int64))
            tl.store(theirs + place + RANK * BLOCK + lane, packed, inside)
    ours = tl.load(buffers + RANK).to(tl.pointer_type(tl.int64))
    low = tl.zeros((BLOCK,), tl.float32)
    high = tl.zeros((BLOCK,), tl.float32)
    for source in tl.static_range(SIZE):
        if source == RANK:
            word = mine
        else:
            here = ours + place + source * BLOCK + lane
            got = tl.load(here, inside, 0, volatile=True)
            while tl.sum(((got >> 32).to(tl.int32) != call).to(tl.int32) * inside.to(tl.int32), 0) > 0:
                got = tl.load(here, inside, 0, volatile=True)
            word = got.to(tl.int32)
        if tl.float32 == TYPE:
            low += word.to(tl.float32, bitcast=True)
        else:
            low += (word & 0xFFFF).to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
            high += ((word >> 16) & 0xFFFF).to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
    if tl.float32 == TYPE:
        total = low.to(tl.int32, bitcast=True)
    else:
        lower = low.to(TYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        total = lower | (high.to(TYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16)
    tl.store(out + at, total, inside)
    tl.store(calls + block, call)
