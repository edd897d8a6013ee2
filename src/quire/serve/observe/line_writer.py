"""Output of log lines from a thread, so that a full disk or a stalled reader cannot stop the server."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable

STDOUT, STDERR = 1, 2
_MAX_BYTES = 1 << 20  # of queued lines
_REPORT_S = 0.5  # delay of the report after the last dropped line, so that a slow reader gets few reports


def dropped_lines(count: int) -> str:
    """Return the message about `count` dropped lines."""
    return f"quire: {count} lines were dropped because this output was not read fast enough"


class LineWriter:
    """A queue of lines and the thread that writes them.

    The queue holds at most 1 MiB. Lines beyond that are dropped and counted; a later line reports their number. The
    thread starts with the first line.
    """

    def __init__(self, report: Callable[[int], str] = dropped_lines) -> None:
        """Create an empty queue; `report` converts a number of dropped lines to the line that reports it."""
        self.dropped = 0  # lines since the start
        self._report, self._reported, self._report_at_s = report, 0, 0.0
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._bytes = 0  # of `_waiting` and of the line that is being written
        self._closed = False
        self._change = threading.Condition()
        self._thread: threading.Thread | None = None

    def write(self, text: str, to: int = STDOUT) -> None:
        """Queue a line for the file descriptor `to`. Never blocks."""
        line = f"{text}\n".encode(errors="replace")
        with self._change:
            if self._closed or self._bytes + len(line) > _MAX_BYTES:
                self.dropped += 1
                self._report_at_s = time.monotonic() + _REPORT_S
                return
            self._waiting.append((to, line))
            self._bytes += len(line)
            self._change.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True, name="lines")
                self._thread.start()

    def close(self, timeout_s: float = 2.0) -> None:
        """Wait up to `timeout_s` seconds until all lines are written. Later lines are dropped."""
        with self._change:
            self._closed = True
            self._report_at_s = 0.0
            self._change.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (found := self._next()) is not None:
            to, line = found
            _write(to, line)
            with self._change:
                self._bytes -= len(line)

    def _next(self) -> tuple[int, bytes] | None:
        """Wait for the next line. Return None once the writer is closed and all lines are written."""
        with self._change:
            while True:
                if self._waiting:
                    return self._waiting.popleft()
                if self._reported < self.dropped and time.monotonic() >= self._report_at_s:
                    count, self._reported = self.dropped - self._reported, self.dropped
                    line = f"{self._report(count)}\n".encode()
                    self._bytes += len(line)
                    return STDERR, line
                if self._closed:
                    return None
                self._change.wait(_REPORT_S if self._reported < self.dropped else None)


def _write(to: int, line: bytes) -> None:
    """Write without Python's buffers, which would retry a failed write at exit."""
    with contextlib.suppress(OSError):
        while line:
            line = line[os.write(to, line) :]
