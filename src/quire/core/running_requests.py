"""The running requests in order, as a list and as columns."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import compress
from typing import overload

import numpy as np

from quire.core.plan_builder import PlanRows
from quire.types import Request, RequestOrder
from quire.types.request_table import SLOT, RequestTable


def order_of(request: Request) -> RequestOrder:
    """Return the sort key of a request."""
    return request.order


class RunningRequests(Sequence[Request]):
    """The running requests, sorted by order.

    A batch seldom changes from one step to the next, so what follows from its requests alone is kept until it changes.
    Columns are replaced then, never modified, so steps in flight may keep them.
    """

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._requests: list[Request] = []
        # Their ids, and their rows in the table: a copy of these takes less time than to read them of each request.
        self._ids: list[str] = []
        self._table_rows = array("q")
        self._update()

    def _update(self) -> None:
        self._rows: np.ndarray | None = None
        self._columns: PlanRows | None = None

    def add(self, request: Request) -> None:
        """Add a request that has a slot."""
        at = self._place(request)
        self._requests.insert(at, request)
        self._ids.insert(at, request.id)
        self._table_rows.insert(at, request.row)
        self._update()

    def remove(self, request: Request) -> None:
        """Remove a request."""
        at = self._place(request)
        assert self._requests[at] is request, f"{request.id} is not running"
        del self._requests[at], self._ids[at], self._table_rows[at]
        self._update()

    def _place(self, request: Request) -> int:
        return bisect_left(self._requests, request.order, key=order_of)

    @property
    def rows(self) -> np.ndarray:
        """The row of each request in the table, int64. Read-only."""
        if self._rows is None:
            self._rows = np.array(self._table_rows, np.int64)
        return self._rows

    @property
    def decoding(self) -> PlanRows:
        """A row of one token for each request, with undefined `starts`."""
        if self._columns is None:
            self._columns = self._decoding(self._requests[:], self._ids[:], self.rows)
        return self._columns

    def decoding_of(self, chosen: np.ndarray) -> PlanRows:
        """Return `decoding` for some requests only: those chosen by bool [requests]."""
        flags = chosen.tobytes()
        requests, ids = compress(self._requests, flags), compress(self._ids, flags)
        return self._decoding(list(requests), list(ids), self.rows[chosen])

    def _decoding(self, requests: list[Request], ids: list[str], rows: np.ndarray) -> PlanRows:
        count = len(requests)
        slots = self._table.data[SLOT][rows].astype(np.int32)
        none, one = np.zeros(count, np.int32), np.ones(count, np.int32)
        return PlanRows(
            requests,
            ids,
            rows,
            slots,
            starts=none,
            num_tokens=one,
            drafts=none,
            most=np.ones(count, np.int64),
            samples=np.ones(count, np.bool_),
            total_drafts=0,
            num_sampling=count,
        )

    @overload
    def __getitem__(self, index: int) -> Request: ...
    @overload
    def __getitem__(self, index: slice) -> list[Request]: ...
    def __getitem__(self, index: int | slice) -> Request | list[Request]:
        return self._requests[index]

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)
