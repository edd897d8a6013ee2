"""Helper processes that answer one question at a time within a deadline, and a pool of them.

Work that cannot be trusted to end, or to leave memory alone, runs in such a process. The process limits
itself where the kernel offers that; the pool kills it at the deadline, on every platform, and starts
another one at once. Processes end with their standard input, so none outlives its parent.

    question and answer: 8 bytes of length, 1 byte whose meaning is the caller's, the body
"""

from __future__ import annotations

import contextlib
import struct
import subprocess
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

HEADER = struct.Struct("<QB")
_TICK_S = 0.02  # how late a process may be killed


class HelperEnded(Exception):
    """The process ended, or was killed, before it answered."""

    def __init__(self, status: int, overdue: bool) -> None:
        super().__init__(f"the helper process ended with status {status}")
        self.overdue = overdue  # it was killed at its deadline
        self.signal = -status if status < 0 else 0  # the signal that ended it; 0: none


class HelpersBusy(Exception):
    """No process became free in time."""


@dataclass(slots=True)
class Answer:
    """What a helper process answered. `last` says that the process ends now, such as for want of memory."""

    kind: int
    body: bytes
    last: bool


LAST = 0x80  # in the kind of an answer


class HelperProcess:
    """One process. Its owner asks and closes it; any thread may kill it."""

    def __init__(self, command: Sequence[str], max_answer_bytes: int) -> None:
        # In a session of its own, so that Ctrl-C reaches the parent alone.
        self._popen = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        assert self._popen.stdin is not None and self._popen.stdout is not None
        self._stdin: IO[bytes] = self._popen.stdin
        self._stdout: IO[bytes] = self._popen.stdout
        self._max_answer_bytes = max_answer_bytes
        self._deadline_s = float("inf")  # of the question under way
        self._overdue = False

    @property
    def pid(self) -> int:
        return self._popen.pid

    def ask(self, kind: int, body: bytes, timeout_s: float) -> Answer:
        """Wait for the answer. Raises HelperEnded; the process is closed then."""
        self._deadline_s = time.monotonic() + timeout_s
        try:
            self._stdin.write(HEADER.pack(len(body), kind))
            self._stdin.write(body)
            self._stdin.flush()
            size, found = HEADER.unpack(self._read(HEADER.size))
            if size > self._max_answer_bytes:
                raise EOFError
            return Answer(found & ~LAST, self._read(size), bool(found & LAST))
        except (OSError, EOFError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(1)  # its own status says why it ended
            self.close()
            raise HelperEnded(self._popen.returncode, self._overdue) from None
        finally:
            self._deadline_s = float("inf")

    def _read(self, size: int) -> bytes:
        data = self._stdout.read(size)
        if len(data) < size:
            raise EOFError
        return data

    def kill_if_overdue(self, now_s: float) -> None:
        if now_s > self._deadline_s:
            self._overdue = True
            self.kill()

    def kill(self) -> None:
        self._popen.kill()

    def close(self) -> None:
        self.kill()
        for pipe in (self._stdin, self._stdout):
            with contextlib.suppress(OSError):
                pipe.close()
        self._popen.wait()


class HelperPool:
    """Up to `size` processes of one kind, started when they are needed. Any thread may ask."""

    def __init__(self, command: Sequence[str], size: int, max_answer_bytes: int) -> None:
        self._command, self._size, self._max_answer_bytes = list(command), size, max_answer_bytes
        self._changed = threading.Condition()  # guards the four below
        self._processes: set[HelperProcess] = set()
        self._idle: list[HelperProcess] = []
        self._watch: threading.Thread | None = None
        self._closed = False
        self._busy = threading.Event()  # set while a question may be under way
        # Also runs when the interpreter exits.
        self._finalizer = weakref.finalize(self, _kill_all, self._processes, self._busy)

    def ask(self, kind: int, body: bytes, timeout_s: float, queue_s: float) -> Answer:
        """Let a free process answer.

        Args:
            kind: below 128; its meaning is the process's.
            body: the question.
            timeout_s: seconds after which the process is killed.
            queue_s: seconds to wait for a free process.

        Raises:
            HelperEnded: if the process ended or was killed. Another one has been started in its place.
            HelpersBusy: if no process became free, or the pool is closed.
        """
        process = self._take(queue_s)
        self._busy.set()
        alive = False
        try:
            answer = process.ask(kind, body, timeout_s)
            alive = not answer.last
        finally:
            self._put_back(process, alive)
        return answer

    def _take(self, queue_s: float) -> HelperProcess:
        deadline_s = time.monotonic() + queue_s
        with self._changed:
            while not self._closed:
                if self._idle:
                    return self._idle.pop()
                if len(self._processes) < self._size:
                    return self._start()
                if not self._changed.wait(deadline_s - time.monotonic()):
                    break
        raise HelpersBusy

    def _put_back(self, process: HelperProcess, alive: bool) -> None:
        with self._changed:
            if self._closed or not alive:
                process.close()
                self._processes.discard(process)
            if not self._closed:  # the successor starts now, to be ready when it is needed
                self._idle.append(process if alive else self._start())
            self._changed.notify()

    def _start(self) -> HelperProcess:
        if self._watch is None:
            self._watch = threading.Thread(
                target=_watch, args=(weakref.ref(self), self._busy), name="quire-helper-watch", daemon=True
            )
            self._watch.start()
        process = HelperProcess(self._command, self._max_answer_bytes)
        self._processes.add(process)
        return process

    def kill_overdue(self) -> bool:
        """Kill processes that are past their deadline. Return whether any question is under way."""
        now_s = time.monotonic()
        with self._changed:
            for process in self._processes:
                process.kill_if_overdue(now_s)
            if len(self._idle) == len(self._processes):
                self._busy.clear()
                return False
        return True

    @property
    def closed(self) -> bool:
        return self._closed

    def pids(self) -> list[int]:
        with self._changed:
            return [process.pid for process in self._processes]

    def close(self) -> None:
        """End all processes. Questions under way end with HelperEnded, later ones with HelpersBusy."""
        with self._changed:
            self._closed = True
            for process in self._idle:
                process.close()
                self._processes.discard(process)
            self._idle.clear()
            self._changed.notify_all()
        self._finalizer()


def _watch(pool_of: weakref.ref[HelperPool], busy: threading.Event) -> None:
    """Kill what is overdue, until the pool is gone. Sleeps while nothing is asked."""
    while True:
        busy.wait()
        time.sleep(_TICK_S)
        pool = pool_of()
        if pool is None or (not pool.kill_overdue() and pool.closed):
            return
        del pool


def _kill_all(processes: set[HelperProcess], busy: threading.Event) -> None:
    for process in list(processes):
        process.kill()
    busy.set()  # wakes the watch, which ends
