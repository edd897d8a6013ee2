"""The tokens that may end an unfinished request, so that a step finds the rows that may have ended at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from quire.types import NO_TOKEN, NOT_FINITE

_PLACES = 1 << 18  # more than most vocabularies have tokens


class StopTokens:
    """The stop tokens of all unfinished requests, and the sentinels for a missing token.

    A token is marked at the place of its id modulo `_PLACES`. The sentinels are negative, so theirs are the last.
    """

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter((NOT_FINITE % _PLACES, NO_TOKEN % _PLACES))  # requests by place
        self._marked = np.zeros(_PLACES, np.bool_)
        self._marked[list(self._counts)] = True

    def add(self, ids: Iterable[int]) -> None:
        """Add the stop tokens of a new request."""
        for place in [token % _PLACES for token in ids]:
            self._counts[place] += 1
            self._marked[place] = True

    def remove(self, ids: Iterable[int]) -> None:
        """Remove the stop tokens of a request that ends."""
        for place in [token % _PLACES for token in ids]:
            self._counts[place] -= 1
            if not self._counts[place]:
                del self._counts[place]
                self._marked[place] = False

    def mark(self, tokens: np.ndarray) -> np.ndarray:
        """Return which of `tokens` may end some request, though perhaps not their own, bool as int32 `tokens`."""
        return self._marked.take(tokens, mode="wrap")
