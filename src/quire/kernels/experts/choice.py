"""`ExpertChoice`: the experts of a step's tokens, as a router returns them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ExpertChoice:
    """The experts of a step's tokens, and their weights.

    Attributes:
        ids: experts of each token, all different, integers [tokens, top_k].
        weights: float32 [tokens, top_k].
        active: from the kernels, for few tokens: the chosen experts, each once, then -1, int32 [slots].
        counts: from the kernels, for more tokens: how often each expert was chosen by each block of tokens, int32
            [blocks, experts].
        rows: tokens per block of `counts`.
    """

    ids: torch.Tensor
    weights: torch.Tensor
    active: torch.Tensor | None = None
    counts: torch.Tensor | None = None
    rows: int = 0


def rows_of_tile(tokens: int) -> int:
    """Return the rows of a tile of at most 16 tokens, which the matrix units multiply in groups of 8."""
    return 8 if tokens <= 8 else 16
