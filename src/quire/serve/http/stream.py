"""Responses of generations: streamed as server-sent events or JSON lines, or complete. Both end when the client disconnects.

await stream_response(...)      wait for the first output, so that an early error gets its own HTTP status, then
                                return an EventStream: one write per step; a later error becomes an event
await complete_response(...)    wait for the whole answer and return it as one body
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

InThread: TypeAlias = Callable[[Callable[[], bytes]], Awaitable[bytes]]

log = logging.getLogger("quire.serve")
MARK = "\ue000text\ue001"  # placeholder of the text in a ChunkTemplate
_FEW_ENTRIES = 2048  # tokens and log-probabilities that are encoded as JSON in about a millisecond
_DONE = b"data: [DONE]\n\n"
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def event(body: Any) -> bytes:
    """Encode `body` as a server-sent event without a name."""
    return b"data: " + encode(body) + b"\n\n"


def named_event(body: dict[str, Any]) -> bytes:
    """Encode `body` as a server-sent event named after its type."""
    return b"event: " + body["type"].encode() + b"\n" + event(body)


def json_line(body: Any) -> bytes:
    """Encode `body` as one line of a stream of JSON lines."""
    return encode(body) + b"\n"


class ChunkTemplate:
    """An encoded event in which only one text changes: the JSON around it is encoded once."""

    def __init__(self, chunk: Any) -> None:
        """Encode `chunk`, which has MARK in place of the text. No text of a client may follow MARK."""
        self._before, _, self._after = event(chunk).rpartition(encode(MARK))

    def render(self, text: str) -> bytes:
        """Return the event with `text`."""
        return b"%b%b%b" % (self._before, encode(text), self._after)


@dataclass(frozen=True, slots=True)
class StreamFraming:
    """The media type of a stream and the encoding of errors and of its end, which differ between APIs."""

    error: Callable[[ApiError], bytes]
    done: bytes = b""
    media_type: str = "text/event-stream"


@dataclass(frozen=True, slots=True)
class StreamEvents:
    """The functions that write the events of a stream.

    Attributes:
        entries: returns how many tokens and log-probabilities the events for new deltas have. With many of them,
            `chunks` runs in a thread.
        chunks: converts new deltas to events.
        last: returns the events after the last delta.
        framing: encoding of errors and of the end.
    """

    entries: Callable[[list[ChoiceDelta]], int]
    chunks: Callable[[list[ChoiceDelta]], list[bytes]]
    last: Callable[[], list[bytes]]
    framing: StreamFraming


UNNAMED = StreamFraming(lambda error: event(error.body()), _DONE)  # chat completions and completions


class DisconnectWatch:
    """A task that ends a generation when its client disconnects.

    It is a context manager that closes the watch, unless `detach` has passed it on.
    """

    def __init__(self, request: Request, generation: Generation) -> None:
        self._generation = generation
        request.scope["generation"] = generation  # for the observers of the request
        self._task = asyncio.ensure_future(self._wait(request.receive))
        self._detached = False

    async def _wait(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._generation.fail(ApiError(499, "the client closed the connection", code="client_closed"))

    def detach(self) -> None:
        """Keep watching after the context has ended; the sender of the stream calls `close`."""
        self._detached = True

    def close(self) -> None:
        """Stop watching, and abort the generation if it has not finished."""
        self._task.cancel()
        if not self._generation.finished:
            self._generation.fail(ApiError(500, "the answer was aborted", code="internal_error"))

    def __enter__(self) -> DisconnectWatch:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._detached:
            self.close()


async def wait_until_finished(request: Request, generation: Generation) -> None:
    """Wait until the generation has finished. Raise the ApiError that ended it early."""
    with DisconnectWatch(request, generation):
        while not generation.finished:
            await generation.wait()
        if generation.error is not None:
            raise generation.error


async def complete_response(
    request: Request, generation: Generation, make: Callable[[], Any], in_thread: InThread
) -> Response:
    """Wait until the generation has finished and return its answer as one JSON body.

    Args:
        request: watched for a disconnect.
        generation: the generation to wait for.
        make: returns the body.
        in_thread: runs a function in a thread; used for bodies with many tokens or log-probabilities.

    Raises:
        ApiError: the error that ended the generation early.
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
    events: StreamEvents,
    in_thread: InThread,
    slow_reader_timeout_s: float,
) -> Response:
    """Wait for the first output and return the response that streams the generation.

    Args:
        request: watched for a disconnect.
        generation: the generation to stream.
        events: writes the events.
        in_thread: runs a function in a thread; used for events with many log-probabilities.
        slow_reader_timeout_s: seconds without progress after which a client that does not read is disconnected.

    Raises:
        ApiError: an error before the first output, which thus gets its own HTTP status.
    """
    with DisconnectWatch(request, generation) as watch:
        await generation.wait()
        watch.detach()
        return EventStream(generation, watch, events, in_thread, slow_reader_timeout_s)


class EventStream(Response):
    """A streamed response. Its events are written as soon as they are made, in one pass over all streams after a step.

    The coroutine of a stream wakes up only for rare cases: its end, an error, and a client that does not keep up.
    """

    def __init__(
        self,
        generation: Generation,
        watch: DisconnectWatch,
        events: StreamEvents,
        in_thread: InThread,
        slow_reader_timeout_s: float,
    ) -> None:
        self._generation, self._watch, self._events, self._in_thread = generation, watch, events, in_thread
        self._slow_s = slow_reader_timeout_s
        self._large: list[ChoiceDelta] = []  # whose events are to be made in a thread
        self.status_code, self.media_type = 200, events.framing.media_type
        self.background = None
        self.init_headers(_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        out: BodyWriter = scope["body_writer"]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._send_all(out)
            await self._until_read(out)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:  # an unfinished response makes uvicorn close the connection
            log.warning(
                "disconnected a client that did not read for %g s (slow_reader_timeout)", self._slow_s
            )
        finally:
            self._watch.close()

    async def _until_read(self, out: BodyWriter) -> None:
        """Wait until the client's buffers have room again. Raise TimeoutError if that takes too long."""
        if out.is_full:
            async with asyncio.timeout(self._slow_s):
                await out.drain()

    def _take(self) -> list[ChoiceDelta]:
        """Return the new deltas whose events can be made on the event loop. All are kept if they are too many."""
        deltas = self._generation.take()
        if self._events.entries(deltas) <= _FEW_ENTRIES:
            return deltas
        self._large = deltas
        return []

    async def _write_large(self, out: BodyWriter) -> None:
        """Make the events of the deltas that were too many for the event loop, and write them."""
        deltas, self._large = self._large, []
        if deltas:
            out.write(await self._in_thread(lambda: b"".join(self._events.chunks(deltas))))

    async def _send_all(self, out: BodyWriter) -> None:
        generation, events, framing = self._generation, self._events, self._events.framing

        def write_new() -> bool:
            if found := events.chunks(self._take()):
                out.write(found[0] if len(found) == 1 else b"".join(found))
            return not (out.is_full or self._large)

        try:
            while not generation.finished:
                if write_new():
                    await generation.wait(write_new)
                await self._write_large(out)
                await self._until_read(out)
            if generation.error is not None:
                raise generation.error
            deltas = self._take()
            await self._write_large(out)
            out.write(b"".join([*events.chunks(deltas), *events.last(), framing.done]))
        except TimeoutError:
            raise
        except Exception as error:
            if not isinstance(error, ApiError):
                log.exception("a stream failed")
            out.write(framing.error(as_api_error(error)) + framing.done)
