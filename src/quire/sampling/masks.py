"""Packed bit masks of allowed tokens, as grammars make them: bit v % 32 of word v // 32 is token v.

Only the rows that a grammar constrains are sent and touched. `apply_masks` is the twin of kernels/sampling/masks.py.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding


def unpack(bits: Tensor, vocab_size: int) -> Tensor:
    """float32 [rows, vocab] from int32 [rows, ceil(vocab / 32)]: 0 where the bit is set, else -inf."""
    byte = torch.arange(256, device=bits.device).unsqueeze(1)
    is_set = (byte >> torch.arange(8, device=bits.device)).bitwise_and_(1).bool()
    table = torch.where(is_set, 0.0, float("-inf"))  # [256, 8]: what each byte of a mask adds to eight logits
    return embedding(bits.view(torch.uint8).int(), table).flatten(1)[:, :vocab_size]


def apply_masks(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Set the logits of tokens that are not allowed to -inf, in place.

    `logits` float32 [n, vocab], `rows` int64 [k], all different, `bits` int32 [k, ceil(vocab / 32)]. Adds, which
    on a CPU is ten times as fast as choosing.
    """
    logits.index_add_(0, rows, unpack(bits, logits.shape[-1]))
