"""Server-sent events, and what both kinds of answer need: to notice that the client has gone.

await first(...)          nothing is sent until something is there, so an early error has its own status
return EventStream(...)   one write per step, however many chunks; an error becomes an event
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

from quire.serve.answer.generation import ChoiceDelta, Generation
from quire.serve.http.errors import ApiError, as_api_error
from quire.serve.http.wire import encode, json_response
from quire.serve.http.writes import BodyWriter

ChunkMaker: TypeAlias = Callable[[list[ChoiceDelta]], list[bytes]]
InThread: TypeAlias = Callable[[Callable[[], bytes]], Awaitable[bytes]]

log = logging.getLogger("quire.serve")
MARK = "\ue000text\ue001"
_FEW_ENTRIES = 2048  # tokens and log-probabilities: written as JSON in about a millisecond
_DONE = b"data: [DONE]\n\n"
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def event(body: Any) -> bytes:
    return b"data: " + encode(body) + b"\n\n"


def named_event(body: dict[str, Any]) -> bytes:
    """An event with a name, which is the body's type."""
    return b"event: " + body["type"].encode() + b"\n" + event(body)


class ChunkTemplate:
    """The event of a chunk of which only one text changes: all around it is encoded once."""

    def __init__(self, chunk: Any) -> None:
        """`chunk` has MARK in place of the text; what comes behind it is not a client's."""
        self._before, _, self._after = event(chunk).rpartition(encode(MARK))

    def render(self, text: str) -> bytes:
        return b"%b%b%b" % (self._before, encode(text), self._after)


@dataclass(frozen=True, slots=True)
class StreamFraming:
    """How an API writes an error in a stream, and the end."""

    error: Callable[[ApiError], bytes]
    done: bytes = b""


UNNAMED = StreamFraming(lambda error: event(error.body()), _DONE)  # chats and completions


class DisconnectWatch:
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

    def __enter__(self) -> DisconnectWatch:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._detached:
            self.close()


async def wait_until_finished(request: Request, generation: Generation) -> None:
    """Wait until all is there. Raises the ApiError that ended it early."""
    with DisconnectWatch(request, generation):
        while not generation.finished:
            await generation.wait()
        if generation.error is not None:
            raise generation.error


async def complete_response(
    request: Request, generation: Generation, make: Callable[[], Any], in_thread: InThread
) -> Response:
    """Wait until all is there and return the response with the body that `make` returns.

    A body with many tokens or log-probabilities is made in a thread. Raises the ApiError that ended it early.
    """
    await wait_until_finished(request, generation)
    params = generation.states[0].params
    entries = generation.completion_tokens * (1 + (params.logprobs or 0))
    if params.prompt_logprobs is not None:
        entries += generation.prompt_tokens * (1 + params.prompt_logprobs)
    if entries <= _FEW_ENTRIES:
        return json_response(make())
    return Response(await in_thread(lambda: encode(make())), media_type="application/json")


async def stream_response(
    request: Request,
    generation: Generation,
    chunks: ChunkMaker,
    last: Callable[[], list[bytes]],
    slow_reader_timeout_s: float,
    framing: StreamFraming = UNNAMED,
) -> Response:
    """The response of a stream, once its first chunk is there; before that an error has its own status.

    `chunks` makes events of what is new, `last` those after everything has come.
    """
    with DisconnectWatch(request, generation) as watch:
        await generation.wait()
        watch.detach()
        return EventStream(generation, watch, chunks, last, slow_reader_timeout_s, framing)


class EventStream(Response):
    """Pieces are written where they are made, in one pass over all streams when a step has ended. The coroutine of a
    stream only wakes for what is rare: its end, an error, and a client that does not keep up."""

    media_type = "text/event-stream"

    def __init__(
        self,
        generation: Generation,
        watch: DisconnectWatch,
        chunks: ChunkMaker,
        last: Callable[[], list[bytes]],
        slow_reader_timeout_s: float,
        framing: StreamFraming,
    ) -> None:
        self._generation, self._watch, self._chunks, self._last = generation, watch, chunks, last
        self._slow_s, self._framing = slow_reader_timeout_s, framing
        self.status_code = 200
        self.background = None
        self.init_headers(_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        out: BodyWriter = scope["body_writer"]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._send_all(out)
            await self._until_read(out)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:  # the response stays unfinished, so the connection is closed
            log.warning("a client did not read for %g s: dropped", self._slow_s)
        finally:
            self._watch.close()

    async def _until_read(self, out: BodyWriter) -> None:
        """Until there is room again in the client's buffers; TimeoutError if it takes too long."""
        if out.is_full:
            async with asyncio.timeout(self._slow_s):
                await out.drain()

    async def _send_all(self, out: BodyWriter) -> None:
        generation, framing = self._generation, self._framing

        def write_new() -> bool:
            if found := self._chunks(generation.take()):
                out.write(found[0] if len(found) == 1 else b"".join(found))
            return not out.is_full

        try:
            while not generation.finished:
                if write_new():
                    await generation.wait(write_new)
                await self._until_read(out)
            if generation.error is not None:
                raise generation.error
            out.write(b"".join([*self._chunks(generation.take()), *self._last(), framing.done]))
        except TimeoutError:
            raise
        except Exception as error:
            if not isinstance(error, ApiError):
                log.exception("a stream failed")
            out.write(framing.error(as_api_error(error)) + framing.done)
