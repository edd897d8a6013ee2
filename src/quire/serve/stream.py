"""Server-sent events, and what both kinds of answer need: to notice that the client has gone.

await first(...)          nothing is sent until something is there, so an early error has its own status
return EventStream(...)   one write per wake-up, however many chunks; an error becomes an event
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.serve.errors import ApiError, as_api_error
from quire.serve.generation import Generation
from quire.serve.wire import encode
from quire.types import RequestOutput

Write: TypeAlias = Callable[[bytes], Awaitable[None]]

log = logging.getLogger("quire.serve")
_DONE = b"data: [DONE]\n\n"
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def event(body: Any) -> bytes:
    return b"data: " + encode(body) + b"\n\n"


def named_event(body: dict[str, Any]) -> bytes:
    """An event with a name, which is the body's type."""
    return b"event: " + body["type"].encode() + b"\n" + event(body)


@dataclass(frozen=True, slots=True)
class Framing:
    """How an API writes the chunks of a stream, an error among them, and the end."""

    chunk: Callable[[Any], bytes]
    error: Callable[[ApiError], bytes]
    done: bytes = b""


UNNAMED = Framing(event, lambda error: event(error.body()), _DONE)  # chats and completions


class Watch:
    """Ends a generation when its client hangs up. A context; may be handed on with `detach`."""

    def __init__(self, request: Request, generation: Generation) -> None:
        self._generation = generation
        request.scope["generation"] = generation  # for those who look at the request when it is over
        self._task = asyncio.ensure_future(self._wait(request.receive))
        self._detached = False

    async def _wait(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._generation.fail(ApiError(499, "the client closed the connection", code="client_closed"))

    def detach(self) -> None:
        """Outlive the context: whoever sends the stream calls `close`."""
        self._detached = True

    def close(self) -> None:
        self._task.cancel()
        if not self._generation.finished:
            self._generation.fail(ApiError(500, "the answer was given up", code="internal_error"))

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._detached:
            self.close()


async def whole(request: Request, generation: Generation) -> None:
    """Wait until all is there. Raises the ApiError that ended it early."""
    with Watch(request, generation):
        while not generation.finished:
            await generation.wait()
        if generation.error is not None:
            raise generation.error


async def stream(
    request: Request,
    generation: Generation,
    chunks: Callable[[list[RequestOutput]], list[Any]],
    last: Callable[[], list[Any]],
    slow_reader_timeout_s: float,
    framing: Framing = UNNAMED,
) -> Response:
    """The response of a stream, once its first chunk is there; before that an error has its own status.

    `chunks` makes chunks of what is new, `last` those after everything has come.
    """
    with Watch(request, generation) as watch:
        await generation.wait()
        watch.detach()
        return EventStream(generation, watch, chunks, last, slow_reader_timeout_s, framing)


class Patience:
    """Gives a client up that does not read: TimeoutError where this is the context, once a write has waited for
    `limit_s`. One timer for all writes of a stream, for most of them wait for nothing."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        self._since_s: float | None = None  # when the write began that has not returned
        self._spent = False

    def over(self, send: Send) -> Write:
        async def write(body: bytes) -> None:
            self._since_s = self._loop.time()
            await send({"type": "http.response.body", "body": body, "more_body": True})
            self._since_s = None

        return write

    def _look(self) -> None:
        now_s = self._loop.time()
        end_s = (now_s if self._since_s is None else self._since_s) + self._limit_s
        if end_s <= now_s:
            self._spent = self._task.cancel()
        else:
            self._timer = self._loop.call_at(end_s, self._look)

    def __enter__(self) -> Patience:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._timer = self._loop.call_later(self._limit_s, self._look)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._timer.cancel()
        if self._spent and kind is asyncio.CancelledError and self._task.uncancel() == 0:
            raise TimeoutError


class EventStream(Response):
    media_type = "text/event-stream"

    def __init__(
        self,
        generation: Generation,
        watch: Watch,
        chunks: Callable[[list[RequestOutput]], list[Any]],
        last: Callable[[], list[Any]],
        slow_reader_timeout_s: float,
        framing: Framing,
    ) -> None:
        self._generation, self._watch, self._chunks, self._last = generation, watch, chunks, last
        self._slow_s, self._framing = slow_reader_timeout_s, framing
        self.status_code = 200
        self.background = None
        self.init_headers(_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            # A task of its own: waking it resumes two coroutines, and not all the layers around this one too.
            await asyncio.ensure_future(self._send_to_the_end(scope.get("body_send", send)))
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:  # the response stays unfinished, so the connection is closed
            log.warning("a client did not read for %g s: dropped", self._slow_s)
        finally:
            self._watch.close()

    async def _send_to_the_end(self, send: Send) -> None:
        with Patience(self._slow_s) as patience:
            write = patience.over(send)
            try:
                await self._send_all(write)
            except Exception as error:
                found = as_api_error(error)
                if not isinstance(error, ApiError):
                    log.exception("a stream failed")
                await write(self._framing.error(found) + self._framing.done)

    async def _send_all(self, write: Write) -> None:
        generation, chunk = self._generation, self._framing.chunk
        while True:
            done = generation.finished
            if generation.error is not None:
                raise generation.error
            found = self._chunks(generation.take())
            if done:
                tail = b"".join(map(chunk, [*found, *self._last()]))
                await write(tail + self._framing.done)
                return
            if found:
                await write(b"".join(map(chunk, found)))
            await generation.wait()
