"""A queue that serves clients in turn, so that a busy client does not delay the others."""

from __future__ import annotations

import threading
from collections import Counter, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class ClientQueue(Generic[T]):
    """A queue with one line of items per client.

    Args:
        max_running: how many items of one client may be taken and not yet done.
    """

    def __init__(self, max_running: int) -> None:
        self._max_running = max_running
        self._lines: dict[
            str, deque[T]
        ] = {}  # without empty lines; the client that waited longest comes first
        self._running: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        """Return the number of waiting items."""
        with self._changed:
            return sum(map(len, self._lines.values()))

    def put(self, client: str, item: T) -> None:
        """Append an item to the line of its client."""
        with self._changed:
            self._lines.setdefault(client, deque()).append(item)
            self._changed.notify()

    def get(self) -> tuple[str, T] | None:
        """Wait for the next item. Return its client, to be passed to `done`, and the item; None once closed."""
        with self._changed:
            while not self._closed:
                ready = [name for name in self._lines if self._running[name] < self._max_running]
                if ready:
                    return self._take(min(ready, key=lambda name: self._running[name]))
                self._changed.wait()
            return None

    def _take(self, client: str) -> tuple[str, T]:
        line = self._lines.pop(client)
        item = line.popleft()
        if line:
            self._lines[client] = line  # now the last line
        self._running[client] += 1
        return client, item

    def done(self, client: str) -> None:
        """Note that an item of this client is done."""
        with self._changed:
            self._running[client] -= 1
            self._changed.notify()

    def close(self) -> None:
        """Make every `get` return None."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
