"""Which rows of a batch begin with the same blocks, so that attention can read them once for all of them.

A step that decodes many requests behind one system prompt reads its keys and values once for each row;
they are the same bytes (Hydragen, arXiv:2402.05099). The rows are those that begin with the blocks that most
rows begin with. What is found holds until the batch changes, which is seldom.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Protocol

import numpy as np

from quire.types import Request

MIN_ROWS = 16  # sharing rows below which nothing is gained
MIN_TOKENS = 256  # likewise


class SharedPrefix(Protocol):
    def find(self, rows: Sequence[Request], batch: Hashable) -> np.ndarray | None:
        """int32 [rows]: how many tokens of each row are in the shared blocks (0 for rows that do not share
        them), or None where too few share too little. Equal values of `batch` stand for equal rows."""
        ...


class NoSharedPrefix:
    def find(self, rows: Sequence[Request], batch: Hashable) -> np.ndarray | None:
        return None


class CommonBlocks:
    """Owns the answer for the last batch that it was asked about."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._batch: Hashable = None
        self._found: np.ndarray | None = None

    def find(self, rows: Sequence[Request], batch: Hashable) -> np.ndarray | None:
        if len(rows) < MIN_ROWS:
            return None
        if batch != self._batch:
            self._batch, self._found = batch, self._search(rows)
        return self._found

    def _search(self, rows: Sequence[Request]) -> np.ndarray | None:
        # Where one block is the same, so are all before it. The last block of a row takes its new tokens and is
        # never shared.
        low = -(-MIN_TOKENS // self._block_size) - 1
        long = [request.blocks for request in rows if len(request.blocks) > low + 1]
        if len(long) < MIN_ROWS:
            return None
        ((block, count),) = Counter(table[low] for table in long).most_common(1)
        if count < MIN_ROWS:
            return None
        sharing = [table for table in long if table[low] == block]
        high = min(map(len, sharing)) - 1
        while high - low > 1:  # blocks up to `low` are the same, `high` is not or is a row's last
            middle = (low + high) // 2
            low, high = (middle, high) if self._equal(sharing, middle) else (low, middle)
        tokens, block = (low + 1) * self._block_size, sharing[0][low]
        found = [tokens if len(r.blocks) > low + 1 and r.blocks[low] == block else 0 for r in rows]
        return np.array(found, np.int32)

    def _equal(self, tables: list[list[int]], index: int) -> bool:
        wanted = tables[0][index]
        return all(table[index] == wanted for table in tables)
