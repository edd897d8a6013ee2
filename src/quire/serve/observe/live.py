"""GET /live/events: the engine's state and steps as server-sent events, for the live view.

event: steps    list of LiveStep, oldest first; each step is sent once
event: state    EngineLive without its steps, with the requests that the key may see; `blocks` is base64
event: end      error object: the engine has stopped
"""

from __future__ import annotations

import asyncio
import contextlib

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.serve.api.context import client_of, server_of
from quire.serve.http.errors import ApiError
from quire.serve.http.wire import encode
from quire.serve.observe.live_view import LiveView

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_KEEP_ALIVE_S = 15.0


async def live_events(request: Request) -> Response:
    """Stream the engine's state and steps until the client disconnects."""
    server = server_of(request)
    if request.method == "HEAD":  # a HEAD answer must end
        return Response(headers=_HEADERS, media_type=LiveStream.media_type)
    return LiveStream(server.live.of(client_of(request)), server.settings.slow_reader_timeout)


class LiveStream(Response):
    """The event stream of one viewer."""

    media_type = "text/event-stream"

    def __init__(self, view: LiveView, slow_reader_timeout_s: float) -> None:
        self._view, self._slow_s = view, slow_reader_timeout_s
        self._seen = view.enter()
        self.status_code = 200
        self.background = None
        self.init_headers(_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send_all(send))
        gone = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait((sending, gone), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                # After a timeout the response is unfinished, so uvicorn closes the connection.
                with contextlib.suppress(TimeoutError):
                    sending.result()
        finally:
            sending.cancel()
            gone.cancel()
            self._view.leave()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await self._write(send, b": the engine, live\n\n")
        try:
            while True:
                try:
                    async with asyncio.timeout(_KEEP_ALIVE_S):
                        events = await self._view.next_events(self._seen)
                except TimeoutError:
                    await self._write(send, b": nothing new\n\n")
                    continue
                if not events:
                    break
                await self._write(send, b"".join(map(_event, events)))
        except ApiError as error:
            await self._write(send, b"event: end\ndata: " + encode(error.body()) + b"\n\n")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, send: Send, body: bytes) -> None:
        """Send `body`. Raise TimeoutError if the viewer's buffers stay full for slow_reader_timeout seconds."""
        async with asyncio.timeout(self._slow_s):
            await send({"type": "http.response.body", "body": body, "more_body": True})


def _event(named: tuple[str, bytes]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (named[0].encode(), named[1])


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
