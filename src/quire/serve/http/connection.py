"""Connections of the HTTP server: uvicorn's, with limits on request heads and support for half-closed connections.

case                       behaviour
head of a request          431 beyond 64 KiB, 408 unless it is complete 10 s after its first byte
pipelined requests         400 beyond 32 on one connection
chunks of a body           400 beyond 2048 chunks if they have less than 64 bytes on average
client closes its half     the request is answered; a 100 Continue every 2 s detects a client that has gone
burst of requests          a few handlers start in each pass of the event loop, so that streams continue meanwhile
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from quire.serve.http.errors import ApiError
from quire.serve.http.handler_starts import HandlerStarts
from quire.serve.http.wire import encode
from quire.serve.http.writes import BodyWriter, GatheringTransport, WriteScheduler

HEAD_S = 10.0
_PROBE_S = 2.0
_MAX_HEAD_BYTES = 64 << 10
_MAX_PIPELINED = 32
# Limits on the chunks of a body: each costs as much time as some hundred bytes.
_FREE_PIECES, _LEAST_PIECE_BYTES = 2048, 64
_FIELD_BYTES = 32  # overhead of a header beside its text
_PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"

_HEAD_TOO_LARGE = ApiError(431, f"the request line and headers are larger than {_MAX_HEAD_BYTES} bytes")
_HEAD_TOO_LATE = ApiError(
    408, f"the request line and headers did not arrive within {HEAD_S:g} s", code="timeout"
)
_PIECES_TOO_SMALL = ApiError(
    400, f"the body is sent in chunks of less than {_LEAST_PIECE_BYTES} bytes on average: send larger chunks"
)
_TOO_MANY_AHEAD = ApiError(
    400, f"more than {_MAX_PIPELINED} pipelined requests: wait for answers before sending more"
)

_connection_made = cast(Callable[[Any, Any], None], HttpToolsProtocol.connection_made)


class Connection(HttpToolsProtocol):
    """One connection of a client. Routes find its BodyWriter in `scope["body_writer"]`. `connections` sets the rest."""

    writes: WriteScheduler
    starts: HandlerStarts
    _head_bytes = 0  # received since the start of an incomplete head
    _fields_bytes = 0  # size of the parsed parts of the head
    _in_head = False
    _pieces = _body_bytes = 0  # received of the current body
    # Deadline of the head, or the next probe of a half-closed connection.
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        _connection_made(self, GatheringTransport(transport, self.writes))
        self.body_writer = BodyWriter(self.transport, self.flow)
        self._set_timer(HEAD_S, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    # ----------------------------------------------------------------------------- request heads

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():  # the rest of a refused request
            return
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._in_head and self._head_bytes > _MAX_HEAD_BYTES:
            self._refuse(_HEAD_TOO_LARGE)
        elif self._timer is None and not self._is_answering:
            self._set_timer(HEAD_S, self._head_is_late)

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= _MAX_PIPELINED:
            raise _TOO_MANY_AHEAD
        super().on_message_begin()
        self._in_head, self._head_bytes, self._fields_bytes = True, 0, 0
        self._pieces = self._body_bytes = 0
        cast(dict[str, Any], self.scope)["body_writer"] = self.body_writer

    def on_url(self, url: bytes) -> None:
        self._add_field(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._add_field(name, value)
        super().on_header(name, value)

    def _add_field(self, *parts: bytes) -> None:
        self._fields_bytes += _FIELD_BYTES + sum(map(len, parts))
        if self._fields_bytes > _MAX_HEAD_BYTES:
            raise _HEAD_TOO_LARGE

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_timer()
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self.starts.start(lambda: super(Connection, self)._start_asgi_task(cycle, app))

    def on_body(self, body: bytes) -> None:
        self._pieces, self._body_bytes = self._pieces + 1, self._body_bytes + len(body)
        if self._pieces > _FREE_PIECES and self._body_bytes < self._pieces * _LEAST_PIECE_BYTES:
            raise _PIECES_TOO_SMALL
        super().on_body(body)

    def _head_is_late(self) -> None:
        self._timer = None
        if self._in_head:
            self._refuse(_HEAD_TOO_LATE)
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not a valid request. uvicorn calls it while it handles the parser's error."""
        error = sys.exc_info()[1]
        cause = error.__context__ if error is not None else None
        self._refuse(cause if isinstance(cause, ApiError) else ApiError(400, msg))

    def _refuse(self, error: ApiError) -> None:
        """Answer with `error`, unless another answer has started, and close the connection."""
        if not (self._is_answering and (self.pipeline or self.cycle.response_started)):
            body = encode(error.body())
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            self.transport.write(STATUS_LINE[error.status] + head % len(body) + body)
        self.transport.close()

    # ----------------------------------------------------------------------------- half-closed

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection open until a client that has closed its sending half has its answer.

        TLS has no half-closed connections, and an incomplete request gets no answer.
        """
        if self.scheme == "https" or not self._is_answering or self.cycle.more_body:
            cast(GatheringTransport, self.transport).flush()  # the transport closes after this call
            return False
        self.cycle.keep_alive = False
        self._set_timer(_PROBE_S, self._probe)
        return True

    def _probe(self) -> None:
        """Write an interim response, which clients ignore. If the client has gone, the write ends the connection."""
        self._timer = None
        if self._is_answering and not self.transport.is_closing():
            if not (self.pipeline or self.cycle.response_started) and self.scope["http_version"] == "1.1":
                self.transport.write(_PROBE)
            self._set_timer(_PROBE_S, self._probe)

    # ----------------------------------------------------------------------------------- timer

    def _set_timer(self, after_s: float, call: Callable[[], None]) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(after_s, call)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def connections(loop: asyncio.AbstractEventLoop) -> type[Connection]:
    """Return the connection class for event loop `loop`, for uvicorn's option `http`."""
    return type("Connection", (Connection,), {"writes": WriteScheduler(loop), "starts": HandlerStarts(loop)})
