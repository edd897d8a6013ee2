"""Whether the engine process still makes progress, for /health.

Once a second the engine is asked for a sign of life, which it gives between two steps, busy or idle. An answer may
take as long as a step. It is overdue when the process has used no CPU time for five seconds longer than the longest
step so far: it is stopped, or waits for something that does not come. A process that computes, captures a graph or
waits for a compiler is given a minute more, for the first step of a shape can take that long.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

import psutil

OVERDUE_S = 5.0
_BUSY_S = 60.0
_BUSY_STEPS = 10.0  # longest steps that a busy process may take
_INTERVAL_S = 1.0
_USED_S = 0.02  # of CPU time between two looks: the process works


class Heartbeat:
    """Owns the question that is open, and when the process was last seen to work."""

    def __init__(
        self,
        ask: Callable[[], None],
        cpu_s: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ask` sends a question, which `beat` answers; `cpu_s` is the CPU time that the process has used."""
        self._ask, self._cpu_s, self._clock = ask, cpu_s, clock
        self._asked_s: float | None = None  # None: no question is open
        self._worked_s = clock()
        self._used_s: float | None = None  # when last looked at, while a question is open
        self._longest_s = 0.0

    def beat(self) -> None:
        """The engine has answered."""
        if self._asked_s is not None:
            self._longest_s = max(self._longest_s, self._clock() - self._asked_s)
            self._asked_s = None

    def look(self) -> None:
        """Ask, or find out whether the process works on while the answer is missing."""
        now_s = self._clock()
        if self._asked_s is None:
            self._asked_s = self._worked_s = now_s
            self._used_s = None
            self._ask()
            return
        used_s, before_s = self._cpu_s(), self._used_s
        if before_s is not None and used_s - before_s >= _USED_S:
            self._worked_s = now_s
        self._used_s = used_s

    def overdue_s(self) -> float:
        """Return for how long the engine has been silent if that is too long, else 0."""
        if self._asked_s is None:
            return 0.0
        now_s = self._clock()
        silent_s = now_s - self._asked_s
        idle = now_s - self._worked_s > OVERDUE_S + self._longest_s
        stuck = silent_s > _BUSY_S + _BUSY_STEPS * self._longest_s
        return silent_s if idle or stuck else 0.0

    async def run(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(_INTERVAL_S)


def cpu_of(pid: int) -> Callable[[], float]:
    """Return a function for the CPU time in seconds that process `pid` and its children have used."""

    def used_s() -> float:
        total = 0.0
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            for one in (process, *process.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    times = one.cpu_times()
                    total += times.user + times.system
        return total

    return used_s
