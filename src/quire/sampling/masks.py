"""Packed bit masks of allowed tokens, as grammars make them: bit v % 32 of word v // 32 is token v.

Applied on the device to all rows at once; a row without a grammar has every bit set.
"""

from __future__ import annotations

import torch
from torch import Tensor


def unpack(mask: Tensor, vocab_size: int) -> Tensor:
    """bool [rows, vocab] from int32 [rows, ceil(vocab / 32)]."""
    shifts = torch.arange(32, dtype=torch.int32, device=mask.device)
    bits = (mask.unsqueeze(-1) >> shifts).bitwise_and_(1)  # [rows, words, 32]
    return bits.flatten(1)[:, :vocab_size].bool()


def apply_mask(logits: Tensor, mask: Tensor) -> None:
    """Set the logits of tokens that are not allowed to -inf, in place."""
    logits.masked_fill_(~unpack(mask, logits.shape[-1]), float("-inf"))
