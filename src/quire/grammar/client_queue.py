"""A queue from which clients are served in turn: one that puts in much does not hold up the others."""

from __future__ import annotations

import threading
from collections import Counter, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class ClientQueue(Generic[T]):
    """Items in one line per client. A client has at most `most_running` items that are taken and not yet done."""

    def __init__(self, most_running: int) -> None:
        self._most_running = most_running
        self._lines: dict[str, deque[T]] = {}  # none is empty; the client that waited longest comes first
        self._running: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, client: str, item: T) -> None:
        with self._changed:
            self._lines.setdefault(client, deque()).append(item)
            self._changed.notify()

    def get(self) -> tuple[str, T] | None:
        """Wait for the next item and return it with its client, to be handed to `done`; None once closed."""
        with self._changed:
            while not self._closed:
                ready = [name for name in self._lines if self._running[name] < self._most_running]
                if ready:
                    return self._take(min(ready, key=lambda name: self._running[name]))
                self._changed.wait()
            return None

    def _take(self, client: str) -> tuple[str, T]:
        line = self._lines.pop(client)
        item = line.popleft()
        if line:
            self._lines[client] = line  # behind the others
        self._running[client] += 1
        return client, item

    def done(self, client: str) -> None:
        """Count an item as done."""
        with self._changed:
            self._running[client] -= 1
            self._changed.notify()

    def close(self) -> None:
        """Let every `get` return None."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
