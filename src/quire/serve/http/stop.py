"""SIGTERM and SIGINT, from the first moment on: one that comes while libraries load must not be lost."""

from __future__ import annotations

import asyncio
import signal
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class ShutdownSignal:
    """The first signal asks to stop, the second to stop at once. `attach` makes futures of them, by number."""

    first: asyncio.Future[int]
    second: asyncio.Future[int]

    def __init__(self) -> None:
        self._early: list[int] = []
        for number in _SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._early.append(number)

    def attach(self) -> None:
        """From now on the running event loop hears of signals; those that came before count."""
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
