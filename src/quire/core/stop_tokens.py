"""The tokens that may end an unfinished request, so that a step finds the rows that may have ended at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from quire.types import NO_TOKEN, NOT_FINITE


class StopTokens:
    """The stop tokens of all unfinished requests, and the sentinels for a missing token."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()  # requests by stop token; no zeros
        self._sort()

    def add(self, ids: Iterable[int]) -> None:
        """Add the stop tokens of a new request."""
        before = len(self._counts)
        self._counts.update(ids)
        if len(self._counts) != before:
            self._sort()

    def remove(self, ids: Iterable[int]) -> None:
        """Remove the stop tokens of a request that ends."""
        self._counts.subtract(ids)
        if not all(self._counts[token] for token in ids):
            self._counts = +self._counts
            self._sort()

    def _sort(self) -> None:
        self._ids = np.array(sorted({NOT_FINITE, NO_TOKEN, *self._counts}), np.int32)

    def mark(self, tokens: np.ndarray) -> np.ndarray:
        """Return which of `tokens` end some request, though perhaps not their own, bool as int32 `tokens`."""
        return self._ids.take(self._ids.searchsorted(tokens), mode="clip") == tokens
