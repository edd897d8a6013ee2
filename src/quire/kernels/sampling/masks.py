"""Grammar masks on the device: the logits of forbidden tokens become -inf.

The kernel reads only the bits of the mask and writes only the forbidden logits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.jit import kernel

_BLOCK = 2048  # tokens per program: 64 words of bits


@kernel
def _forbid(
    logits,  # [n, vocab], rows `stride` apart
    stride,
    vocab,
    rows,  # int64 [k]
    bits,  # int32 [k, words]
    words,
    BLOCK: tl.constexpr,
) -> None:
    index = tl.program_id(0)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab
    word = tl.load(bits + index.to(tl.int64) * words + ids // 32, mask=inside, other=0)
    forbidden = inside & ((word >> (ids % 32)) & 1 == 0)
    row = tl.load(rows + index)
    tl.store(logits + row * stride + ids, float("-inf"), mask=forbidden)


def apply_masks(logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
    """Set the logits of forbidden tokens to -inf, in place.

    Args:
        logits: [n, vocab], the last dimension contiguous.
        rows: int64 [k], the rows of `logits` to mask.
        bits: int32 [k, ceil(vocab / 32)]. Bit t % 32 of word t // 32 is set if token t is allowed.
    """
    vocab = logits.shape[1]
    grid = (len(rows), triton.cdiv(vocab, _BLOCK))
    _forbid[grid](logits, logits.stride(0), vocab, rows, bits, bits.shape[1], BLOCK=_BLOCK)
