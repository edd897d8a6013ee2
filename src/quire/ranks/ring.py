"""A ring in shared memory that carries messages from one process to several others.

The memory belongs to no name: it is a file without a folder entry, whose descriptor the readers inherit. When all
processes have ended, however they ended, nothing is left.

A message is a length and a body. All messages form one stream of bytes, of which the writer keeps the last
`_CAPACITY`. Counters of bytes written and read only grow. The writer waits while the slowest reader is a whole ring
behind. A reader spins for a moment, then sleeps until the writer wakes it through a pipe.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

_CAPACITY = 8 << 20  # bytes; longer messages pass through in pieces
_LINE = 8  # counters are this many int64 apart, so that each has a cache line
_SPIN_S = (
    200e-6  # of a reader, before it sleeps: between two steps of decoding the next message arrives within it
)
_NAP_S = 20e-6  # of a writer that waits for room
_SAFETY_S = 0.05  # longest sleep of a reader: a wake-up may be missed on a machine with weakly ordered memory
_LENGTH_BYTES = 4
_give_way: Callable[[], None] = getattr(os, "sched_yield", lambda: time.sleep(0))
_fence = threading.Lock()  # taking it orders the accesses to shared memory before and after it


@dataclass(frozen=True, slots=True)
class ReaderEnd:
    """What a reader inherits: descriptors of the memory and of the pipe that wakes it, and its index."""

    memory: int
    wake: int
    index: int
    readers: int

    def descriptors(self) -> list[int]:
        return [self.memory, self.wake]


class _Memory:
    """The counters and bytes of a ring: one counter of bytes written, then one of bytes read and a flag per reader."""

    def __init__(self, descriptor: int, readers: int) -> None:
        self.counters_bytes = 8 * _LINE * (1 + 2 * readers)
        self.map = mmap.mmap(descriptor, self.counters_bytes + _CAPACITY)
        counters = np.frombuffer(self.map, np.int64, _LINE * (1 + 2 * readers))[::_LINE]
        self.written, self.read, self.asleep = counters[:1], counters[1::2], counters[2::2]
        self.bytes = memoryview(self.map)[self.counters_bytes :]


class RingWriter:
    """The end that sends messages to all readers. `readers` is their number."""

    def __init__(self, readers: int) -> None:
        self._file = _unnamed_file()
        os.ftruncate(self._file, 8 * _LINE * (1 + 2 * readers) + _CAPACITY)
        self._memory = _Memory(self._file, readers)
        self._pipes = [os.pipe() for _ in range(readers)]
        for _, write_end in self._pipes:
            os.set_blocking(write_end, False)

    def ends(self) -> list[ReaderEnd]:
        """Return the ends of all readers, to be inherited by their processes."""
        count = len(self._pipes)
        return [ReaderEnd(self._file, pipe[0], index, count) for index, pipe in enumerate(self._pipes)]

    def send(self, body: bytes, check: Callable[[], None]) -> None:
        """Send a message to all readers. While there is no room, call `check`, which may raise to give up."""
        memory = self._memory
        stream = memoryview(len(body).to_bytes(_LENGTH_BYTES, "little") + body)
        written = int(memory.written[0])
        while len(stream):
            while not (room := _CAPACITY - (written - int(memory.read.min()))):
                check()
                time.sleep(_NAP_S)
            begin = written % _CAPACITY
            count = min(room, len(stream), _CAPACITY - begin)
            memory.bytes[begin : begin + count] = stream[:count]
            stream = stream[count:]
            written += count
            with _fence:
                memory.written[0] = written
            with _fence:
                sleepers = np.flatnonzero(memory.asleep)
            for index in sleepers.tolist():
                memory.asleep[index] = 0
                with contextlib.suppress(OSError):  # the pipe is full, or its reader has ended
                    os.write(self._pipes[index][1], b"\0")

    def lag(self, index: int) -> int:
        """Return the bytes that reader `index` has not read yet."""
        return int(self._memory.written[0] - self._memory.read[index])

    def close(self) -> None:
        """Close the descriptors. Readers then get EOFError."""
        for descriptor in (self._file, *(end for pipe in self._pipes for end in pipe)):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._pipes.clear()


class RingReader:
    """The end of one reader."""

    def __init__(self, end: ReaderEnd) -> None:
        self._memory = _Memory(end.memory, end.readers)
        self._index, self._wake = end.index, end.wake
        self._read = 0
        self._poller = select.poll()
        self._poller.register(end.wake, select.POLLIN)

    def receive(self) -> bytearray:
        """Wait for the next message and return it.

        Raises:
            EOFError: if the writer has ended.
        """
        length = int.from_bytes(self._take(_LENGTH_BYTES), "little")
        return self._take(length)

    def _take(self, count: int) -> bytearray:
        memory, out, done = self._memory, bytearray(count), 0
        while done < count:
            available = self._wait()
            begin = self._read % _CAPACITY
            size = min(available, count - done, _CAPACITY - begin)
            out[done : done + size] = memory.bytes[begin : begin + size]
            done, self._read = done + size, self._read + size
            with _fence:
                memory.read[self._index] = self._read
        return out

    def _wait(self) -> int:
        """Wait until there are bytes to read, and return their number."""
        written = self._memory.written
        spin_end_s = time.perf_counter() + _SPIN_S
        while not (available := int(written[0]) - self._read):
            if time.perf_counter() < spin_end_s:
                _give_way()
                continue
            with _fence:
                self._memory.asleep[self._index] = 1
            with _fence:
                available = int(written[0]) - self._read
            if not available and self._poller.poll(_SAFETY_S * 1000) and not os.read(self._wake, 4096):
                raise EOFError("the writer of the ring has ended")
        return available


def _unnamed_file() -> int:
    """Return the descriptor of a file in memory, or of a deleted file where there are none (macOS)."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("quire-ranks")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
