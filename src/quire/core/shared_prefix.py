"""The search for blocks that rows of a batch share, so that attention reads their keys and values only once.

Without it, a step that decodes many requests with one system prompt reads the same keys and values once per row
(Hydragen, arXiv:2402.05099). One group of rows is found: those that begin with the most common blocks. The result
holds until the batch changes, which is rare.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Protocol

import numpy as np

from quire.types import Request

MIN_ROWS = 16  # fewer sharing rows are not worth it
MIN_TOKENS = 256  # fewer shared tokens are not worth it


class SharedPrefix(Protocol):
    """A search for the blocks that rows share."""

    def find(self, rows: Sequence[Request], batch: Hashable) -> np.ndarray | None:
        """Find the blocks that many rows begin with.

        Args:
            rows: the requests of a step in which each row runs one token.
            batch: a key of the rows; equal keys stand for equal rows.

        Returns:
            int32 [rows], the number of tokens of each row in the shared blocks (0 for rows that do not share them), or
            None if too few rows share too few tokens.
        """
        ...


class NoSharedPrefix:
    """A `SharedPrefix` that never finds any."""

    def find(self, rows: Sequence[Request], batch: Hashable) -> np.ndarray | None:
        return None


class CommonBlocks:
    """A `SharedPrefix` that compares block tables by bisection, and keeps the result for the latest batch.

    It compares the tables of group `group`, which has no window: rows that share blocks of one such group hold the same
    tokens in all of them.
    """

    def __init__(self, block_size: int, group: int = 0) -> None:
        self._block_size, self._group = block_size, group
        self._batch: Hashable = None
        self._found: np.ndarray | None = None

    def find(self, rows: Sequence[Request], batch: Hashable) -> np.ndarray | None:
        if len(rows) < MIN_ROWS:
            return None
        if batch != self._batch:
            self._batch, self._found = batch, self._search(rows)
        return self._found

    def _search(self, rows: Sequence[Request]) -> np.ndarray | None:
        # If rows share a block, they share all blocks before it. The last block of a row takes its new tokens, so
        # it is never shared.
        low = -(-MIN_TOKENS // self._block_size) - 1
        tables = [request.tables[self._group].blocks for request in rows]
        long = [table for table in tables if len(table) > low + 1]
        if len(long) < MIN_ROWS:
            return None
        ((block, count),) = Counter(table[low] for table in long).most_common(1)
        if count < MIN_ROWS:
            return None
        sharing = [table for table in long if table[low] == block]
        high = min(map(len, sharing)) - 1
        while high - low > 1:  # bisect: block `low` is shared; `high` is not, or ends a row
            middle = (low + high) // 2
            low, high = (middle, high) if self._equal(sharing, middle) else (low, middle)
        tokens, block = (low + 1) * self._block_size, sharing[0][low]
        found = [tokens if len(table) > low + 1 and table[low] == block else 0 for table in tables]
        return np.array(found, np.int32)

    def _equal(self, tables: list[list[int]], index: int) -> bool:
        wanted = tables[0][index]
        return all(table[index] == wanted for table in tables)
