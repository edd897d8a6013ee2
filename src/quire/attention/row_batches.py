"""Parts of a step: the batch of some of its rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from quire.attention.base import ForwardBatch, Tokens


def select_rows(batch: ForwardBatch, rows: np.ndarray) -> tuple[ForwardBatch, Tokens]:
    """Return the batch of some rows of a step, and the indices of their tokens.

    Args:
        batch: a step whose row lengths the host knows.
        rows: ascending integers, the rows.
    """
    counts = batch.num_tokens
    assert counts is not None, "rows of a captured step cannot be selected"
    device, new = batch.seq_lens.device, counts[rows]
    ends = counts.cumsum()
    tokens = np.concatenate([np.arange(ends[row] - counts[row], ends[row]) for row in rows])
    token_at, row_at = _index(tokens, device), _index(rows, device)
    selected = replace(
        batch,
        input_ids=batch.input_ids[token_at],
        positions=batch.positions[token_at],
        kv_slots=batch.kv_slots[token_at],
        query_start=to_device(np.concatenate(([0], new.cumsum())).astype(np.int32), device),
        seq_lens=batch.seq_lens[row_at],
        slots=batch.slots[row_at],
        num_tokens=new,
        seq_bounds=batch.seq_bounds[rows],
        others=[],
    )
    return selected, token_at


def _index(numbers: np.ndarray, device: torch.device) -> Tokens:
    """Return ascending indices as a slice if they follow each other, else as a tensor."""
    first, last = int(numbers[0]), int(numbers[-1])
    if last - first + 1 == len(numbers):
        return slice(first, last + 1)
    return to_device(numbers.astype(np.int64), device)


def to_device(numbers: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy numbers of the host into a tensor of the device, without waiting for it."""
    host = torch.from_numpy(numbers)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
