"""KV slots of the rows and tokens of a step, for back ends in plain PyTorch: a range where they follow each other."""

from __future__ import annotations

import torch

from quire.attention.base import ForwardBatch
from quire.attention.entries import Slots


def row_slots(batch: ForwardBatch, row: int, length: int) -> Slots:
    """Return the KV slots of one row's first `length` positions."""
    tables = batch.block_table[:, : -(-length // batch.block_size)]
    blocks = tables.index_select(0, batch.slots[row : row + 1])[0]
    if blocks.device.type == "cpu" and _are_consecutive(blocks):
        begin = int(blocks[0]) * batch.block_size
        return slice(begin, begin + length)
    positions = torch.arange(length, device=blocks.device)
    return table_slots(blocks.unsqueeze(0), positions, batch.block_size)[0]


def new_slots(batch: ForwardBatch) -> Slots:
    """Return the KV slots of the step's tokens."""
    slots = batch.kv_slots
    if slots.device.type == "cpu" and _are_consecutive(slots):
        begin = int(slots[0])
        return slice(begin, begin + len(slots))
    return slots


def part_of_slots(slots: Slots, tokens: slice) -> Slots:
    """Return the slots of a range of tokens."""
    if isinstance(slots, slice):
        return slice(slots.start + tokens.start, slots.start + tokens.stop)
    return slots[tokens]


def table_slots(table: torch.Tensor, positions: torch.Tensor, block_size: int) -> torch.Tensor:
    """Return the KV slot of each position of each row, int64 [rows, positions]."""
    if block_size == 1:
        return table[:, : positions.shape[0]].long()
    blocks = table.index_select(1, positions // block_size).long()
    return blocks * block_size + positions % block_size


def _are_consecutive(numbers: torch.Tensor) -> bool:
    """Return whether integers on the host are consecutive and ascending."""
    host = numbers.numpy()
    return bool((host[1:] - host[:-1] == 1).all())
