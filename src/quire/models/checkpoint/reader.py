"""`Reader`: copies tensors out of files into place, with several threads, while its owner does other things.

A thread reads a piece of a tensor into a buffer of its own (pinned, for a GPU) and sends it from there to
where it belongs, so files are read and the copy engine runs at the same time. Memory is bounded by the
threads' buffers, whatever the size of the files. Pieces that are cut by columns, transposed or of another
dtype go through device memory and are rearranged there.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from quire.types import ModelError

_THREADS = 8
_PIECE_BYTES = 32 << 20
_READ_ONLY = os.O_RDONLY | getattr(os, "O_BINARY", 0)  # Windows would translate line ends
_seeking = threading.Lock()


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file: row-major numbers from byte `offset` on."""

    name: str
    file: Path
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _TensorPiece:
    """Consecutive rows of a tensor, and where they go."""

    stored: StoredTensor
    file: int  # descriptor
    offset: int  # of the first byte, in the file
    shape: tuple[int, ...]
    cols: slice  # what is wanted of each row
    destination: torch.Tensor
    ready: torch.cuda.Event | None  # from when on the destination may be written


class Reader:
    """Reads for `device`; pieces of at most `piece_bytes`, or one row where rows are longer.

    What has been added is in place once `finish` has returned. `close` drops what has not begun.
    """

    def __init__(
        self, device: torch.device, threads: int = _THREADS, piece_bytes: int = _PIECE_BYTES
    ) -> None:
        self.device, self.piece_bytes = device, piece_bytes
        self._pool = ThreadPoolExecutor(threads, "reader")
        self._own = threading.local()  # each thread's lane
        self._copies: list[Future[None]] = []
        self._files: dict[Path, int] = {}  # descriptors

    def add(self, stored: StoredTensor, rows: slice, cols: slice, destination: torch.Tensor) -> None:
        """Begin `destination[...] = stored[rows, cols]`; the destination may be any view of any dtype.

        Until `finish` it may hold anything, and it must not be written by others. Raises ModelError if the
        file cannot be opened.
        """
        shape = stored.shape
        first, last, _ = rows.indices(shape[0])
        width = math.prod(shape[1:])
        whole = len(shape) == 1 or cols.indices(shape[1]) == (0, shape[1], 1)
        if whole and destination.is_contiguous():  # then rows are of no concern
            destination, shape = destination.view(-1), (stored.shape[0] * width,)
            first, last, width = first * width, last * width, 1
        row_bytes = width * stored.dtype.itemsize
        count = max(self.piece_bytes // max(row_bytes, 1), 1)
        file = self._open(stored)
        ready = torch.cuda.current_stream(self.device).record_event() if self._on_gpu else None
        for begin in range(first, last, count):
            end = min(begin + count, last)
            piece = _TensorPiece(
                stored,
                file,
                stored.offset + begin * row_bytes,
                (end - begin, *shape[1:]),
                slice(None) if whole else cols,
                destination[begin - first : end - first],
                ready,
            )
            self._copies.append(self._pool.submit(self._carry, piece))

    def finish(self) -> None:
        """Wait until everything is in place. Raises ModelError if something could not be read."""
        try:
            for copy in self._copies:
                copy.result()
        finally:
            self.close()

    def close(self) -> None:
        """Wait for what is being copied, drop the rest, and end the threads. May be called again."""
        self._pool.shutdown(cancel_futures=True)
        self._copies.clear()
        while self._files:
            os.close(self._files.popitem()[1])

    def _open(self, stored: StoredTensor) -> int:
        if stored.file not in self._files:
            try:
                self._files[stored.file] = os.open(stored.file, _READ_ONLY)
            except OSError as error:
                raise unreadable(stored, error) from error
        return self._files[stored.file]

    @property
    def _on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def _carry(self, piece: _TensorPiece) -> None:
        lane: _Lane | None = getattr(self._own, "lane", None)
        if lane is None:
            lane = self._own.lane = _Lane(self.device, self.piece_bytes)
        lane.carry(piece)


class _Lane:
    """One thread's buffer and stream."""

    def __init__(self, device: torch.device, buffer_bytes: int) -> None:
        self._device, self._buffer_bytes = device, buffer_bytes
        self._buffer = torch.empty(0, dtype=torch.uint8)  # made when the device is current
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def carry(self, piece: _TensorPiece) -> None:
        on_stream = torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext()
        with torch.inference_mode(), on_stream:
            values = self._read(piece)
            to = piece.destination
            if self._stream:
                assert piece.ready is not None
                self._stream.wait_event(piece.ready)
                if values.dtype != to.dtype or values.shape != to.shape or not to.is_contiguous():
                    values = values.to(self._device, non_blocking=True)
            to.copy_(values if values.dim() == 1 else values[:, piece.cols], non_blocking=True)
            if self._stream:
                self._stream.synchronize()  # the buffer is free again

    def _read(self, piece: _TensorPiece) -> torch.Tensor:
        """The piece as it is in the file, in this lane's buffer."""
        stored = piece.stored
        size = math.prod(piece.shape) * stored.dtype.itemsize
        if size > len(self._buffer):
            longest = max(size, self._buffer_bytes)
            self._buffer = torch.empty(longest, dtype=torch.uint8, pin_memory=self._stream is not None)
        buffer = self._buffer[:size]
        into, filled = buffer.numpy().data, 0
        try:
            while filled < size and (count := _read_at(piece.file, into[filled:], piece.offset + filled)):
                filled += count
        except OSError as error:
            raise unreadable(stored, error) from error
        if filled < size:
            raise unreadable(stored, f"the file ends {size - filled} bytes early")
        return buffer.view(stored.dtype).view(piece.shape)


def _read_at(file: int, into: memoryview, offset: int) -> int:
    """Fill `into`, or its beginning, from byte `offset` of a file; the number of bytes read."""
    if hasattr(os, "preadv"):
        return os.preadv(file, [into], offset)
    with _seeking:  # Windows: threads share the position in the file
        os.lseek(file, offset, os.SEEK_SET)
        data = os.read(file, len(into))
    into[: len(data)] = data
    return len(data)


def unreadable(stored: StoredTensor, why: object) -> ModelError:
    return ModelError(f"cannot read tensor {stored.name} of {stored.file}: {why}")
