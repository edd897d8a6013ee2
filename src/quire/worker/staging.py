"""Host-to-device copies: all integers of a step in one transfer from a ring of pinned buffers.

With `depth` steps in flight, depth + 1 ring entries are enough: when an entry is used again, its step has been retired,
so its copy is done. On a CPU the arrays are used in place.
"""

from __future__ import annotations

import numpy as np
import torch


class Staging:
    """Ring of pinned buffers, one for each of `depth` steps in flight and one more."""

    def __init__(self, device: torch.device, depth: int) -> None:
        self._device = device
        self._pinned = device.type == "cuda"
        self._ring = [torch.empty(0, dtype=torch.int64)] * (depth + 1)
        self._entry = 0
        self._used = 0

    def begin(self) -> None:
        """Start a step: take the next entry of the ring."""
        self._entry = (self._entry + 1) % len(self._ring)
        self._used = 0

    def send(self, *arrays: np.ndarray) -> tuple[torch.Tensor, ...]:
        """Copy the arrays to the device in one transfer and return them as int64 tensors."""
        if not self._pinned:
            return tuple(torch.from_numpy(np.ascontiguousarray(a, np.int64)) for a in arrays)
        sizes = [a.size for a in arrays]
        total = sum(sizes)
        buffer = self._reserve(total)
        host, begin = buffer.numpy(), 0
        for array, size in zip(arrays, sizes):
            host[begin : begin + size] = array
            begin += size
        return torch.split(buffer.to(self._device, non_blocking=True), sizes)

    def send_into(self, target: torch.Tensor, array: np.ndarray) -> None:
        """Overwrite the int32 `target` on the device with `array`, of the same shape."""
        if not self._pinned:
            target.copy_(torch.from_numpy(array))
            return
        source = self._reserve(-(-array.size // 2)).view(torch.int32)[: array.size].view(array.shape)
        source.numpy()[...] = array
        target.copy_(source, non_blocking=True)

    def _reserve(self, count: int) -> torch.Tensor:
        ring = self._ring[self._entry]
        if self._used + count > ring.shape[0]:
            # A copy in flight may still read the old buffer; torch's pinned allocator waits for it.
            ring = torch.empty(max(2 * count, 1 << 16), dtype=torch.int64, pin_memory=True)
            self._ring[self._entry], self._used = ring, 0
        part = ring[self._used : self._used + count]
        self._used += count
        return part
