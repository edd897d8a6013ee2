"""HTTP/1.1 as a load needs it: bodies are handed over where they are read, once for each read from a connection.

Owns the connections to one server. A connection carries one request at a time and is kept for the next one. No
task waits for a piece and nothing is buffered: the client shares the machine with the server that it measures.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import cast
from urllib.parse import urlsplit

import httptools

DataCallback = Callable[[bytes], None]


class HttpClient:
    """Connections to the server at `base_url`, which may hold a path that is put in front of all others."""

    def __init__(self, base_url: str, headers: dict[str, str], insecure: bool = False) -> None:
        """`headers` go with each request. `insecure`: certificates are not checked. Raises ValueError for what is no
        URL."""
        url = urlsplit(base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"{base_url} is no address of a server: it begins with http:// or https://")
        self._host, self._prefix = url.hostname, url.path.rstrip("/")
        self._port = url.port or (443 if url.scheme == "https" else 80)
        self._ssl = _context(insecure) if url.scheme == "https" else None
        self._headers = {"Host": url.netloc.rpartition("@")[2], **headers}
        self._idle: list[_ClientConnection] = []

    async def request(
        self,
        method: str,
        path: str,
        headers: dict[str, str],
        body: bytes = b"",
        take: DataCallback | None = None,
    ) -> tuple[int, bytes]:
        """Status and body of the answer. With status 200 the body goes to `take`, if there is one, piece by piece.

        Raises OSError without a server or when it closes the connection, httptools.HttpParserError for what is no
        HTTP, and whatever `take` raises.
        """
        connection = await self._connect()
        lines = [f"{method} {self._prefix}{path} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in {**self._headers, **headers}.items()]
        head = "\r\n".join([*lines, f"Content-Length: {len(body)}", "\r\n"]).encode()
        try:
            found = await connection.exchange(head + body, take)
        except BaseException:  # what is still to come of the answer must not be taken for the next one
            connection.close()
            raise
        if not connection.closed:
            self._idle.append(connection)
        return found

    async def _connect(self) -> _ClientConnection:
        while self._idle:
            if not (connection := self._idle.pop()).closed:
                return connection
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(_ClientConnection, self._host, self._port, ssl=self._ssl)
        return made

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()


def _context(insecure: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if insecure:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


class _ClientConnection(asyncio.Protocol):
    """One exchange after the other. Also what its parser calls back."""

    closed = False
    _done: asyncio.Future[tuple[int, bytes]] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    async def exchange(self, request: bytes, take: DataCallback | None) -> tuple[int, bytes]:
        self._parser = httptools.HttpResponseParser(self)
        self._take, self._status, self._complete = take, 0, False
        self._pieces: list[bytes] = []  # of the body, not handed over
        self._has_end = False  # the body; otherwise it ends with the connection
        self._stays = False  # the connection, behind this
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._done

    def data_received(self, data: bytes) -> None:
        done = self._done
        if done is None or done.done():  # nobody asked
            self.close()
            return
        try:
            self._parser.feed_data(data)
            if self._take is not None and self._status == 200 and self._pieces:
                pieces, self._pieces = self._pieces, []
                self._take(pieces[0] if len(pieces) == 1 else b"".join(pieces))
        except Exception as error:
            done.set_exception(error)
            return
        if self._complete:
            if not self._stays:
                self.close()
            done.set_result((self._status, b"".join(self._pieces)))

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        if self._done is None or self._done.done():
            return
        if self._status and not self._has_end and error is None:
            self._done.set_result((self._status, b"".join(self._pieces)))
        else:
            self._done.set_exception(error or ConnectionResetError("the server closed the connection"))

    def close(self) -> None:
        self.closed = True
        self._transport.close()

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._has_end = True

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()
        self._stays = self._parser.should_keep_alive()

    def on_body(self, piece: bytes) -> None:
        self._pieces.append(piece)

    def on_message_complete(self) -> None:
        self._complete = True
