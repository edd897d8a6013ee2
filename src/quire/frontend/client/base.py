"""Engine clients: one protocol, with the engine in this process or in another one (process_client.py).

A client sends EngineRequests and receives EngineOutputs; a request that the engine refuses comes back as
an output with finish_reason "error". When the engine dies every call raises EngineDead with the cause.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Protocol

from quire.types import (
    EngineDead,
    EngineInfo,
    EngineOutput,
    EngineRequest,
    QuireError,
    RequestError,
    RequestFailure,
)

if TYPE_CHECKING:
    from quire.core.engine import Engine


class EngineClient(Protocol):
    info: EngineInfo

    def add(self, request: EngineRequest) -> None: ...

    def abort(self, ids: list[str]) -> None: ...

    def poll(self, timeout_s: float) -> list[EngineOutput]:
        """Outputs that are there, waiting at most `timeout_s` for the first."""
        ...

    def close(self) -> None: ...


@contextlib.contextmanager
def _whole() -> Iterator[None]:
    """Ctrl-C takes effect behind this: an engine whose step was left in the middle could not go on. The second one
    takes effect at once."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield  # nobody raises anything here
        return
    came = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal came
        if came:
            handler(number, frame)
        came = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if came:
        handler(signal.SIGINT, None)


class InProcessClient:
    """Runs the step loop inside `poll`."""

    def __init__(self, engine: Engine, info: EngineInfo) -> None:
        self.engine, self.info = engine, info
        self._refused: list[EngineOutput] = []
        self._dead: str | None = None

    def add(self, request: EngineRequest) -> None:
        self._raise_if_dead()
        try:
            self.engine.add(request)
        except RequestError as error:
            self._refused.append(refusal(request, error))

    def abort(self, ids: list[str]) -> None:
        for request_id in ids:
            self.engine.abort(request_id)

    def poll(self, timeout_s: float) -> list[EngineOutput]:
        self._raise_if_dead()
        outputs, self._refused = self._refused, []
        try:
            if self.engine.has_work:
                with _whole():
                    outputs += self.engine.step()
                if not self.engine.has_work:
                    self.engine.check()
        except Exception as error:
            self._dead = describe(error)
            raise EngineDead(f"the engine stopped: {self._dead}") from error
        return outputs

    def close(self) -> None:
        self._dead = self._dead or "it was closed"
        self.engine.close()

    def _raise_if_dead(self) -> None:
        if self._dead:
            raise EngineDead(f"the engine stopped: {self._dead}")


def refusal(request: EngineRequest, error: RequestError) -> EngineOutput:
    """Return the final output of a request that the engine refused."""
    failure = RequestFailure(str(error), param=error.param, code=error.code)
    return EngineOutput(request.id, [], "error", error=failure)


def describe(error: BaseException) -> str:
    """One line for people: the text of our own errors, class and text of others."""
    return str(error) if isinstance(error, QuireError) else f"{type(error).__name__}: {error}"
