"""Request bodies: measured without decoding, limited in size, elements, memory and time."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers
from starlette.requests import Request

from quire.serve.api.protocol.chat import ChatRequest
from quire.serve.http import body as body_module
from quire.serve.http.auth import ApiClient
from quire.serve.http.body import SMALL_BYTES, BodyMemory, BodyReader, JsonMeter, check_type
from quire.serve.http.errors import ApiError
from quire.serve.http.wire import decode_object, parse

JSON = {"content-type": "application/json"}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='ab"\\\n,[]{}:é中😀'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet='k"\\,'), inner),
)


def elements(value: Any) -> int:
    """Count the strings (keys included), lists and objects in a value."""
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(elements, value.values()))
    if isinstance(value, list):
        return 1 + sum(map(elements, value))
    return int(isinstance(value, str))


def commas(value: Any) -> int:
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return max(0, len(inner) - 1) + sum(map(commas, inner))


def chars(value: Any) -> int:
    if isinstance(value, dict):
        return sum(len(k) + chars(v) for k, v in value.items())
    if isinstance(value, list):
        return sum(map(chars, value))
    return len(value) if isinstance(value, str) else 0


def strings(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [*value, *(s for v in value.values() for s in strings(v))]
    if isinstance(value, list):
        return [s for v in value for s in strings(v)]
    return [value] if isinstance(value, str) else []


@given(VALUES, st.booleans(), st.integers(1, 9))
def test_a_meter_counts_what_is_decoded_however_it_is_cut(value: Any, escaped: bool, size: int) -> None:
    text = json.dumps(value, ensure_ascii=escaped).encode()
    meter = JsonMeter()
    for start in range(0, len(text), size):
        meter.feed(text[start : start + size])
    # A string that is cut in two counts as one more.
    assert elements(value) <= meter.elements <= elements(value) + len(text) // size
    assert (meter.commas, meter.seen) == (commas(value), len(text))
    whole = JsonMeter()
    whole.feed(text)
    assert whole.elements == elements(value)
    assert whole.chars >= chars(value)
    taken = sum(sys.getsizeof(s) - sys.getsizeof("") for s in strings(value))
    assert whole.memory_bytes + 64 * whole.elements >= taken


def test_what_comes_before_a_syntax_error_is_counted() -> None:
    """A decoder stops at the error, so the text after it costs nothing."""
    meter = JsonMeter()
    meter.feed(b'[[],[],\\"[],')
    assert meter.elements >= 3


def read(
    bodies: BodyReader,
    pieces: list[bytes],
    headers: dict[str, str] = JSON,
    wait_s: float = 0.0,
    scope: dict[str, Any] | None = None,
) -> Any:
    """Read a body that arrives in `pieces`, `wait_s` apart, and return what a route gets."""

    async def arriving() -> AsyncIterator[dict[str, Any]]:
        for i, piece in enumerate(pieces):
            await asyncio.sleep(wait_s)
            yield {"type": "http.request", "body": piece, "more_body": i < len(pieces) - 1}

    async def run() -> Any:
        raw = [(k.encode(), v.encode()) for k, v in headers.items()]
        found = {"type": "http", "method": "POST", "path": "/", "headers": raw}
        if scope is not None:
            scope.update(found)
            found = scope
        source = arriving()
        return await bodies.read(Request(found, source.__anext__), decode_object)

    return asyncio.run(run())


def refused(status: int, bodies: BodyReader, pieces: list[bytes], *args: Any, **options: Any) -> str:
    with pytest.raises(ApiError) as caught:
        read(bodies, pieces, *args, **options)
    assert caught.value.status == status
    return caught.value.message


def test_limits() -> None:
    bodies = BodyReader(1 << 20, 1000, 100)
    assert read(bodies, [b'{"a":', b"[1]}"]) == {"a": [1]}
    long = [b'{"prompt": "', b"a, " * 300_000, b'"}']
    assert len(read(bodies, long)["prompt"]) == 900_000, "commas within texts do not count"
    lists = b'{"a":[' + b"[]," * 20_000 + b"[]]}"
    assert "more than 1000 strings, lists and objects (max_body_elements)" in refused(413, bodies, [lists])
    numbers = b'{"a":[' + b"1," * 140_000 + b"1]}"
    assert "more than 131272 numbers" in refused(413, bodies, [numbers])
    assert "larger than 1048576 bytes (max_body_bytes)" in refused(413, bodies, [b" " * 600_000] * 2)
    assert "max_body_bytes" in refused(413, bodies, [b"{}"], {**JSON, "content-length": "9" * 5000})


def test_a_million_token_ids_fit_into_a_context_of_a_million() -> None:
    ids = list(range(1 << 20))
    assert read(BodyReader(16 << 20, 1000, 1 << 20), [json.dumps({"prompt": ids}).encode()])["prompt"] == ids


def test_elements_are_refused_while_the_body_still_arrives() -> None:
    """Otherwise a client could make the server store and decode the whole body."""
    piece = b"[]," * 100_000
    bodies, scope = BodyReader(16 << 20, 65536, 2048), {}
    pieces = [b'{"a":[', *[piece] * 40]

    def counted(pieces: list[bytes]) -> list[bytes]:
        class Pieces(list):
            taken = 0

            def __iter__(self) -> Any:
                for one in list.copy(self):
                    Pieces.taken += 1
                    yield one

        return Pieces(pieces)

    watched = counted(pieces)
    refused(413, bodies, watched, scope=scope)
    assert type(watched).taken <= 3


def test_the_length_of_a_body_follows_the_context() -> None:
    small, large = BodyReader(None, 1000, 2048), BodyReader(None, 1000, 1 << 20)
    assert str((4 << 20) + 64 * 2048) in refused(413, small, [b" " * (5 << 20)])
    assert str(16 << 20) in refused(413, large, [b" " * (17 << 20)])


def test_only_json_is_read() -> None:
    for given_type in ("application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json"):
        check_type(Headers({"content-type": given_type}))
    for wrong in (
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=a",
        "json",
        None,
    ):
        with pytest.raises(ApiError) as caught:
            check_type(Headers({"content-type": wrong} if wrong else {}))
        assert caught.value.status == 415
        assert "send the header `Content-Type: application/json`" in caught.value.message
        assert (wrong.partition(";")[0] if wrong else "missing") in caught.value.message


def test_a_body_that_trickles_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "_GRACE_S", 1.0)
    monkeypatch.setattr(body_module, "_SLOWEST_BYTES_PER_S", 100)
    assert "arrives too slowly" in refused(408, BodyReader(1000, 100, 100), [b" "] * 100, wait_s=0.1)
    assert read(BodyReader(2000, 100, 100), [b"{", *[b" " * 300] * 4, b"}"], wait_s=0.3) == {}


def test_memory_is_shared_between_clients_and_given_back() -> None:
    memory = BodyMemory(100)
    memory.change("a", 0, 40)
    memory.change("a", 0, 10)
    with pytest.raises(ApiError) as caught:
        memory.change("a", 0, 10)
    assert caught.value.status == 503 and caught.value.headers["Retry-After"]
    memory.change("b", 0, 25)
    with pytest.raises(ApiError):
        memory.change("b", 0, 1)
    memory.change("c", 0, 12)
    memory.change("a", 40, 0)
    memory.change("d", 0, 53)
    with pytest.raises(ApiError):
        memory.change("e", 0, 1)
    for client, size in (("a", 10), ("b", 25), ("c", 12), ("d", 53)):
        memory.change(client, size, 0)
    assert memory.used_bytes == 0
    memory.change("a", 0, 100)


def test_large_bodies_take_memory_until_their_requests_are_over() -> None:
    bodies = BodyReader(1 << 20, 1000, 100)
    text = b'{"a": "' + b"x" * 1_000_000 + b'"}'
    scopes: list[dict[str, Any]] = [{"client_key": ApiClient("me")} for _ in range(9)]
    for scope in scopes[:8]:
        read(bodies, [text], scope=scope)
    assert bodies.memory.used_bytes >= 8_000_000
    assert "bodies of open requests" in refused(503, bodies, [text], scope=scopes[8])
    assert read(bodies, [b"{}"], scope={"client_key": ApiClient("me")}) == {}, "small ones always fit"
    for scope in scopes:
        bodies.ended(scope, 200)
    assert bodies.memory.used_bytes == 0
    assert len(text) > SMALL_BYTES


def test_unknown_fields_cost_no_more_than_the_warnings_about_them() -> None:
    body = {"messages": [], "stream_options": {f"o{i}" * 100: 1 for i in range(100)}}
    _, warnings = parse({**body, **{f"k{i}" * 100: 1 for i in range(1000)}}, ChatRequest, False)
    assert len(warnings) == 16 and all(len(text) < 120 for text in warnings)
    with pytest.raises(ApiError) as caught:
        parse({"messages": [], "k" * 1_000_000: 1}, ChatRequest, True)
    assert len(caught.value.message) < 200


def test_no_error_repeats_a_long_value() -> None:
    error = ApiError(400, "x" * 1_000_000, "y" * 1_000_000)
    assert len(error.message) < 2100 and len(str(error)) < 2100 and len(error.param or "") == 128
