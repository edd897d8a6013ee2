"""`PartVocabulary`: logits over a whole vocabulary from those of a part of its tokens."""

from __future__ import annotations

import torch

from quire.kernels import available


class PartVocabulary:
    """A map from logits of some tokens to logits of all, in which the others are impossible.

    Args:
        ids: the tokens, int64 [rows].
        vocab_size: number of all tokens.
    """

    def __init__(self, ids: torch.Tensor, vocab_size: int) -> None:
        self._ids, self._vocab_size = ids, vocab_size
        self._row_of: torch.Tensor | None = None  # of each token, or -1
        if available(ids.device):
            self._row_of = torch.full((vocab_size,), -1, dtype=torch.int32, device=ids.device)
            self._row_of[ids] = torch.arange(len(ids), dtype=torch.int32, device=ids.device)

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Return [n, vocab_size] for [n, rows]."""
        if self._row_of is None:
            full = logits.new_full((len(logits), self._vocab_size), float("-inf"))
            return full.index_copy_(1, self._ids, logits)
        # Imported here: an installation for CPUs has no Triton.
        from quire.kernels.draft_pairs import spread

        return spread(logits, self._row_of)
