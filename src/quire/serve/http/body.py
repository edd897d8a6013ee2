"""Request bodies: received within limits, measured while they arrive, decoded in a thread if they are large.

The cost of decoding a body is known before it is decoded. A `JsonMeter` counts the strings, lists, objects and commas
in the raw bytes, piece by piece, so a body with too many is refused while it is still arriving. `BodyMemory` bounds the
memory of the bodies of all open requests, so no number of requests exhausts the process.

    request.stream() -> JsonMeter.feed (thread) -> decode (thread) -> memory released when the request has ended
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Scope

from quire.serve.http.auth import ANYONE
from quire.serve.http.errors import ApiError, bad_request, overloaded

T = TypeVar("T")

# Up to this size: decoded on the event loop within a millisecond, and not counted as memory.
SMALL_BYTES = 16 << 10
_PIECE_BYTES = 256 << 10  # bytes measured at once, in a millisecond or two
_GRACE_S = 20.0  # for a body of any size
_SLOWEST_BYTES_PER_S = 8192  # minimum average rate of a body after the grace period
_NUMBERS_BESIDE_PROMPTS = 128 << 10
_MEMORY_PER_BODY = 16  # total memory for bodies, as a multiple of the maximum body
# Memory of a decoded string, list or object, and of a number in a list.
_ELEMENT_BYTES, _NUMBER_BYTES = 96, 40
_CONTINUATIONS = bytes(range(0x80, 0xC0))  # the bytes of a UTF-8 character after its first
_WIDE_LEADS = (b"\xf0", b"\xf1", b"\xf2", b"\xf3", b"\xf4")  # the first bytes of characters beyond U+FFFF


class JsonMeter:
    """Counters of the elements of a JSON text that arrives in pieces, without decoding it.

    The counts are exact up to the first syntax error, where decoding stops too. The work consists of a few passes
    in C over each piece.
    """

    __slots__ = ("_carry", "_in_string", "_wide", "chars", "commas", "elements", "seen")

    def __init__(self) -> None:
        self.elements = 0  # strings (keys included), lists and objects
        # Commas outside of strings. The number of numbers is at most this plus `elements`.
        self.commas = 0
        self.chars = 0  # upper bound of the number of characters in all strings
        self.seen = 0  # bytes fed so far
        self._in_string = 0
        self._carry = b""  # a backslash whose escaped character has not arrived
        self._wide = 1  # bytes per character of the widest string in Python

    def feed(self, piece: bytes) -> None:
        """Count the elements of `piece`, which continues the text fed before."""
        self.seen += len(piece)
        self._measure_text(piece)
        text = self._carry + piece
        split = (len(text) - len(text.rstrip(b"\\"))) & 1
        self._carry = b"\\" * split
        text = text[: len(text) - split].replace(rb"\\", b"").replace(rb"\"", b"")
        quotes = text.count(b'"')
        outside = b"".join(text.split(b'"')[self._in_string :: 2])
        self._in_string = (self._in_string + quotes) & 1
        self.elements += (quotes + 1) // 2 + outside.count(b"[") + outside.count(b"{")
        self.commas += outside.count(b",")

    def _measure_text(self, piece: bytes) -> None:
        escaped = piece.count(rb"\u")
        self.chars += len(piece) - 5 * escaped
        if escaped:
            self._wide = max(self._wide, 4 if rb"\ud" in piece or rb"\uD" in piece else 2)
        if not piece.isascii():
            self.chars -= len(piece) - len(piece.translate(None, _CONTINUATIONS))
            self._wide = max(self._wide, 4 if any(lead in piece for lead in _WIDE_LEADS) else 2)

    @property
    def memory_bytes(self) -> int:
        """Return an estimate of the memory of the decoded body in bytes."""
        numbers = self.commas * _NUMBER_BYTES
        return self.chars * self._wide + self.elements * _ELEMENT_BYTES + numbers


class BodyMemory:
    """The memory of the bodies of open requests, in total and by client.

    A client may use as much as it leaves free: one client at most half of the memory, two together two thirds. So no
    client can lock another one out (Choudhury and Hahne, "Dynamic queue length thresholds", 1998).
    """

    def __init__(self, total_bytes: int) -> None:
        self._total, self._used = total_bytes, 0
        self._by_client: dict[str, int] = {}

    @property
    def used_bytes(self) -> int:
        return self._used

    def change(self, client: str, before: int, after: int) -> None:
        """Change the memory of a body of `client` from `before` to `after` bytes.

        Raises:
            ApiError: 503 if there is no room.
        """
        own = self._by_client.get(client, 0)
        more = after - before
        needed = own + more if own > before else more  # the only body of a client may use all free memory
        if more > 0 and needed > self._total - self._used:
            raise overloaded(
                f"the bodies of open requests use {self._used >> 20} of {self._total >> 20} MiB "
                f"({_MEMORY_PER_BODY} times max_body_bytes): this one does not fit, retry later",
                1,
            )
        self._used += more
        self._by_client[client] = own + more
        if not self._by_client[client]:
            del self._by_client[client]


class BodyReader:
    """Reader of request bodies. Owns the thread that decodes them and the account of their memory.

    It is an Observer: the memory of a body is released when its request ends.
    """

    def __init__(self, max_bytes: int | None, max_elements: int, max_model_len: int) -> None:
        self._max_bytes = max_bytes or min((4 << 20) + 64 * max_model_len, 16 << 20)
        self._max_elements = max_elements
        self._max_numbers = 2 * max_model_len + _NUMBERS_BESIDE_PROMPTS
        self.memory = BodyMemory(_MEMORY_PER_BODY * self._max_bytes)
        self._thread = ThreadPoolExecutor(1, "bodies")

    async def read(self, request: Request, decode: Callable[[bytes | bytearray], T]) -> T:
        """Receive the body and return `decode(body)`, which runs in a thread if the body is large.

        Args:
            request: the request; its body has not been read.
            decode: converts the raw bytes, and may raise any error.

        Raises:
            ApiError: 415 unless the body is declared as JSON, 400 if it is compressed, 413 beyond a limit, 408 if it
                arrives too slowly, 503 if the bodies of open requests use too much memory.
        """
        check_type(request.headers)
        declared = request.headers.get("content-length", "")
        if (
            declared.isdecimal()
            and declared.isascii()
            and (len(declared) > 18 or int(declared) > self._max_bytes)
        ):
            raise self._too_large()
        raw, meter = bytearray(), JsonMeter()
        loop = asyncio.get_running_loop()
        patience_end_s = loop.time() + _GRACE_S
        try:
            async with asyncio.timeout_at(patience_end_s) as patience:
                async for chunk in request.stream():
                    raw += chunk
                    patience.reschedule(patience_end_s + len(raw) / _SLOWEST_BYTES_PER_S)
                    await self._check(request.scope, raw, meter)
        except TimeoutError:
            message = (
                f"the body arrives too slowly: {len(raw)} bytes so far, below {_SLOWEST_BYTES_PER_S} bytes/s"
            )
            raise ApiError(408, message, code="timeout", headers={"Connection": "close"}) from None
        if len(raw) <= SMALL_BYTES:
            return decode(raw)
        await self._measure(raw, meter)
        self._take(request.scope, meter.memory_bytes)
        return await loop.run_in_executor(self._thread, decode, raw)

    async def _check(self, scope: Scope, raw: bytearray, meter: JsonMeter) -> None:
        """Raise ApiError as soon as a body that is still arriving exceeds a limit."""
        if len(raw) > self._max_bytes:
            raise self._too_large()
        if len(raw) > SMALL_BYTES:
            self._take(scope, len(raw))
        if len(raw) - meter.seen >= _PIECE_BYTES:
            await self._measure(raw, meter)

    async def _measure(self, raw: bytearray, meter: JsonMeter) -> None:
        loop = asyncio.get_running_loop()
        while (start := meter.seen) < len(raw):
            piece = bytes(raw[start : start + _PIECE_BYTES])
            await loop.run_in_executor(self._thread, meter.feed, piece)
            if meter.elements > self._max_elements:
                raise self._too_many(f"{self._max_elements} strings, lists and objects (max_body_elements)")
            if meter.commas > self._max_numbers:
                raise self._too_many(
                    f"{self._max_numbers} numbers (twice max_model_len plus {_NUMBERS_BESIDE_PROMPTS})"
                )

    def _take(self, scope: Scope, size: int) -> None:
        client = scope.get("client_key", ANYONE).name
        self.memory.change(client, scope.get("body_bytes", 0), size)
        scope["body_bytes"] = size

    def _too_large(self) -> ApiError:
        return self._refusal(f"the body is larger than {self._max_bytes} bytes (max_body_bytes)")

    def _too_many(self, limit: str) -> ApiError:
        return self._refusal(f"the body contains more than {limit}")

    def _refusal(self, message: str) -> ApiError:
        return ApiError(413, message, code="body_too_large")

    def ended(self, scope: Scope, status: int) -> None:
        """Release the memory of the request's body."""
        self.memory.change(scope.get("client_key", ANYONE).name, scope.pop("body_bytes", 0), 0)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def check_type(headers: Headers) -> None:
    """Raise ApiError 415 unless the body is declared as JSON, and 400 if it is compressed.

    A page of another site may send forms and plain text without a CORS preflight, but not JSON. A missing header is
    refused too, because such a page can omit it.
    """
    given = headers.get("content-type", "").partition(";")[0].strip().lower()
    if given != "application/json" and not (given.startswith("application/") and given.endswith("+json")):
        got = f"got {given[:64]}" if given else "it is missing"
        message = f"the body must be JSON: send the header `Content-Type: application/json` ({got})"
        raise ApiError(415, message, code="unsupported_media_type")
    if (encoding := headers.get("content-encoding", "identity")) != "identity":
        raise bad_request(
            f"content-encoding {encoding[:64]} is not supported: send the body without compression"
        )
