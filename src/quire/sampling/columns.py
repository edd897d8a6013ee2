"""Sampling parameters as device columns indexed by request slot.

Parameters are staged on the host and sent to the device in one copy. `SlotTable` holds scalars, `SlotLists` ragged
lists of token ids. Staging a slot overwrites everything it had before. The host keeps a copy of the values that
determine which work a step needs, so no step reads them from the device. Copies use pinned memory and do not
block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

RowIndex = slice | Tensor  # rows of a batch; the full slice gives a view, so a uniform batch is not copied


class TokenColumns(Protocol):
    """The columns of the device state that sampling reads, of S slots. The last slot is the dummy for padding."""

    @property
    def tokens(self) -> Tensor: ...  # int32 [S, L]

    @property
    def num_tokens(self) -> Tensor: ...  # int32 [S], prompt and output tokens known on the device

    @property
    def prompt_len(self) -> Tensor: ...  # int32 [S]


@dataclass(slots=True)
class LogitRows:
    """The rows of logits of a step: for each the request slot, and the number of tokens in front of the new one.

    A request that verifies k draft tokens has 1 + k rows. In the row behind j drafts, these count as its tokens; they
    are in the token column behind the known ones.
    """

    slots_host: np.ndarray  # [n]
    slots: Tensor  # int64 [n], the device copy of `slots_host`
    lengths: Tensor  # int32 [n]


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy a host array to the device without waiting for the device."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def rows_where(flags: np.ndarray, device: torch.device) -> RowIndex:
    """Return an index of the rows whose flag is set. If all are set, indexing with it copies nothing."""
    if flags.all():
        return slice(None)
    return to_device(np.flatnonzero(flags), device)


class SlotTable:
    """Table of 64-bit scalar columns (integers or float64), one row per slot."""

    def __init__(self, names: tuple[str, ...], num_slots: int, device: torch.device) -> None:
        self._column = {name: i for i, name in enumerate(names)}
        self._host = np.zeros((num_slots, len(names)), dtype=np.int64)
        self._host_floats = self._host.view(np.float64)
        self._table = torch.zeros((num_slots, len(names)), dtype=torch.int64, device=device)
        self._staged: set[int] = set()
        self._device = device

    def stage(self, slot: int, values: dict[str, int | float]) -> None:
        """Set every column of `slot`. The type of a value decides how it is stored: int64 or float64."""
        for name, column in self._column.items():
            value = values[name]
            target = self._host_floats if isinstance(value, float) else self._host
            target[slot, column] = value
        self._staged.add(slot)

    def flush(self) -> None:
        """Send all staged rows to the device with one copy and one scatter."""
        if not self._staged:
            return
        slots = np.array(sorted(self._staged), dtype=np.int64)
        packed = to_device(np.concatenate((slots[:, None], self._host[slots]), axis=1), self._device)
        self._table.index_copy_(0, packed[:, 0], packed[:, 1:])
        self._staged.clear()

    @property
    def values(self) -> Tensor:
        """Return the device table, int64 [slots, columns], at a fixed address; floats are stored as float64 bits."""
        return self._table

    def gather(self, slots: Tensor) -> RowColumns:
        """Return the columns of the rows whose slots are given, int64 [rows]."""
        return RowColumns(self._column, self._table[slots])


class RowColumns:
    """The columns of a slot table, gathered for the rows of one batch; each accessor returns [rows]."""

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
    """A ragged list of entries per slot. An entry is a few int64 fields, the first of which is a token id.

    All lists are concatenated in one device array, which is rebuilt when a slot with entries is admitted. `expand`
    computes the (row, entry) pairs of a batch in numpy. It caches the result until the lists or the batch change,
    so most decoding steps reuse it.
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
        """Replace the list of `slot`, and return whether the new list has entries."""
        self._lists.pop(slot, None)
        self._lengths[slot] = len(entries)
        if entries:
            self._lists[slot] = entries
            self._dirty = True
        self._key = b""
        return bool(entries)

    def flush(self) -> None:
        """Send all lists to the device if any of them changed."""
        if not self._dirty:
            return
        entries = [entry for owned in self._lists.values() for entry in owned]
        width = max(len(entry) for entry in entries)
        pool = np.full((len(entries), width), -1, dtype=np.int64)  # -1: the entry is shorter
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
        """Return all entries of a batch: their rows, int64 [entries], and fields, int64 [entries, fields].

        Returns None if no row of the batch has an entry.
        """
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
