"""A minimal HTTP/1.1 client for load generation.

A connection carries one request at a time and is reused for the next one. Body data goes to a callback directly from
each read, without buffers and without waking a task, because the client often shares the machine with the server that
it measures.
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
    """The connections to one server."""

    def __init__(self, base_url: str, headers: dict[str, str], insecure: bool = False) -> None:
        """Prepare connections to a server; the first request connects.

        Args:
            base_url: the server; a path in it prefixes the paths of all requests.
            headers: sent with each request.
            insecure: whether to skip the check of certificates.

        Raises:
            ValueError: if `base_url` is no HTTP URL.
        """
        url = urlsplit(base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"{base_url} is no address of a server: it must begin with http:// or https://")
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
        on_data: DataCallback | None = None,
    ) -> tuple[int, bytes]:
        """Send a request and return the status and body of the response.

        Args:
            method: such as GET.
            path: of the URL, after the base URL.
            headers: in addition to those of all requests.
            body: of the request.
            on_data: receives the body of a response with status 200 in pieces; the returned body is empty then.

        Raises:
            OSError: if there is no server, or it closes the connection.
            httptools.HttpParserError: if the response is no HTTP.
            Exception: whatever `on_data` raises.
        """
        connection = await self._connect()
        lines = [f"{method} {self._prefix}{path} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in {**self._headers, **headers}.items()]
        head = "\r\n".join([*lines, f"Content-Length: {len(body)}", "\r\n"]).encode()
        try:
            found = await connection.exchange(head + body, on_data)
        except BaseException:  # the rest of this response must not be read as the next one
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
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()


def _context(insecure: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if insecure:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


class _ClientConnection(asyncio.Protocol):
    """A connection for one exchange at a time. Its `on_` methods are the callbacks of its parser."""

    closed = False
    _done: asyncio.Future[tuple[int, bytes]] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    async def exchange(self, request: bytes, on_data: DataCallback | None) -> tuple[int, bytes]:
        """Send an encoded request and return the status and body of the response."""
        self._parser = httptools.HttpResponseParser(self)
        self._on_data, self._status, self._complete = on_data, 0, False
        self._pieces: list[bytes] = []  # pieces of the body that the callback has not received
        self._has_end = False  # whether the body has a known end; otherwise it ends with the connection
        self._stays = False  # whether the connection stays open after this response
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._done

    def data_received(self, data: bytes) -> None:
        done = self._done
        if done is None or done.done():  # data without a request
            self.close()
            return
        try:
            self._parser.feed_data(data)
            if self._on_data is not None and self._status == 200 and self._pieces:
                pieces, self._pieces = self._pieces, []
                self._on_data(pieces[0] if len(pieces) == 1 else b"".join(pieces))
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
