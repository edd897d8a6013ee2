"""Host-to-device copies: all integers of a step in one transfer from a ring of pinned buffers.

With `depth` steps in flight, depth + 1 ring entries are enough: when an entry is used again, its step has been retired,
so its copy is done. On a CPU the arrays are used in place.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

_LEAST_WRITES = 16  # of a packet


class WritePacket:
    """Buffers for `size` writes into an int32 tensor: the places and the values, on the host and on the device.

    Both are parts of one buffer, so sending them is one copy. All views of it are made once.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._host = torch.empty(size + size // 2, dtype=torch.int64, pin_memory=pinned)
        self._device = torch.empty_like(self._host, device=device) if pinned else self._host
        self._places = self._host.numpy()[:size]
        self._values = self._host.numpy()[size:].view(np.int32)
        self._device_places, self._device_values = self._device[:size], self._device[size:].view(torch.int32)

    def write(self, target: torch.Tensor, places: Sequence[np.ndarray], values: Sequence[np.ndarray]) -> None:
        """Set `target`[places] = values. The places are distinct, and at most as many as there is room for."""
        count = 0
        for column, numbers in zip(places, values):
            begin, count = count, count + len(column)
            self._places[begin:count], self._values[begin:count] = column, numbers
        # The room that is left repeats the last write.
        self._places[count:], self._values[count:] = self._places[count - 1], self._values[count - 1]
        self._device.copy_(self._host, non_blocking=True)
        target.index_copy_(0, self._device_places, self._device_values)


class Staging:
    """Ring of pinned buffers, one for each of `depth` steps in flight and one more."""

    def __init__(self, device: torch.device, depth: int) -> None:
        self._device = device
        self._pinned = device.type == "cuda"
        self._ring = [torch.empty(0, dtype=torch.int64)] * (depth + 1)
        self._packets: list[dict[int, WritePacket]] = [{} for _ in self._ring]  # by size
        self._entry = 0
        self._used = 0
        self._has_written = False  # since `begin`

    def begin(self) -> None:
        """Start a step: take the next entry of the ring."""
        self._entry = (self._entry + 1) % len(self._ring)
        self._used = 0
        self._has_written = False

    def write(self, target: torch.Tensor, places: Sequence[np.ndarray], values: Sequence[np.ndarray]) -> None:
        """Set entries of a tensor on the device, in one copy and one scatter. Called once in a step at most.

        Args:
            target: int32 [entries].
            places: distinct places in it, in one or more arrays.
            values: the integers to write there, likewise.
        """
        assert not self._has_written, "a second write would overwrite the first one before it is sent"
        self._has_written = True
        size, packets = _LEAST_WRITES, self._packets[self._entry]
        count = sum(map(len, places))
        while size < count:
            size *= 2
        if (packet := packets.get(size)) is None:
            packet = packets[size] = WritePacket(size, self._device)
        packet.write(target, places, values)

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
