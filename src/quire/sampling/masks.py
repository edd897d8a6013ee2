"""Packed bit masks of allowed tokens, as grammars make them: bit v % 32 of word v // 32 is token v.

Only the rows that a grammar constrains are sent and touched. `apply_masks` is the twin of kernels/masks.py.
"""

from __future__ import annotations

import torch
from torch import Tensor


def unpack(bits: Tensor, vocab_size: int) -> Tensor:
    """bool [rows, vocab] from int32 [rows, ceil(vocab / 32)]."""
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    words = (bits.unsqueeze(-1) >> shifts).bitwise_and_(1)  # [rows, words, 32]
    return words.flatten(1)[:, :vocab_size].bool()


def apply_masks(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Set the logits of tokens that are not allowed to -inf, in place.

    `logits` [n, vocab], `rows` int64 [k], all different, `bits` int32 [k, ceil(vocab / 32)].
    """
    forbidden = ~unpack(bits, logits.shape[-1])
    logits[rows] = logits[rows].masked_fill_(forbidden, float("-inf"))
