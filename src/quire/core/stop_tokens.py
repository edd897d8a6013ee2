"""The token ids that end any unfinished request, so that a step finds the rows that may have ended at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np


class StopTokens:
    """The stop tokens of all unfinished requests."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()  # requests by stop token; no zeros
        self._ids = np.empty(0, np.int64)  # sorted

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
        self._ids = np.array(sorted(self._counts), np.int64)

    def mark(self, tokens: np.ndarray) -> np.ndarray | None:
        """Return which of `tokens` end some request, though perhaps not their own; None if no request has stop tokens."""
        if not len(self._ids):
            return None
        return self._ids.take(self._ids.searchsorted(tokens), mode="clip") == tokens
