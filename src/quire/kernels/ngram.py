"""Prompt lookup on a GPU: find the latest earlier occurrence of a row's last tokens, and copy what followed it.

`speculation/ngram.py` has the same in plain PyTorch. One program serves a row; it reads the row's tokens once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.jit import kernel

_BLOCK = 2048  # positions per iteration


@kernel(do_not_specialize=["max_len", "slots_stride"])
def _propose_kernel(
    tokens,  # int32 [slots, max_len]
    num_tokens,  # int32 [slots]
    slots,  # [rows], `slots_stride` apart
    counts,  # [rows]
    max_len,
    slots_stride,
    LONGEST: tl.constexpr,
    MOST: tl.constexpr,  # power of two, at least the largest count
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    count = tl.load(counts + row).to(tl.int32)
    if count == 0:
        return
    slot = tl.load(slots + row * slots_stride).to(tl.int64)
    known = tl.load(num_tokens + slot)
    own = tokens + slot * max_len
    best = tl.zeros([BLOCK], tl.int64)  # length of the match * 2^32 + position behind it
    for begin in range(0, known, BLOCK):
        position = begin + tl.arange(0, BLOCK)
        matches = (position > 0) & (position < known)
        length = tl.zeros([BLOCK], tl.int64)
        for back in tl.static_range(1, LONGEST + 1):
            last = tl.load(own + tl.maximum(known - back, 0))
            before = tl.load(own + position - back, mask=matches & (position >= back), other=-1)
            matches = matches & (position >= back) & (before == last)
            length += matches.to(tl.int64)
        best = tl.maximum(best, tl.where(length > 0, (length << 32) + position, 0))
    source = (tl.max(best, 0) & 0xFFFFFFFF).to(tl.int32)
    period = tl.maximum(known - source, 1)
    offset = tl.arange(0, MOST)
    inside = (offset < count) & (known + offset < max_len)
    draft = tl.load(own + source + offset % period, mask=inside, other=0)
    tl.store(own + known + offset, draft, mask=inside)


def propose(
    tokens: torch.Tensor,
    num_tokens: torch.Tensor,
    slots: torch.Tensor,
    counts: torch.Tensor,
    most: int,
    longest: int,
) -> None:
    """Write draft tokens behind the known tokens of each row's slot.

    Args:
        tokens: updated, int32 [slots, length].
        num_tokens: int32 [slots], the number of known tokens.
        slots: integers [rows].
        counts: integers [rows], contiguous: drafts of each row.
        most: upper bound of `counts`.
        longest: longest suffix to look for.
    """
    _propose_kernel[(len(slots),)](
        tokens, num_tokens, slots, counts, tokens.shape[1], slots.stride(0),
        LONGEST=longest, MOST=triton.next_power_of_2(most), BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
