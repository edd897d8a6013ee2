"""A pool of helper processes, each of which answers one question at a time within a deadline.

Work that may not terminate, or may exhaust memory, runs in such a process. The process limits itself where the kernel
offers that. At the deadline the pool kills it, on every platform, and starts another one at once. A process ends when
its standard input closes, so none outlives its parent.

Wire format of questions and answers: length (8 bytes), kind (1 byte, defined by the caller), body.
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
_TICK_S = 0.02  # longest delay between a deadline and the kill


class HelperEnded(Exception):
    """The process ended, or was killed, before it answered.

    `overdue` is True if the pool killed it at its deadline. `signal` is the signal that ended it, 0 if none did; it is
    always 0 on Windows.
    """

    def __init__(self, status: int, overdue: bool) -> None:
        super().__init__(f"the helper process ended with status {status}")
        self.overdue = overdue
        self.signal = -status if status < 0 else 0


class HelpersBusy(Exception):
    """No helper process became free in time, or the pool is closed."""


@dataclass(slots=True)
class Answer:
    """The answer of a helper process. `last` announces that the process ends now, for example to free its memory."""

    kind: int
    body: bytes
    last: bool


LAST = 0x80  # flag in the kind of an answer


class HelperProcess:
    """One helper process. Only its owner calls `ask` and `close`; any thread may kill it."""

    def __init__(self, command: Sequence[str], max_answer_bytes: int) -> None:
        # A new session, so that Ctrl-C reaches only the parent.
        self._popen = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        assert self._popen.stdin is not None and self._popen.stdout is not None
        self._stdin: IO[bytes] = self._popen.stdin
        self._stdout: IO[bytes] = self._popen.stdout
        self._max_answer_bytes = max_answer_bytes
        self._deadline_s = float("inf")  # of the current question
        self._overdue = False

    @property
    def pid(self) -> int:
        return self._popen.pid

    def ask(self, kind: int, body: bytes, timeout_s: float) -> Answer:
        """Send a question and wait for its answer. If the process ends first, close it and raise HelperEnded."""
        self._deadline_s = time.monotonic() + timeout_s
        try:
            self._stdin.write(HEADER.pack(len(body), kind))
            self._stdin.write(body)
            self._stdin.flush()
            size, kind = HEADER.unpack(self._read(HEADER.size))
            if size > self._max_answer_bytes:
                raise EOFError
            return Answer(kind & ~LAST, self._read(size), bool(kind & LAST))
        except (OSError, EOFError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(1)  # its exit status says why it ended
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
        """Kill the process: SIGKILL, or TerminateProcess on Windows."""
        self._popen.kill()

    def close(self) -> None:
        """Kill the process, close its pipes and wait for its end."""
        self.kill()
        for pipe in (self._stdin, self._stdout):
            with contextlib.suppress(OSError):
                pipe.close()
        self._popen.wait()


class HelperPool:
    """Up to `size` processes that run the same command, started when they are needed. Any thread may call `ask`.

    Args:
        command: the command to run.
        size: largest number of processes.
        max_answer_bytes: a process that sends a larger answer is killed.
    """

    def __init__(self, command: Sequence[str], size: int, max_answer_bytes: int) -> None:
        self._command, self._size, self._max_answer_bytes = list(command), size, max_answer_bytes
        self._changed = threading.Condition()  # guards the next four attributes
        self._processes: set[HelperProcess] = set()
        self._idle: list[HelperProcess] = []
        self._watch: threading.Thread | None = None
        self._closed = False
        self._busy = threading.Event()  # set while a question may be under way
        # Also runs when the interpreter exits.
        self._finalizer = weakref.finalize(self, _kill_all, self._processes, self._busy)

    def ask(self, kind: int, body: bytes, timeout_s: float, queue_s: float) -> Answer:
        """Send a question to a free process and wait for its answer.

        Args:
            kind: kind of question, below 128, defined by the process.
            body: the question.
            timeout_s: seconds after which the process is killed.
            queue_s: longest wait for a free process, in seconds.

        Raises:
            HelperEnded: if the process ended or was killed. Another one has been started already.
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
            if not self._closed:  # a replacement starts now, to be ready for the next question
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
        """Kill the processes that are past their deadline. Return whether any question is unanswered."""
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
        """Return the ids of the running processes."""
        with self._changed:
            return [process.pid for process in self._processes]

    def close(self) -> None:
        """End all processes. Unanswered questions raise HelperEnded, later ones HelpersBusy."""
        with self._changed:
            self._closed = True
            for process in self._idle:
                process.close()
                self._processes.discard(process)
            self._idle.clear()
            self._changed.notify_all()
        self._finalizer()


def _watch(pool_ref: weakref.ref[HelperPool], busy: threading.Event) -> None:
    """Kill overdue processes until the pool is gone. Sleep while no question is unanswered."""
    while True:
        busy.wait()
        time.sleep(_TICK_S)
        pool = pool_ref()
        if pool is None or (not pool.kill_overdue() and pool.closed):
            return
        del pool


def _kill_all(processes: set[HelperProcess], busy: threading.Event) -> None:
    for process in list(processes):
        process.kill()
    busy.set()  # wakes the watch thread, which then ends
