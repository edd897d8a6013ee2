"""Messages between two processes over a pair of sockets: whole, in order, and without threads.

    | length, 4 bytes | body | length | body | ...

Each end is used by one thread. Sending never waits: what the socket does not take is kept, and goes with the next call
of any kind. When the other process ends, what it has sent can still be read; then comes EOFError.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections import deque

_HEAD = 4
_READ = 1 << 16  # more would be mapped anew for each read


def frame(body: bytes) -> bytes:
    """Return the bytes that carry a message."""
    return len(body).to_bytes(_HEAD, "little") + body


class Channel:
    """Owns one end, and the messages that have arrived at it."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        end.set_inheritable(False)
        self._end = end
        self._poller = select.poll()
        self._poller.register(end, select.POLLIN)
        self._arrived: deque[bytes] = deque()
        self._part = bytearray()  # of a message that has not arrived whole
        self._unsent = bytearray()

    def fileno(self) -> int:
        """For who waits for several things: until there is something to read, or room for what is not sent."""
        return self._end.fileno()

    def send(self, body: bytes) -> bool:
        """Queue a message; whether all of it is sent. It is lost without a word when the other process has ended;
        reading says so."""
        return self.send_frames(frame(body))

    def send_frames(self, frames: bytes) -> bool:
        """The same for any number of messages, each made by `frame`, one after the other."""
        self._unsent += frames
        return self.flush()

    def flush(self) -> bool:
        """Send what the socket takes now; whether that is all."""
        try:
            del self._unsent[: self._end.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()
        return not self._unsent

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Whether a message is there, or comes within `timeout_s`. Raises EOFError when none can come any more."""
        end_s = time.monotonic() + timeout_s
        while not self._arrived:
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
            data = self._end.recv(_READ)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            raise EOFError("the other end of the channel is closed")
        part, at = self._part, 0
        part += data
        while len(part) - at >= _HEAD:
            end = at + _HEAD + int.from_bytes(part[at : at + _HEAD], "little")
            if end > len(part):
                break
            self._arrived.append(bytes(part[at + _HEAD : end]))
            at = end
        del part[:at]

    def receive(self) -> bytes:
        """The next message, once `poll` has said that it is there."""
        return self._arrived.popleft()

    def settle(self, timeout_s: float) -> bool:
        """Wait until all is sent, at most so long; whether it is."""
        end_s = time.monotonic() + timeout_s
        while self._unsent and (left_s := end_s - time.monotonic()) > 0:
            select.select([], [self._end], [], left_s)
            self.flush()
        return not self._unsent

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._end.close()
