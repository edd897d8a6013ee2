"""Processes that compile kernels while an engine starts, as that engine sees them.

A kernel's compilation begins in Python, so threads of one process spend much of it waiting for each other. Each of these
processes has its own interpreter. They write to Triton's cache on disk, where the engine then finds the kernel. What
they do not compile, because one has died or there are none, the engine compiles itself.

They are started before torch is imported, so that they import it at the same time (`compile_process.py`), and end when
their connections close: also if the engine is killed.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections import deque
from multiprocessing import Pipe
from multiprocessing.connection import Connection

log = logging.getLogger("quire")

_MOST = 16
_FEWEST = 4  # for a rank: importing torch once more takes longer than fewer processes save
_ANSWER_S = (
    120.0  # limit on a compilation and the start of its process, after which the process counts as dead
)


class Compilers:
    """Processes that compile kernels.

    Args:
        connections: one to each process.
    """

    def __init__(self, connections: list[Connection]) -> None:
        self.count = len(connections)
        self._idle = deque(reversed(connections))  # the processes are forked in this order

    def compile(self, name: str, job: bytes) -> bool:
        """Let an idle process compile a kernel, and wait for it. Several threads may call this at once.

        Args:
            name: of the kernel, for the log.
            job: the kernel, as `kernels/compile_job.py` encodes it.

        Returns:
            Whether the kernel is on disk now. False if no process is idle, or it has failed.
        """
        try:
            connection = self._idle.pop()
        except IndexError:
            return False
        try:
            connection.send_bytes(job)
            if not connection.poll(_ANSWER_S):
                raise EOFError
            error = connection.recv_bytes().decode()
        except (EOFError, OSError):
            log.warning("a process that compiles kernels has ended at %s; the engine compiles it", name)
            connection.close()
            return False
        self._idle.append(connection)
        if error:
            log.debug("another process could not compile %s: %s", name, error)
        return not error

    def close(self) -> None:
        """Let the processes end. None may be compiling."""
        while self._idle:
            self._idle.pop().close()


NO_COMPILERS = Compilers([])


def start_compilers(count: int) -> Compilers:
    """Start `count` processes. They answer once they have imported torch and Triton."""
    if not count:
        return NO_COMPILERS
    pairs = [Pipe() for _ in range(count)]
    files = [theirs.fileno() for _, theirs in pairs]
    process = subprocess.Popen(
        [sys.executable, "-m", "quire.compile_process", *map(str, files)],
        pass_fds=files,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C does not reach it
    )
    for _, theirs in pairs:
        theirs.close()
    threading.Thread(target=process.wait, daemon=True, name="compilers-end").start()
    return Compilers([ours for ours, _ in pairs])


def usual_count(ranks: int) -> int:
    """Return the number of processes for each of `ranks` ranks on this host."""
    if sys.platform != "linux":
        return 0
    count = len(os.sched_getaffinity(0)) // ranks
    return min(_MOST, count) if count >= _FEWEST else 0
