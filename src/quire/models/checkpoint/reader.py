"""`Reader`: copies tensors from files to their destinations with several threads, in the background.

Each thread reads a piece of a tensor into its buffer (pinned, for a GPU) and copies it from there to the
destination, or passes it to a function that converts it, so file reads and the GPU's copy engine overlap. The threads' buffers bound the memory, whatever the
size of the files. Pieces that are cut by columns, transposed, or of another dtype are first copied to device memory
and rearranged there.
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

from quire.layers.env import RowSink
from quire.types import ModelError

_WHOLE = slice(None)
_THREADS = 8
_PIECE_BYTES = 32 << 20
_READ_ONLY = os.O_RDONLY | getattr(os, "O_BINARY", 0)  # without O_BINARY, Windows translates line ends
_seek_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file: row-major numbers that begin at byte `offset`."""

    name: str
    file: Path
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _TensorPiece:
    """Consecutive rows of a tensor, and their destination."""

    stored: StoredTensor
    file: int  # descriptor
    offset: int  # of the first byte, in the file
    shape: tuple[int, ...]
    cols: slice  # the part of each row to copy
    destination: torch.Tensor | RowSink
    first: int  # rows of the part before this piece
    ready: torch.cuda.Event | None  # after it, the destination may be written


class Reader:
    """A pool of threads that read tensors for `device`, in pieces of at most `piece_bytes` or one row.

    All added copies are complete when `finish` returns. `close` drops those that have not started.
    """

    def __init__(
        self, device: torch.device, threads: int = _THREADS, piece_bytes: int = _PIECE_BYTES
    ) -> None:
        self.device, self.piece_bytes = device, piece_bytes
        self._pool = ThreadPoolExecutor(threads, "reader")
        self._local = threading.local()  # holds each thread's lane
        self._copies: list[Future[None]] = []
        self._files: dict[Path, int] = {}  # descriptors

    def add(self, stored: StoredTensor, rows: slice, cols: slice, destination: torch.Tensor) -> None:
        """Start copying `stored[rows, cols]` into `destination`, any view of any dtype.

        The contents of the destination are undefined until `finish` returns, and nothing else may write to it.

        Raises:
            ModelError: if the file cannot be opened.
        """
        shape = stored.shape
        first, last, _ = rows.indices(shape[0])
        width = math.prod(shape[1:])
        whole = _is_whole(shape, cols)
        if whole and destination.is_contiguous():  # then row boundaries do not matter
            destination, shape = destination.view(-1), (stored.shape[0] * width,)
            first, last, width = first * width, last * width, 1
        count = max(self.piece_bytes // max(width * stored.dtype.itemsize, 1), 1)
        pieces = [(begin, min(begin + count, last)) for begin in range(first, last, count)]
        for begin, end in pieces:
            part = destination[begin - first : end - first]
            self._submit(
                stored, (end - begin, *shape[1:]), begin * width, cols if not whole else _WHOLE, part
            )

    def stream(
        self, stored: StoredTensor, rows: slice, cols: slice, sink: RowSink, multiple: int = 1
    ) -> None:
        """Start passing `stored[rows, cols]` to `sink` on the device, in pieces of a multiple of `multiple` rows.

        Raises:
            ModelError: if the file cannot be opened.
        """
        shape = stored.shape
        first, last, _ = rows.indices(shape[0])
        width = math.prod(shape[1:])
        kept = _WHOLE if _is_whole(shape, cols) else cols
        fitting = self.piece_bytes // max(width * stored.dtype.itemsize, 1)
        count = max(fitting // multiple, 1) * multiple
        for begin in range(first, last, count):
            end = min(begin + count, last)
            self._submit(stored, (end - begin, *shape[1:]), begin * width, kept, sink, begin - first)

    def _submit(
        self,
        stored: StoredTensor,
        shape: tuple[int, ...],
        skipped: int,
        cols: slice,
        destination: torch.Tensor | RowSink,
        first: int = 0,
    ) -> None:
        """Queue the piece of this shape that begins `skipped` numbers into the tensor."""
        ready = torch.cuda.current_stream(self.device).record_event() if self._on_gpu else None
        offset = stored.offset + skipped * stored.dtype.itemsize
        piece = _TensorPiece(stored, self._open(stored), offset, shape, cols, destination, first, ready)
        self._copies.append(self._pool.submit(self._carry, piece))

    def finish(self) -> None:
        """Wait for all copies.

        Raises:
            ModelError: if a tensor could not be read.
        """
        try:
            for copy in self._copies:
                copy.result()
        finally:
            self.close()

    def close(self) -> None:
        """Wait for running copies, drop the others, and end the threads. It may be called repeatedly."""
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
        lane: CopyLane | None = getattr(self._local, "lane", None)
        if lane is None:
            lane = self._local.lane = CopyLane(self.device, self.piece_bytes)
        lane.carry(piece)


class CopyLane:
    """The buffer and the CUDA stream of one thread."""

    def __init__(self, device: torch.device, buffer_bytes: int) -> None:
        self._device, self._buffer_bytes = device, buffer_bytes
        self._buffer = torch.empty(0, dtype=torch.uint8)  # allocated by the thread, on its first piece
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def allocated_bytes(self) -> int:
        """Return the size of the buffer in bytes."""
        return self._buffer.nbytes

    def carry(self, piece: _TensorPiece) -> None:
        """Read a piece, and copy it to its destination."""
        on_stream = torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext()
        with torch.inference_mode(), on_stream:
            values = self._read(piece)
            to = piece.destination
            if self._stream:
                assert piece.ready is not None
                self._stream.wait_event(piece.ready)
                if _needs_work(values, to):
                    values = values.to(self._device, non_blocking=True)
            values = values if values.dim() == 1 else values[:, piece.cols]
            if isinstance(to, torch.Tensor):
                to.copy_(values, non_blocking=True)
            else:
                to(values, piece.first)
            if self._stream:
                self._stream.synchronize()  # after it, the buffer can be reused

    def _read(self, piece: _TensorPiece) -> torch.Tensor:
        """Read a piece into the buffer, and return it in the file's shape and dtype."""
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


def _is_whole(shape: tuple[int, ...], cols: slice) -> bool:
    return len(shape) == 1 or cols.indices(shape[1]) == (0, shape[1], 1)


def _needs_work(values: torch.Tensor, to: torch.Tensor | RowSink) -> bool:
    """Return whether `values` must be on the device before they go to their destination."""
    if not isinstance(to, torch.Tensor):
        return True
    return values.dtype != to.dtype or values.shape != to.shape or not to.is_contiguous()


def _read_at(file: int, into: memoryview, offset: int) -> int:
    """Fill `into`, or a part of it, from byte `offset` of a file, and return the number of bytes read."""
    if hasattr(os, "preadv"):
        return os.preadv(file, [into], offset)
    with _seek_lock:  # Windows: threads share the position in the file
        os.lseek(file, offset, os.SEEK_SET)
        data = os.read(file, len(into))
    into[: len(data)] = data
    return len(data)


def unreadable(stored: StoredTensor, reason: object) -> ModelError:
    """Return the error for a tensor that cannot be read."""
    return ModelError(f"cannot read tensor {stored.name} of {stored.file}: {reason}")
