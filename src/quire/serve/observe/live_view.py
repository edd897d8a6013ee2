"""Live views: the engine's state, polled once per client and shared by all of its viewers.

The engine is polled four times a second while a client has viewers, and not at all otherwise. The next poll starts
after the answer to the last one. Only the latest state and the last 512 steps are kept. A viewer takes everything
newer than its position when it has sent its previous events, so a slow viewer skips states and gets several steps at
once, and needs no queue.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from quire.serve.http.auth import ApiClient
from quire.serve.http.errors import ApiError, as_api_error, overloaded
from quire.serve.http.wire import encode
from quire.types import EngineLive, LiveStep

KEPT_STEPS = 512
_MAX_VIEWERS = 64


@dataclass(slots=True)
class ViewerPosition:
    """The version of the state and the last step that a viewer has got."""

    version: int = 0
    step: int = -1


class LiveViews:
    """The views by client: each shows the client's own requests. All admins share one view of all requests."""

    def __init__(self, ask: Callable[[int, str | None], Awaitable[EngineLive]]) -> None:
        """Start without views; `ask` is AsyncEngine.live."""
        self._ask = ask
        self._views: dict[str | None, LiveView] = {}  # by client name; never more than there are keys

    def of(self, client: ApiClient) -> LiveView:
        """Return the view of the requests that `client` may see."""
        sees = client.sees
        if sees not in self._views:
            self._views[sees] = LiveView(lambda since: self._ask(since, sees))
        return self._views[sees]

    def close(self) -> None:
        """End all streams, because the server stops."""
        for view in self._views.values():
            view.close()


class LiveView:
    """The latest state and steps, the polling task, and the number of viewers."""

    def __init__(self, ask: Callable[[int], Awaitable[EngineLive]], interval_s: float = 0.25) -> None:
        """Start without viewers; `ask(step)` returns the engine's state and its steps after number `step`."""
        self._ask, self._interval_s = ask, interval_s
        self._steps: deque[LiveStep] = deque(maxlen=KEPT_STEPS)
        self._state = b""
        self._version = 0
        self._viewers = 0
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.error: ApiError | None = None  # the error that ended the engine
        self.closed = False

    @property
    def viewers(self) -> int:
        """Return the number of viewers."""
        return self._viewers

    def enter(self) -> ViewerPosition:
        """Add a viewer and return its position. The first viewer starts the polling.

        Raises:
            ApiError: 503 beyond 64 viewers.
        """
        if self._viewers >= _MAX_VIEWERS:
            raise overloaded(f"{_MAX_VIEWERS} live views are open already, which is the limit: close one", 10)
        self._viewers += 1
        if self._task is None:
            self._steps.clear()
            self._state = b""
            self._task = asyncio.ensure_future(self._follow())
        return ViewerPosition()

    def leave(self) -> None:
        """Remove a viewer, and stop polling if it was the last one."""
        self._viewers -= 1
        if self._viewers == 0 and self._task is not None:
            self._task.cancel()
            self._task = None

    def close(self) -> None:
        """End all streams, because the server stops."""
        self.closed = True
        self._changed.set()

    async def next_events(self, seen: ViewerPosition) -> list[tuple[str, bytes]]:
        """Wait for events newer than `seen`, and advance `seen` past them.

        Returns:
            Pairs of an event's name and its body; an empty list after `close`.

        Raises:
            ApiError: the error that ended the engine.
        """
        while not (self.closed or self.error) and (seen.version == self._version or not self._state):
            await self._changed.wait()
        if self.error is not None:
            raise self.error
        if self.closed:
            return []
        steps = [step for step in self._steps if step.step > seen.step]
        if steps:
            seen.step = steps[-1].step
        seen.version = self._version
        return [("steps", encode(steps)), ("state", self._state)]

    async def _follow(self) -> None:
        try:
            while True:
                self._take(await self._ask(self._steps[-1].step if self._steps else -1))
                await asyncio.sleep(self._interval_s)
        except Exception as error:  # any error must reach the viewers
            self.error = as_api_error(error)
            self._changed.set()

    def _take(self, live: EngineLive) -> None:
        state = encode(replace(live, steps=[]))
        known = self._steps[-1].step if self._steps else -1
        new = [step for step in live.steps if step.step > known]
        if not new and state == self._state:
            return
        self._steps.extend(new)
        self._state = state
        self._version += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
