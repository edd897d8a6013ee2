"""What the engine does, for any number of people who look, at the price of one for each client.

While somebody looks, the engine is asked some times a second, and never again before it has answered; while
nobody does, never. What it says is kept once, in a bounded form: the state now and the latest steps. Each
viewer takes what is newer than what it has when it has sent the last of it, so one that reads slowly skips
states and gets several bars at once, and nothing is kept on its behalf.
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

_KEPT_STEPS = 512
_MAX_VIEWERS = 64


@dataclass(slots=True)
class ViewerPosition:
    """How far a viewer is."""

    version: int = 0
    step: int = -1


class LiveViews:
    """A view for each client that looks, of its own requests; one for all who may see those of everybody."""

    def __init__(self, ask: Callable[[int, str | None], Awaitable[EngineLive]]) -> None:
        """`ask`: the engine's state with its steps after the given one, as AsyncEngine.live."""
        self._ask = ask
        self._views: dict[
            str | None, LiveView
        ] = {}  # by the name of the client; never more than there are keys

    def of(self, client: ApiClient) -> LiveView:
        """Return the view of what this client may see."""
        sees = client.sees
        if sees not in self._views:
            self._views[sees] = LiveView(lambda since: self._ask(since, sees))
        return self._views[sees]

    def close(self) -> None:
        """End all views: the server stops."""
        for view in self._views.values():
            view.close()


class LiveView:
    """Owns the task that asks, the latest answer and the number of viewers."""

    def __init__(self, ask: Callable[[int], Awaitable[EngineLive]], interval_s: float = 0.25) -> None:
        """`ask`: the engine's state now with its steps after the given one, as AsyncEngine.live for one client."""
        self._ask, self._interval_s = ask, interval_s
        self._steps: deque[LiveStep] = deque(maxlen=_KEPT_STEPS)
        self._state = b""
        self._version = 0
        self._viewers = 0
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.error: ApiError | None = None  # why there is nothing more to see
        self.closed = False

    @property
    def viewers(self) -> int:
        return self._viewers

    def enter(self) -> ViewerPosition:
        """Somebody begins to look. Raises ApiError 503 when too many do."""
        if self._viewers >= _MAX_VIEWERS:
            raise overloaded(f"{_MAX_VIEWERS} live views are open already", 10)
        self._viewers += 1
        if self._task is None:
            self._steps.clear()
            self._state = b""
            self._task = asyncio.ensure_future(self._follow())
        return ViewerPosition()

    def leave(self) -> None:
        self._viewers -= 1
        if self._viewers == 0 and self._task is not None:
            self._task.cancel()
            self._task = None

    def close(self) -> None:
        """End all views: the server stops."""
        self.closed = True
        self._changed.set()

    async def next_events(self, seen: ViewerPosition) -> list[tuple[str, bytes]]:
        """Wait until there is something newer than `seen`, and move it there: names and bodies of events.
        An empty list: there will be nothing more. Raises the ApiError that ended the engine."""
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
        except Exception as error:  # whatever it is, nobody may be left waiting
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
