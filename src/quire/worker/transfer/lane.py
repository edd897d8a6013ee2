"""A thread that runs copies in order, and the queue of the orders that have ended."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable

from quire.types import TransferEnd
from quire.worker.executor import DeviceGuard


class Ends:
    """The orders that have ended since the last call of `take`. Any thread may add one."""

    def __init__(self) -> None:
        self._ended: queue.SimpleQueue[TransferEnd] = queue.SimpleQueue()
        self._ready: list[TransferEnd] = []
        self.put = self._ended.put

    def take(self) -> list[TransferEnd]:
        """Return the orders that have ended."""
        ends, self._ready = self._ready, []
        with contextlib.suppress(queue.Empty):
            while True:
                ends.append(self._ended.get_nowait())
        return ends

    def wait(self, timeout_s: float) -> None:
        """Wait until an order ends, at most `timeout_s` seconds."""
        if not self._ready:
            with contextlib.suppress(queue.Empty):
                self._ready.append(self._ended.get(timeout=timeout_s))


class Lane:
    """A thread that runs functions in order. Its first error is raised by `check`."""

    def __init__(self, name: str, guard: DeviceGuard) -> None:
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, args=(guard,), daemon=True, name=name)
        self._thread.start()

    def put(self, work: Callable[[], object]) -> None:
        """Append a function."""
        self._work.put(work)

    def check(self) -> None:
        """Raise the error that has ended the thread, if any."""
        if self._error is not None:
            raise self._error

    def close(self, skip: bool = True) -> None:
        """Skip what has not begun, or run it, and wait for the end of the thread."""
        self._closed = skip
        self._work.put(None)
        self._thread.join()

    def _run(self, guard: DeviceGuard) -> None:
        try:
            with guard():
                while (work := self._work.get()) is not None:
                    if not self._closed:
                        work()
        except BaseException as error:
            self._error = error
