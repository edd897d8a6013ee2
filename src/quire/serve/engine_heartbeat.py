"""Heartbeat of the engine process: tells /health whether the engine still makes progress.

The server pings the engine once a second. The engine answers between two steps, busy or idle, so an answer can take
as long as a step. An answer is overdue in two cases:

idle     the process has used no CPU time for 5 s plus the longest answer so far: it is stopped or deadlocked
stuck    it uses CPU time but has not answered for 60 s plus 10 times the longest answer so far; the first step of a
         shape may capture a graph or wait for a compiler that long
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

OVERDUE_S = 5.0
_BUSY_S = 60.0
_BUSY_STEPS = 10.0  # times the longest answer so far
_USED_S = 0.02  # CPU time between two checks from which a process counts as working


class Heartbeat:
    """The open ping, and the time at which the process was last seen working."""

    def __init__(
        self,
        ping: Callable[[], None],
        cpu_s: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start with no open ping.

        Args:
            ping: sends a ping; the answer is reported by `beat`.
            cpu_s: returns the CPU time in seconds that the process has used.
            clock: returns the time in seconds; replaced in tests.
        """
        self._ping, self._cpu_s, self._clock = ping, cpu_s, clock
        self._pinged_s: float | None = None  # None: no ping is open
        self._worked_s = clock()
        self._used_s: float | None = None  # CPU time at the last check of an open ping
        self._longest_s = 0.0

    def beat(self) -> None:
        """Record the engine's answer."""
        if self._pinged_s is not None:
            self._longest_s = max(self._longest_s, self._clock() - self._pinged_s)
            self._pinged_s = None

    def check(self) -> None:
        """Send a ping, or check whether the process is working if one is open."""
        now_s = self._clock()
        if self._pinged_s is None:
            self._pinged_s = self._worked_s = now_s
            self._used_s = None
            self._ping()
            return
        used_s, before_s = self._cpu_s(), self._used_s
        if before_s is not None and used_s - before_s >= _USED_S:
            self._worked_s = now_s
        self._used_s = used_s

    def overdue_s(self) -> float:
        """Return the seconds since the open ping if its answer is overdue, else 0."""
        if self._pinged_s is None:
            return 0.0
        now_s = self._clock()
        silent_s = now_s - self._pinged_s
        idle = now_s - self._worked_s > OVERDUE_S + self._longest_s
        stuck = silent_s > _BUSY_S + _BUSY_STEPS * self._longest_s
        return silent_s if idle or stuck else 0.0


def cpu_of(pid: int) -> Callable[[], float]:
    """Return a function that returns the CPU time in seconds used by process `pid` and its children."""

    def used_s() -> float:
        import psutil  # here, because engine processes start before it is needed

        total = 0.0
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            for one in (process, *process.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    times = one.cpu_times()
                    total += times.user + times.system
        return total

    return used_s
