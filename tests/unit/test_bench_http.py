"""The HTTP of the load client: bodies in every framing, split anywhere, and invalid responses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import httptools
import pytest

from quire.bench.server.http import HttpClient

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n4\r\ndefg\r\n0\r\n\r\n"
SIZED = b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\nabcdefg"
TO_THE_END = b"HTTP/1.1 200 OK\r\n\r\nabcdefg"
REFUSED = b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nfull"


async def served(
    answers: list[bytes], size: int, work: Callable[[HttpClient], Coroutine[Any, Any, None]]
) -> list[bytes]:
    """Run `work` against a server that sends these answers in pieces of `size` bytes.

    Return the requests that the server received, and the number of connections.
    """
    requests: list[bytes] = []
    left = list(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(b"connection")
        while left and (head := await reader.readuntil(b"\r\n\r\n")):
            length = int(head.partition(b"Content-Length: ")[2].split()[0])
            requests.append(head + await reader.readexactly(length))
            answer = left.pop(0)
            for at in range(0, len(answer), size):
                writer.write(answer[at : at + size])
                await writer.drain()
                await asyncio.sleep(0)
            if b"Transfer-Encoding" not in answer and b"Content-Length" not in answer:
                break
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    http = HttpClient(f"http://127.0.0.1:{port}/base/", {"X-All": "1"})
    try:
        await work(http)
    finally:
        http.close()
        server.close()
    return requests


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize("answer", [CHUNKED, SIZED, TO_THE_END])
def test_bodies_come_whole(answer: bytes, size: int) -> None:
    async def work(http: HttpClient) -> None:
        pieces: list[bytes] = []
        assert await http.request("POST", "/v1/x", {"X-One": "2"}, b"body", pieces.append) == (200, b"")
        assert b"".join(pieces) == b"abcdefg" and all(pieces)
        assert await http.request("GET", "/y", {}) == (200, b"abcdefg")

    requests = asyncio.run(served([answer, answer], size, work))
    posted, *_ = [one for one in requests if one.startswith(b"POST")]
    assert posted.startswith(b"POST /base/v1/x HTTP/1.1\r\nHost: 127.0.0.1:") and posted.endswith(
        b"\r\n\r\nbody"
    )
    assert b"\r\nX-All: 1\r\nX-One: 2\r\n" in posted
    assert requests.count(b"connection") == (2 if answer is TO_THE_END else 1), (
        "one is kept for the next request"
    )


def test_other_statuses_are_told_with_their_body() -> None:
    async def work(http: HttpClient) -> None:
        pieces: list[bytes] = []
        assert await http.request("POST", "/x", {}, b"", pieces.append) == (503, b"full")
        assert not pieces

    asyncio.run(served([REFUSED], 3, work))


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (CHUNKED[:-9], ConnectionResetError),
        (b"", ConnectionResetError),
        (b"hello there\r\n", httptools.HttpParserError),
    ],
)
def test_what_is_no_answer_is_an_error(answer: bytes, error: type[Exception]) -> None:
    async def work(http: HttpClient) -> None:
        with pytest.raises(error):
            await http.request("POST", "/x", {}, b"", lambda data: None)
        with pytest.raises(OSError):
            await http.request("POST", "/x", {}, b"", lambda data: None)

    asyncio.run(served([answer], 1000, work))


def test_an_error_of_who_takes_the_pieces_ends_the_request() -> None:
    async def work(http: HttpClient) -> None:
        def take(data: bytes) -> None:
            raise ValueError("no")

        with pytest.raises(ValueError, match="no"):
            await http.request("POST", "/x", {}, b"", take)
        assert await http.request("POST", "/x", {}) == (200, b"abcdefg"), "by another connection"

    asyncio.run(served([CHUNKED, SIZED], 1000, work))


def test_what_is_no_address() -> None:
    for url in ("localhost:8000", "ftp://a", "http://"):
        with pytest.raises(ValueError, match="http://"):
            HttpClient(url, {})
