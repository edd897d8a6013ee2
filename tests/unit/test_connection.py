"""Connections: heads, bodies and pipelines beyond their limits, late heads, and half-closed connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import uvicorn

from quire.serve.http import connection as connection_module
from quire.serve.http.connection import connections
from quire.serve.http.handler_starts import HandlerStarts

GET = b"GET /%b HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b"


class App:
    """An application that echoes path and body. /slow waits for `go`; a client that disconnects meanwhile sets `gone`."""

    def __init__(self) -> None:
        self.go, self.gone = asyncio.Event(), asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        if scope["path"] == "/slow":
            going, leaving = asyncio.ensure_future(self.go.wait()), asyncio.ensure_future(receive())
            await asyncio.wait((going, leaving), return_when=asyncio.FIRST_COMPLETED)
            if leaving.done():
                self.gone.set()
        answer = scope["path"].encode() + b"|" + body
        headers = [(b"content-length", b"%d" % len(answer))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[App, int]]:
    app = App()
    config = uvicorn.Config(
        app, port=0, http=connections(asyncio.get_running_loop()), lifespan="off", log_config=None, ws="none"
    )
    server = uvicorn.Server(config)
    server.capture_signals = suppress  # type: ignore[method-assign, assignment]
    task = asyncio.ensure_future(server.serve())
    while not server.started:
        await asyncio.sleep(0.001)
    try:
        yield app, server.servers[0].sockets[0].getsockname()[1]
    finally:
        app.go.set()
        server.should_exit = server.force_exit = True
        await task


async def talk(port: int, *pieces: bytes, half_close: bool = False) -> bytes:
    """Send `pieces` and return all bytes received until the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with suppress(ConnectionError):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)
    if half_close:
        writer.write_eof()
    found = b""
    with suppress(ConnectionError):
        async with asyncio.timeout(20):
            while piece := await reader.read(1 << 16):
                found += piece
    writer.close()
    return found


def run(test: Callable[[App, int], Awaitable[None]]) -> None:
    async def main() -> None:
        async with serving() as (app, port):
            await test(app, port)

    asyncio.run(main())


@pytest.mark.parametrize(
    "pieces",
    [
        [b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 70_000 + b"\r\n\r\n"],
        [b"GET / HTTP/1.1\r\nHost: a\r\nX: ", *[b"a" * 9000] * 9],
        [b"GET / HTTP/1.1\r\n" + b"X: a\r\n" * 5000 + b"\r\n"],
        [b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n"],
    ],
    ids=["value", "endless", "many", "path"],
)
def test_large_heads(pieces: list[bytes]) -> None:
    async def test(app: App, port: int) -> None:
        found = await talk(port, *pieces)
        assert found.startswith(b"HTTP/1.1 431 ") and b"larger than 65536 bytes" in found
        assert (await talk(port, GET % (b"a" * 60_000), half_close=True)).startswith(b"HTTP/1.1 200 ")

    run(test)


def test_handlers_start_through_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook is uvicorn's, so an update of uvicorn must not bypass it silently."""
    started, start = [], HandlerStarts.start
    monkeypatch.setattr(
        HandlerStarts, "start", lambda self, handler: (started.append(handler), start(self, handler))
    )

    async def test(app: App, port: int) -> None:
        assert (await talk(port, GET % b"a", half_close=True)).startswith(b"HTTP/1.1 200 ")
        assert len(started) == 1

    run(test)


def test_late_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "HEAD_S", 0.2)

    async def test(app: App, port: int) -> None:
        assert (await talk(port, b"GET / HT")).startswith(b"HTTP/1.1 408 ")
        assert await talk(port) == b"", "a connection without a request is closed"
        found = await talk(port, GET % b"a", b"GET / HTTP/1.1\r\nX: ", b"x")
        assert found.startswith(b"HTTP/1.1 200 ") and b"HTTP/1.1 408 " in found
        asyncio.get_running_loop().call_later(0.5, app.go.set)
        assert (await talk(port, GET % b"slow", half_close=True)).endswith(b"/slow|"), (
            "an answer may take longer"
        )

    run(test)


def test_requests_sent_ahead() -> None:
    async def test(app: App, port: int) -> None:
        some = await talk(port, GET % b"a" + GET % b"b" * 20, half_close=True)
        assert some.count(b"HTTP/1.1 200") == 21
        many = await talk(port, GET % b"slow" + GET % b"b" * 5000)
        assert many.count(b"HTTP/1.1 200") <= 34, "the connection is closed"

    run(test)


def test_bodies_in_tiny_chunks() -> None:
    head = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"

    async def test(app: App, port: int) -> None:
        assert b"chunks of less than 64 bytes" in await talk(port, head + b"1\r\na\r\n" * 5000)
        found = await talk(port, head + b"2\r\nab\r\n" * 1500 + b"0\r\n\r\n", half_close=True)
        assert found.endswith(b"ab" * 1500)
        large = b"80\r\n" + b"c" * 128 + b"\r\n"
        assert (await talk(port, head + large * 5000 + b"0\r\n\r\n", half_close=True)).endswith(
            b"c" * 640_000
        )

    run(test)


def test_a_half_closed_client_gets_its_answer() -> None:
    async def test(app: App, port: int) -> None:
        for sent, answer in ((GET % b"now", b"/now|"), (POST % (3, b"abc"), b"/|abc")):
            found = await talk(port, sent, half_close=True)
            assert found.startswith(b"HTTP/1.1 200 ") and found.endswith(answer)
        asyncio.get_running_loop().call_later(0.2, app.go.set)
        assert (await talk(port, GET % b"slow", half_close=True)).endswith(b"/slow|")
        assert await talk(port, POST % (9, b"abc"), half_close=True) == b"", "half a request has no answer"
        assert not app.gone.is_set()

    run(test)


def test_a_client_that_has_gone_is_noticed_before_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "_PROBE_S", 0.05)

    async def test(app: App, port: int) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET % b"slow")
        await asyncio.sleep(0.05)
        writer.close()
        async with asyncio.timeout(10):
            await app.gone.wait()
        app.gone.clear()
        asyncio.get_running_loop().call_later(0.3, app.go.set)
        found = await talk(port, GET % b"slow", half_close=True)
        assert found.startswith(b"HTTP/1.1 100 Continue\r\n\r\n") and found.endswith(b"/slow|")

    run(test)
