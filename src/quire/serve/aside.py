"""A thread for work that no generation waits for, such as counting tokens, so that it never delays one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from quire.serve.errors import overloaded

T = TypeVar("T")
_MAX_WAITING = 64


class SideThread:
    """One thread with a bounded queue. `run` belongs to the event loop."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread = ThreadPoolExecutor(1, name)
        self._waiting = 0

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` in the thread, after what waits already. Raises ApiError 503 if that is too much."""
        if self._waiting >= _MAX_WAITING:
            raise overloaded(f"{_MAX_WAITING} requests wait for the thread that does {self._name} already", 1)
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        finally:
            self._waiting -= 1

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
