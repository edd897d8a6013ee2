"""SIGTERM and SIGINT, received from the start of the process: a signal while libraries load is not lost."""

from __future__ import annotations

import asyncio
import signal
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class ShutdownSignal:
    """The signals received so far. The first asks the server to stop, the second to stop at once.

    `attach` creates the futures `first` and `second`, whose results are the signals' numbers.
    """

    first: asyncio.Future[int]
    second: asyncio.Future[int]

    def __init__(self) -> None:
        self._early: list[int] = []
        for number in _SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._early.append(number)

    def attach(self) -> None:
        """Deliver signals to the running event loop from now on, including those received before."""
        loop = asyncio.get_running_loop()
        self.first, self.second = loop.create_future(), loop.create_future()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._received, number)
        for early in self._early:
            self._received(early)

    def _received(self, number: int) -> None:
        for future in (self.first, self.second):
            if not future.done():
                future.set_result(number)
                return
