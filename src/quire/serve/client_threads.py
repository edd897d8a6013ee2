"""Threads for what must not run on the event loop: templates, tokens, checks. Clients take turns in them.

Each client has its own line; the client whose work took least thread time per weight goes next. A few threads are kept
for clients that have none: however long another client's work takes, a newcomer's begins at once.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from quire.serve.http.auth import ApiClient
from quire.serve.http.errors import overloaded

T = TypeVar("T")
_SPARE = 4  # threads for clients that have none


@dataclass(slots=True)
class _Work:
    client: ApiClient
    call: Callable[[], Any]
    future: Future[Any]


class ClientThreads:
    """Owns the threads and the lines. One client has `threads` threads and first come, first served."""

    def __init__(self, threads: int, most_waiting: int, name: str = "tokenizer") -> None:
        """`most_waiting`: calls of a client that may wait. `name`: of the threads."""
        self._threads, self._most_waiting = threads, most_waiting
        self._pool = ThreadPoolExecutor(threads, name)
        self._spare = ThreadPoolExecutor(_SPARE, f"{name}-spare")
        self._lock = threading.Lock()
        self._queues: dict[str, deque[_Work]] = {}  # none is empty
        self._running: Counter[str] = Counter()  # no zeros
        self._turns: dict[str, float] = {}  # thread seconds over weight

    async def run(self, client: ApiClient, work: Callable[..., T], *args: object) -> T:
        """Return `work(*args)`, run in a thread when it is the client's turn.

        Raises:
            ApiError: 503 if too many calls of the client wait already.
        """
        future: Future[T] = Future()
        self._add(_Work(client, lambda: work(*args), future))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Drop what waits. Threads end with the work that they do."""
        for pool in (self._pool, self._spare):
            pool.shutdown(wait=False, cancel_futures=True)

    def _add(self, work: _Work) -> None:
        name = work.client.name
        with self._lock:
            line = self._queues.get(name)
            if line is None:
                line = self._queues[name] = deque()
                self._lift(name)
            elif len(line) >= self._most_waiting:
                raise overloaded(f"{len(line)} requests of this API key wait to be read already", 1)
            line.append(work)
            needs_spare = not self._running[name] and self._running.total() >= self._threads
        # Each of these takes one call, whosever turn it then is; one that finds none does nothing.
        self._pool.submit(self._run_next, False)
        if needs_spare:
            self._spare.submit(self._run_next, True)

    def _lift(self, name: str) -> None:
        """Let a client that comes back begin level with the others: absence saves nothing."""
        others = [self._turns.get(other, 0.0) for other in {*self._queues, *self._running} if other != name]
        if others:
            self._turns[name] = max(self._turns.get(name, 0.0), min(others))

    def _take(self, spare: bool) -> _Work | None:
        """Return the next call; with `spare`, that of a client that has no thread."""
        with self._lock:
            names = [name for name in self._queues if not (spare and name in self._running)]
            if not names:
                return None
            name = min(names, key=lambda name: self._turns.get(name, 0.0))
            work = self._queues[name].popleft()
            if not self._queues[name]:
                del self._queues[name]
            self._running[name] += 1
            return work

    def _run_next(self, spare: bool) -> None:
        if (work := self._take(spare)) is None:
            return
        future, began_s = work.future, time.monotonic()
        if not future.set_running_or_notify_cancel():
            self._done(work.client, 0.0)
            return
        try:
            result = work.call()
        except BaseException as error:  # it is the caller's
            self._done(work.client, time.monotonic() - began_s)
            future.set_exception(error)
        else:
            self._done(work.client, time.monotonic() - began_s)
            future.set_result(result)

    def _done(self, client: ApiClient, took_s: float) -> None:
        with self._lock:
            self._turns[client.name] = self._turns.get(client.name, 0.0) + took_s / client.weight
            self._running[client.name] -= 1
            if not self._running[client.name]:
                del self._running[client.name]
