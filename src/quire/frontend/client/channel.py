"""Messages between two processes over a pair of sockets, in order and without threads.

    | length, 4 bytes, little-endian | body | length | body | ...

One thread receives at each end; any thread may send. Sending never blocks: bytes that the socket does not take are kept,
and the next call of any method sends them. After the other process has ended, its messages can still be read; then EOFError is raised.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections import deque

_HEADER_BYTES = 4
_READ_BYTES = 1 << 16  # a larger buffer would be mapped anew for each read


def hangup_poller(end: socket.socket) -> select.poll:
    """Return a poller that reports when the other end of `end` is closed. It reads nothing."""
    poller = select.poll()
    poller.register(end, select.POLLRDHUP if hasattr(select, "POLLRDHUP") else select.POLLHUP)
    return poller


def frame(body: bytes) -> bytes:
    """Return the bytes that carry a message."""
    return len(body).to_bytes(_HEADER_BYTES, "little") + body


class Channel:
    """One end of a connection, with the messages that arrived at it."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        end.set_inheritable(False)
        self._end = end
        self._poller = select.poll()
        self._poller.register(end, select.POLLIN)
        self._messages: deque[bytes] = deque()  # received in full
        self._partial = bytearray()  # the beginning of the next message
        self._unsent = bytearray()
        self._sending = threading.Lock()

    def fileno(self) -> int:
        """Return the file descriptor, so that an event loop can wait for input or for room to send."""
        return self._end.fileno()

    def send(self, body: bytes) -> bool:
        """Queue a message. Return whether it was sent completely.

        If the other process has ended, the message is dropped silently; `poll` raises EOFError.
        """
        return self.send_frames(frame(body))

    def send_frames(self, frames: bytes) -> bool:
        """Queue any number of concatenated messages, each built by `frame`. Return whether all were sent."""
        with self._sending:
            self._unsent += frames
        return self.flush()

    def flush(self) -> bool:
        """Send as much as the socket takes now. Return whether everything was sent."""
        with self._sending:
            try:
                del self._unsent[: self._end.send(self._unsent)]
            except BlockingIOError:
                pass
            except OSError:
                self._unsent.clear()
            return not self._unsent

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Wait up to `timeout_s` for a message. Return whether there is one.

        Raises:
            EOFError: if the other end is closed and all its messages have been received.
        """
        end_s = time.monotonic() + timeout_s
        while not self._messages:
            self._poller.modify(self._end, select.POLLIN | (select.POLLOUT if self._unsent else 0))
            left_s = end_s - time.monotonic()
            ready = self._poller.poll(max(0.0, left_s * 1000))
            if not ready:
                return False
            if self._unsent:
                self.flush()
            if ready[0][1] & ~select.POLLOUT:
                self._read()
        return True

    def _read(self) -> None:
        try:
            data = self._end.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            raise EOFError("the other end of the channel is closed")
        partial, start = self._partial, 0
        partial += data
        while len(partial) - start >= _HEADER_BYTES:
            body = start + _HEADER_BYTES
            end = body + int.from_bytes(partial[start:body], "little")
            if end > len(partial):
                break
            self._messages.append(bytes(partial[body:end]))
            start = end
        del partial[:start]

    def receive(self) -> bytes:
        """Return the next message. Call it only after `poll` has returned True."""
        return self._messages.popleft()

    def settle(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` until everything is sent. Return whether it is."""
        end_s = time.monotonic() + timeout_s
        while self._unsent and (left_s := end_s - time.monotonic()) > 0:
            select.select([], [self._end], [], left_s)
            self.flush()
        return not self._unsent

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._end.close()
