"""Sampling parameters as columns indexed by slot: staged on the host, sent to the device in one copy.

`SlotTable` holds scalars, `SlotLists` ragged lists of token ids. Staging a slot overwrites all it had
before. The host keeps its own copy of whatever decides *which* work a step needs, so that no step has
to ask the device. Copies come from pinned memory and never wait.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

RowIndex = slice | Tensor  # rows of a batch; the full slice is a view, so a uniform batch is never copied


class TokenColumns(Protocol):
    """The columns of the device state that sampling reads. S slots; the last is the padding dummy."""

    @property
    def tokens(self) -> Tensor: ...  # int32 [S, L]

    @property
    def num_tokens(self) -> Tensor: ...  # int32 [S], prompt and output known on the device

    @property
    def prompt_len(self) -> Tensor: ...  # int32 [S]


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A device copy of a host array that does not wait for the device."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def rows_where(flags: np.ndarray, device: torch.device) -> RowIndex:
    """The rows whose flag is set, as an index that needs no copy if that is all of them."""
    if flags.all():
        return slice(None)
    return to_device(np.flatnonzero(flags), device)


class SlotTable:
    """Scalar columns of 64 bits, integers or float64, one row per slot."""

    def __init__(self, names: tuple[str, ...], num_slots: int, device: torch.device) -> None:
        self._column = {name: i for i, name in enumerate(names)}
        self._host = np.zeros((num_slots, len(names)), dtype=np.int64)
        self._host_floats = self._host.view(np.float64)
        self._table = torch.zeros((num_slots, len(names)), dtype=torch.int64, device=device)
        self._staged: set[int] = set()
        self._device = device

    def stage(self, slot: int, values: dict[str, int | float]) -> None:
        """Set every column of `slot`; a float lands in a float column, an int in an integer column."""
        for name, column in self._column.items():
            value = values[name]
            target = self._host_floats if isinstance(value, float) else self._host
            target[slot, column] = value
        self._staged.add(slot)

    def flush(self) -> None:
        """Send the staged rows: one copy and one scatter, however many there are."""
        if not self._staged:
            return
        slots = np.array(sorted(self._staged), dtype=np.int64)
        packed = to_device(np.concatenate((slots[:, None], self._host[slots]), axis=1), self._device)
        self._table.index_copy_(0, packed[:, 0], packed[:, 1:])
        self._staged.clear()

    @property
    def values(self) -> Tensor:
        """int64 [slots, columns] on the device, in place for good; floats as the bits of float64."""
        return self._table

    def gather(self, slots: Tensor) -> RowColumns:
        return RowColumns(self._column, self._table[slots])


class RowColumns:
    """The columns of a table for the rows of one batch."""

    __slots__ = ("_column", "_floats", "_ints")

    def __init__(self, column: dict[str, int], values: Tensor) -> None:
        self._column = column
        self._ints = values  # [rows, columns]
        self._floats = values.view(torch.float64)

    def int32(self, name: str) -> Tensor:
        return self._ints[:, self._column[name]].to(torch.int32)

    def int64(self, name: str) -> Tensor:
        return self._ints[:, self._column[name]]

    def float32(self, name: str) -> Tensor:
        return self._floats[:, self._column[name]].float()

    def float64(self, name: str) -> Tensor:
        return self._floats[:, self._column[name]]


class SlotLists:
    """A ragged list of entries per slot; an entry is a few int64 fields, the first one a token id.

    All lists lie one after the other in one device array, rebuilt when a slot with entries is
    admitted. `expand` turns the slots of a batch into (row, entry) pairs with numpy arithmetic and
    keeps the answer while neither the lists nor the batch change, which is most of decoding.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._device = device
        self._lists: dict[int, list[list[int]]] = {}
        self._starts = np.zeros(num_slots, dtype=np.int64)
        self._lengths = np.zeros(num_slots, dtype=np.int64)
        self._pool = torch.zeros((0, 1), dtype=torch.int64, device=device)
        self._dirty = False
        self._key = b""
        self._expanded: tuple[Tensor, Tensor] | None = None

    def put(self, slot: int, entries: list[list[int]]) -> bool:
        """Replace the list of `slot`; True if it holds anything."""
        self._lists.pop(slot, None)
        self._lengths[slot] = len(entries)
        if entries:
            self._lists[slot] = entries
            self._dirty = True
        self._key = b""
        return bool(entries)

    def flush(self) -> None:
        if not self._dirty:
            return
        entries = [entry for owned in self._lists.values() for entry in owned]
        width = max(len(entry) for entry in entries)
        pool = np.full((len(entries), width), -1, dtype=np.int64)  # -1: no such field
        at = 0
        for slot, owned in self._lists.items():
            self._starts[slot] = at
            for entry in owned:
                pool[at, : len(entry)] = entry
                at += 1
        self._pool = to_device(pool, self._device)
        self._dirty = False
        self._key = b""

    def expand(self, slots_host: np.ndarray) -> tuple[Tensor, Tensor] | None:
        """(row of the batch [e], entry [e, fields]) for every entry of every row, or None."""
        key = slots_host.tobytes()
        if key != self._key:
            lengths = self._lengths[slots_host]
            ends = np.cumsum(lengths)
            total = int(ends[-1]) if ends.size else 0
            if total == 0:
                self._expanded = None
            else:
                rows = np.repeat(np.arange(len(slots_host)), lengths)
                first = np.repeat(self._starts[slots_host] - (ends - lengths), lengths)
                both = to_device(np.stack((rows, first + np.arange(total))), self._device)
                self._expanded = both[0], self._pool[both[1]]
            self._key = key
        return self._expanded
