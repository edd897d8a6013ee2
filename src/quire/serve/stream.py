"""Server-sent events, and what both kinds of answer need: to notice that the client has gone.

await first(...)          nothing is sent until something is there, so an early error has its own status
return EventStream(...)   one write per wake-up, however many chunks; an error becomes an event
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.serve.errors import ApiError, as_api_error
from quire.serve.generation import Generation
from quire.serve.wire import encode
from quire.types import RequestOutput

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
            try:
                await self._send_all(send)
            except TimeoutError:
                log.warning("a client did not read for %g s: dropped", self._slow_s)
                return  # the response stays unfinished, so the connection is closed
            except Exception as error:
                found = as_api_error(error)
                if not isinstance(error, ApiError):
                    log.exception("a stream failed")
                await self._write(send, self._framing.error(found) + self._framing.done)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._watch.close()

    async def _send_all(self, send: Send) -> None:
        generation, chunk = self._generation, self._framing.chunk
        while True:
            done = generation.finished
            if generation.error is not None:
                raise generation.error
            found = self._chunks(generation.take())
            if done:
                tail = b"".join(map(chunk, [*found, *self._last()]))
                await self._write(send, tail + self._framing.done)
                return
            if found:
                await self._write(send, b"".join(map(chunk, found)))
            await generation.wait()

    async def _write(self, send: Send, body: bytes) -> None:
        """Waits while the client's buffers are full; TimeoutError if that takes too long."""
        async with asyncio.timeout(self._slow_s):
            await send({"type": "http.response.body", "body": body, "more_body": True})
