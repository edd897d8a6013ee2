"""The counts of requests as columns of integers, so that a step handles all of its rows with a few array operations.

`Request` reads and writes its row through properties; the scheduler's code for whole batches reads and writes columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from quire.types.request_state import Request

# The columns. `Request` describes them, except for EXTRA and VISIT_AT.
KNOWN, COMPUTED, LIMIT, ROOM, FULL_AT = range(5)
# The next four are 0 in rows that decode plainly, so that one look at all of them is enough.
EXTRA = 5  # tokens that it wants besides one: known + pending - computed - 1; steady while it decodes
PAUSED, CATCHING_UP, DRAFTS = 6, 7, 8
DECODING_COLUMNS = 9  # those before are read for each row that decodes
VISIT_AT = 9  # known tokens from which on a sampled token needs more than to be appended: its limit, or 0
SLOT, LAST_STEP = 10, 11
NO_DRAFTS = 12  # 1: its rows must not verify draft tokens
NUM_COLUMNS = 13

UNUSED_ROW = 0  # the row of requests that have given up theirs; its contents mean nothing
TAIL = 32  # most tokens of a request that are not in its array yet; a power of two

# As arrays, because numpy takes longer to convert a Python number than to add it.
_ONE, _TAIL, _LAST_PLACE = np.array(1), np.array(TAIL), np.array(TAIL - 1)
assert TAIL & (TAIL - 1) == 0, "a place in a tail is the low bits of a count"


class RequestTable:
    """One row of integers for each request that is unfinished or has a step in flight.

    Attributes:
        data: int64 [columns, rows], indexed by the constants of this module.
        cells: the same memory, for quick access to single numbers.
        tails: int32 [rows, TAIL], the newest tokens of each request: token i is at place i modulo TAIL.
    """

    def __init__(self, rows: int = 1) -> None:
        """Start empty, with room for `rows` requests. More room is made when it is needed."""
        self._owners: list[Request | None] = [None]
        self._free: list[int] = []
        self._resize(np.zeros((NUM_COLUMNS, 1), np.int64), np.zeros((1, TAIL), np.int32), 1 + rows)

    def _resize(self, data: np.ndarray, tails: np.ndarray, rows: int) -> None:
        used = data.shape[1]
        self.data, self.tails = np.zeros((NUM_COLUMNS, rows), np.int64), np.zeros((rows, TAIL), np.int32)
        self.data[:, :used], self.tails[:used] = data, tails
        self.cells, self._tokens = self.data.data, self.tails.reshape(-1)
        self._token_bytes = self.tails.data.cast("B")
        self._owners += [None] * (rows - used)
        self._free += range(rows - 1, used - 1, -1)

    def __len__(self) -> int:
        return len(self._owners) - len(self._free) - 1

    def add(self, request: Request) -> int:
        """Return the row of a new request, which is all zeros."""
        if not self._free:
            self._resize(self.data, self.tails, 2 * len(self._owners))
        row = self._free.pop()
        self._owners[row], self.data[:, row] = request, 0
        return row

    def remove(self, row: int) -> None:
        """Free a row that no step in flight refers to. UNUSED_ROW stays."""
        if row != UNUSED_ROW:
            self._owners[row] = None
            self._free.append(row)

    def owner(self, row: int) -> Request:
        """Return the request of a row in use."""
        request = self._owners[row]
        assert request is not None
        return request

    def append(self, rows: np.ndarray, known: np.ndarray, tokens: np.ndarray) -> None:
        """Append one pending token to each of the requests in `rows`, which are distinct.

        Args:
            rows: int64 [requests].
            known: the known tokens of each before, int64 [requests].
            tokens: integers [requests].
        """
        places = known & _LAST_PLACE
        self._tokens[rows * _TAIL + places] = tokens
        self.data[KNOWN][rows] = known + _ONE
        full = places == _LAST_PLACE
        if np.count_nonzero(full):
            for row in rows[full].tolist():
                self.owner(row).flush()

    def tail(self, row: int, begin: int, end: int) -> memoryview:
        """Return the int32 tokens from `begin` to `end` of a request, none of which are in its array, as bytes."""
        # Tokens move to the array when the last place is filled, so none wraps around.
        first = row * TAIL + (begin & (TAIL - 1))
        return self._token_bytes[4 * first : 4 * (first + end - begin)]
