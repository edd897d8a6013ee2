"""Scales of INT4 weights in the order in which the persistent kernel reads them: behind the rows of their tile."""

from __future__ import annotations

import torch

from quire.kernels.persistent.schedule import TILE

ZERO_MASK = 31  # as in multiply.h
DEFAULT_ZERO = 8


def scale_words(scale: torch.Tensor, zero: torch.Tensor | None, gated: bool) -> torch.Tensor:
    """Return the scales and zeros of a weight as words, int32 [tiles, groups, 8].

    A word is the scale in fp32, whose five lowest bits are the zero. They are empty in a scale that was fp16 or bf16.

    Args:
        scale: [groups, outputs].
        zero: uint8 [groups, outputs], at most 31; None: 8 everywhere.
        gated: the weight is gate|up, and a tile has four rows of each.
    """
    bits = scale.float().contiguous().view(torch.int32)
    words = (bits + (ZERO_MASK + 1) // 2 & ~ZERO_MASK) | (DEFAULT_ZERO if zero is None else zero.int())
    parts = 2 if gated else 1
    by_tile = words.view(len(words), parts, -1, TILE // parts)  # [groups, parts, tiles, rows]
    return by_tile.permute(2, 0, 1, 3).contiguous().flatten(2)
