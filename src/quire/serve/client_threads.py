"""Threads for work that must not run on the event loop: templates, tokenization, checks. Clients take turns.

Each client has its own queue. The client whose work has used the least thread time per unit of weight goes next.
Spare threads are kept for clients that have none, so a new client's work starts at once, however long the work of
another client takes.
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
_SPARE_THREADS = 4


@dataclass(slots=True)
class _Work:
    client: ApiClient
    call: Callable[[], Any]
    future: Future[Any]


class ClientThreads:
    """A thread pool that is shared fairly between clients. Owns the threads and one queue per client.

    The calls of one client run on `threads` threads, first come, first served.
    """

    def __init__(self, threads: int, max_queued: int, name: str = "tokenizer") -> None:
        """Create the pool; its threads start with the first calls.

        Args:
            threads: number of threads beside the spare ones.
            max_queued: calls of one client that may wait.
            name: prefix of the threads' names.
        """
        self._threads, self._max_queued = threads, max_queued
        self._pool = ThreadPoolExecutor(threads, name)
        self._spare = ThreadPoolExecutor(_SPARE_THREADS, f"{name}-spare")
        self._lock = threading.Lock()
        self._queues: dict[str, deque[_Work]] = {}  # none is empty
        self._running: Counter[str] = Counter()  # no zeros
        self._used_s: dict[str, float] = {}  # thread seconds over weight

    @property
    def idle(self) -> bool:
        """Return whether no call waits or runs."""
        with self._lock:
            return not (self._queues or self._running)

    async def run(self, client: ApiClient, work: Callable[..., T], *args: object) -> T:
        """Return `work(*args)`, run in a thread when it is the client's turn.

        Raises:
            ApiError: 503 if too many calls of the client wait already.
        """
        future: Future[T] = Future()
        self._add(_Work(client, lambda: work(*args), future))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Drop the calls that wait. Each thread ends after its current call."""
        for pool in (self._pool, self._spare):
            pool.shutdown(wait=False, cancel_futures=True)

    def _add(self, work: _Work) -> None:
        name = work.client.name
        with self._lock:
            queue = self._queues.get(name)
            if queue is None:
                queue = self._queues[name] = deque()
                self._lift(name)
            elif len(queue) >= self._max_queued:
                raise overloaded(
                    f"{len(queue)} requests of this API key are waiting for a thread, which is the limit: retry later",
                    1,
                )
            queue.append(work)
            needs_spare = not self._running[name] and self._running.total() >= self._threads
        # Each submission takes the call whose turn it is then, of any client. If there is none left, it does nothing.
        self._pool.submit(self._run_next, False)
        if needs_spare:
            self._spare.submit(self._run_next, True)

    def _lift(self, name: str) -> None:
        """Raise a returning client's used time to the lowest of the others: idle time earns no credit."""
        others = [self._used_s.get(other, 0.0) for other in {*self._queues, *self._running} if other != name]
        if others:
            self._used_s[name] = max(self._used_s.get(name, 0.0), min(others))

    def _take(self, spare: bool) -> _Work | None:
        """Return the next call; with `spare`, the next call of a client that has no thread."""
        with self._lock:
            names = [name for name in self._queues if not (spare and name in self._running)]
            if not names:
                return None
            name = min(names, key=lambda name: self._used_s.get(name, 0.0))
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
        except BaseException as error:  # the caller handles it
            self._done(work.client, time.monotonic() - began_s)
            future.set_exception(error)
        else:
            self._done(work.client, time.monotonic() - began_s)
            future.set_result(result)

    def _done(self, client: ApiClient, took_s: float) -> None:
        with self._lock:
            self._used_s[client.name] = self._used_s.get(client.name, 0.0) + took_s / client.weight
            self._running[client.name] -= 1
            if not self._running[client.name]:
                del self._running[client.name]
