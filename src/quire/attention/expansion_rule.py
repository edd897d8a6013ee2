"""`ExpansionRule`: which rows of latent attention attend to expanded keys and values instead of absorbed ones.

Per head, with a latent of width R, keys of c numbers (and r rotated ones) and values of v, a row of n new tokens
behind p older ones has P = n (p + (n + 1) / 2) pairs of a query and a key. In multiply-adds:

- Absorbed (layers/mla.py): P (2 R + r) for the pairs, and n R (c + v) to convert queries and results.
- Expanded: P (c + r + v) for the pairs, and (p + n) R (c + v) to expand all latents.

So a row saves P (2 R - c - v) - p R (c + v). That is positive for every prompt without a past, and behind any past if
n > R (c + v) / (2 R - c - v): 171 tokens for DeepSeek (R = 512, c = v = 128). Rows that decode or verify draft
tokens never get there.

An expanded row needs shapes that depend on its length, so its step is not part of a CUDA graph. `least_saved` is what
a row must save to be worth that.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Multiply-adds per layer that a row must save on a GPU, because the kernels of its step are launched one by one instead of
# from a graph. On an H200 with a slow host, the 27 layers of DeepSeek-V2-Lite take 44 ms to launch. Absorbed prompts of
# 2,048 tokens, of which expanding saves 2.6e10, take 38 ms, those of 3,072 (5.8e10) 62 ms.
GPU_LEAST_SAVED = 4e10


@dataclass(frozen=True, slots=True)
class ExpansionRule:
    """The sizes that decide. Heads are those of one rank."""

    heads: int
    rank: int
    content_dim: int
    value_dim: int
    least_saved: float = 0.0  # multiply-adds of all heads of a layer
    # Memory that expanded rows take beyond that of absorbed rows, whose queries and sums are longer: one piece of keys
    # and values.
    scratch_bytes: int = 0

    def saved(self, new: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return the multiply-adds of a layer that each row saves by expanding, negative if it costs more.

        Args:
            new: integers [rows], new tokens.
            lengths: integers [rows], upper bounds of the tokens of each row, new ones included.
        """
        n = new.astype(np.float64)
        past, width = lengths - n, self.content_dim + self.value_dim
        pairs = n * (past + (n + 1) / 2)
        return self.heads * (pairs * (2 * self.rank - width) - past * self.rank * width)

    def rows(self, new: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return which rows expand, bool [rows]. A row's answer depends on no other row."""
        return (new > 1) & (self.saved(new, lengths) > self.least_saved)


class NoExpansion(ExpansionRule):
    """The rule by which all rows are absorbed."""

    def rows(self, new: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        return np.zeros(len(new), np.bool_)


NO_EXPANSION: ExpansionRule = NoExpansion(0, 0, 0, 0)
