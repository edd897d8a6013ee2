"""The engine client protocol, and the client of an engine in this process (process.py has the other one).

A client sends EngineRequests and receives EngineOutputs. A request that the engine refuses comes back as an output
with finish_reason "error". After the engine has died, every call raises EngineDead with the cause.
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
    EngineOutputs,
    EngineRequest,
    OutputPart,
    QuireError,
    RequestError,
    RequestFailure,
)

if TYPE_CHECKING:
    from quire.core.engine import Engine


class EngineClient(Protocol):
    """A connection to one engine, used by one thread."""

    info: EngineInfo

    def add(self, request: EngineRequest) -> None:
        """Send a request to the engine."""
        ...

    def abort(self, ids: list[str]) -> None:
        """End the requests with these ids. Ids of finished requests are ignored."""
        ...

    def poll(self, timeout_s: float) -> EngineOutputs:
        """Return the available outputs, waiting up to `timeout_s` for the first one."""
        ...

    def close(self) -> None:
        """Stop the engine and free its memory."""
        ...


@contextlib.contextmanager
def _deferred_interrupt() -> Iterator[None]:
    """Delay the first Ctrl-C until the block ends, because an engine cannot resume an interrupted step.

    A second Ctrl-C takes effect at once.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield  # Ctrl-C raises nothing in this thread
        return
    interrupted = False

    def defer(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:
            handler(number, frame)
        interrupted = True

    signal.signal(signal.SIGINT, defer)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if interrupted:
        handler(signal.SIGINT, None)


class InProcessClient:
    """An EngineClient whose `poll` runs one step of an engine in this process."""

    def __init__(self, engine: Engine, info: EngineInfo) -> None:
        self.engine, self.info = engine, info
        self._refused: list[OutputPart] = []
        self._dead: str | None = None

    def add(self, request: EngineRequest) -> None:
        self._raise_if_dead()
        try:
            self.engine.add(request)
        except RequestError as error:
            self._refused.append(refused_output(request, error))

    def abort(self, ids: list[str]) -> None:
        for request_id in ids:
            self.engine.abort(request_id)

    def poll(self, timeout_s: float) -> EngineOutputs:
        self._raise_if_dead()
        outputs, self._refused = self._refused, []
        try:
            if self.engine.has_work:
                with _deferred_interrupt():
                    outputs += self.engine.step().parts
                if not self.engine.has_work:
                    self.engine.check()
        except Exception as error:
            self._dead = error_text(error)
            raise EngineDead(f"the engine stopped: {self._dead}") from error
        return EngineOutputs(outputs)

    def close(self) -> None:
        self._dead = self._dead or "it was closed"
        self.engine.close()

    def _raise_if_dead(self) -> None:
        if self._dead:
            raise EngineDead(f"the engine stopped: {self._dead}")


def refused_output(request: EngineRequest, error: RequestError) -> EngineOutput:
    """Return the final output of a request that the engine refused."""
    failure = RequestFailure(str(error), param=error.param, code=error.code)
    return EngineOutput(request.id, [], "error", error=failure)


def error_text(error: BaseException) -> str:
    """Return one line that describes `error`: its text, after the class name if it is not a QuireError."""
    return str(error) if isinstance(error, QuireError) else f"{type(error).__name__}: {error}"
