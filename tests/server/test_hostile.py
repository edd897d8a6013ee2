"""Hostile requests: refused with a reason or answered soon, while other clients are served."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from serving import Server, chat

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SOON_S = 30.0  # generous, because the machine may run other tests too
LARGE = "x" * 10_000_000


def nested(depth: int, inner: Any) -> dict[str, Any]:
    for _ in range(depth):
        inner = {"type": "object", "properties": {"a": inner}, "required": ["a"]}
    return inner


def doubling(levels: int) -> dict[str, Any]:
    """Build a schema that refers to itself twice at each level: 2 ** levels places when expanded."""
    place = {
        f"l{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/l{i + 1}"}] * 2} for i in range(levels)
    }
    return {"$ref": "#/$defs/l0", "$defs": {**place, f"l{levels}": {"type": "null"}}}


SCHEMAS: dict[str, Any] = {
    "no way out": {"$ref": "#"},
    "circle": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    "recursion without end": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    "recursion": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
    "missing reference": {"$ref": "#/$defs/nowhere"},
    "reference to elsewhere": {"$ref": "http://127.0.0.1:9/schema.json"},
    "file reference": {"$ref": "file:///etc/passwd"},
    "exponential": doubling(40),
    "exponential choice": {"allOf": [{"anyOf": [{"const": i}, {"const": -i}]} for i in range(40)]},
    "deep": nested(19, {"type": "null"}),
    "many properties": {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(20_000)}},
    "many values": {"enum": [f"value {i}" for i in range(50_000)]},
    "long text": {"type": "string", "minLength": 10**9},
    "longer text": {"type": "string", "maxLength": 2**63},
    "many items": {"type": "array", "items": {"type": "null"}, "minItems": 10**9},
    "negative length": {"type": "string", "maxLength": -5},
    "tiny multiple": {"type": "number", "multipleOf": 1e-300},
    "large multiple": {"type": "integer", "multipleOf": 9999991},
    "huge bounds": {"type": "integer", "minimum": -(10**300), "maximum": 10**300},
    "pattern": {"type": "string", "pattern": "^(a+)+$"},
    "pattern with counts": {"type": "string", "pattern": "^.*a.{5000}$"},
    "property names": {"type": "object", "patternProperties": {"(x+x+)+y": {"type": "null"}}},
    "nothing": {"not": {}},
    "no schema": {"type": 7},
    "a key that is no text": {"properties": {"\x00\u202e": {"type": ["null", "nonsense"]}}},
}  # fmt: skip
REGEXES = [
    "(a+)+$", "(x+x+)+y", "(.*)*", "(a|aa)+$", ".*a.{2000}", "a{1,1000000}", "((a{100}){100}){100}", "(?=a)b", r"(a)\1",
    "(" * 5000 + ")" * 5000, "[" * 1000, r"\p{Nonsense}", "(?P<a", "a" * 200_000, "\x00", "|" * 10_000, "(?i:ß)+[^\\W\\d_]{3}",
]  # fmt: skip
GRAMMARS = [
    "start: start", "start: a\na: b\nb: a", 'start: start "a" | start start | "b"', "root ::= root", "start: /(a+)+/",
    "start: " + "(" * 3000, "start: nowhere", "%import common.NOTHING\nstart: NOTHING", "\x00", "start: " + '"a" ' * 100_000,
]  # fmt: skip
TOOL = {"name": "f", "parameters": {"type": "object"}}
LARGE_FIELDS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, chat(LARGE)),
    (CHAT, chat("Hi", user=LARGE)),
    (CHAT, chat("Hi", stop=[LARGE])),
    (CHAT, chat("Hi", bad_words=[LARGE])),
    (CHAT, chat("Hi", chat_template=LARGE)),
    (CHAT, chat("Hi", guided_regex=LARGE)),
    (CHAT, chat("Hi", guided_choice=[LARGE, "a"])),
    (CHAT, chat("Hi", model=LARGE)),
    (CHAT, chat("Hi", request_id=LARGE)),
    (CHAT, chat("Hi", **{LARGE: 1})),
    (CHAT, chat("Hi", tools=[{"type": "function", "function": {**TOOL, "description": LARGE}}])),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": LARGE}]}]}),
    (CHAT, {"messages": [{"role": "user", "content": "a"}] * 200_000}),
    (TEXT, {"prompt": [5] * 1_000_000}),
    (TEXT, {"prompt": LARGE, "truncate_prompt_tokens": 5}),
    (TEXT, {"prompt": "\ud7ff\U0001f600" * 1_000_000, "max_tokens": 1}),
    ("/v1/messages", {"model": "demo", "max_tokens": 2, "messages": [{"role": "user", "content": LARGE}]}),
    ("/v1/responses", {"input": LARGE}),
    ("/v1/embeddings", {"input": [LARGE, "a"]}),
    ("/generate", {"prompt": LARGE}),
    ("/tokenize", {"prompt": LARGE}),
    ("/detokenize", {"tokens": [5] * 2_000_000}),
]


@pytest.fixture(scope="module", autouse=True)
def bystander(demo: Server) -> Iterator[None]:
    """Send requests of another client, which must be answered throughout; check that nothing is left afterwards."""
    stop, slowest, wrong = threading.Event(), [0.0], []

    def ask() -> None:
        with httpx.Client(base_url=demo.url, timeout=60) as http:
            while not stop.wait(0.2):
                began_s = time.monotonic()
                answer = http.post(TEXT, json={"prompt": "Once upon a time", "max_tokens": 4})
                slowest[0] = max(slowest[0], time.monotonic() - began_s)
                if answer.status_code != 200:
                    wrong.append(answer.text)

    thread = threading.Thread(target=ask)
    thread.start()
    yield
    stop.set()
    thread.join()
    assert not wrong and slowest[0] < SOON_S
    assert demo.wait_until_idle()["blocks"]["used"] == 0
    assert demo.http.get("/health").status_code == 200


def soon(server: Server, path: str, body: Any) -> httpx.Response:
    """Check that an answer is not a 5xx and that an error has a short message."""
    began_s = time.monotonic()
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = server.http.post(path, content=content, headers={"content-type": "application/json"})
    assert time.monotonic() - began_s < SOON_S
    assert answer.status_code < 500, answer.text[:500]
    if answer.status_code != 200:
        assert 0 < len(answer.json()["error"]["message"]) < 4000
    return answer


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas(demo: Server, name: str) -> None:
    schema, few = SCHEMAS[name], {"max_tokens": 6}
    soon(demo, TEXT, {"prompt": "Hi", "guided_json": schema, **few})
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    soon(demo, CHAT, chat("Hi", response_format=form, **few))
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    soon(demo, CHAT, chat("Hi", tools=[tool], tool_choice="required", **few))


@pytest.mark.parametrize("regex", REGEXES, ids=lambda text: repr(text[:20]))
def test_regular_expressions(demo: Server, regex: str) -> None:
    soon(demo, TEXT, {"prompt": "Hi", "guided_regex": regex, "max_tokens": 6})


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda text: repr(text[:20]))
def test_grammars(demo: Server, grammar: str) -> None:
    soon(demo, CHAT, chat("Hi", guided_grammar=grammar, max_tokens=6))


@pytest.mark.parametrize(("path", "body"), LARGE_FIELDS, ids=lambda value: str(value)[:40])
def test_ten_megabytes(demo: Server, path: str, body: dict[str, Any]) -> None:
    soon(demo, path, {**body, "max_tokens": 2} if path in (CHAT, TEXT) else body)


NUMBERS = [b"-1", b"0", b"-0", b"1e400", b"-1e400", b"1" + b"0" * 400, b"1e-400", b"2147483648", b"9223372036854775808",
           b"-9223372036854775809", b"NaN", b"-Infinity", b"0.1e1", b"1.0000000000000000000001", b"01", b"0x10", b"1_000"]  # fmt: skip
COUNTS = [
    "max_tokens",
    "min_tokens",
    "n",
    "top_k",
    "seed",
    "logprobs",
    "truncate_prompt_tokens",
    "timeout",
    "priority",
]


@pytest.mark.parametrize("number", NUMBERS, ids=lambda value: value[:20].decode())
def test_numbers(demo: Server, number: bytes) -> None:
    for field in COUNTS:
        body = b'{"prompt": "Hi", "max_tokens": 2, "%b": %b}' % (field.encode(), number)
        content = {"content-type": "application/json"}
        answer = demo.http.post(TEXT, content=body, headers=content)
        assert answer.status_code < 500 or (answer.status_code == 504 and field == "timeout"), answer.text
    for path, field in (("/v1/messages", b"max_tokens"), ("/v1/responses", b"max_output_tokens")):
        text = (
            b'"input": "Hi"'
            if b"output" in field
            else b'"model":"demo","messages":[{"role":"user","content":"Hi"}]'
        )
        soon(demo, path, b'{%b, "%b": %b}' % (text, field, number))


def raw(server: Server, data: bytes, wait_s: float = 10.0) -> bytes:
    """Send bytes on a new connection, close its sending half and return the answer."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=wait_s) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        received = b""
        while piece := connection.recv(1 << 16):
            received += piece
        return received


BODY = b'{"prompt": "Hi", "max_tokens": 2}'
RAW = {
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 100,
    "nothing": b"",
    "half a head": b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Le",
    "less than promised": b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500\r\n\r\n" + BODY,
    "negative length": b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n" + BODY,
    "enormous length": b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999\r\n\r\n" + BODY,
    "two lengths": b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\nContent-Length: 30\r\n\r\n" + BODY,
    "both ways": b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "bad chunks": b"POST /generate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n0\r\n\r\n",
    "long head": b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"a" * 1_000_000 + b"\r\n\r\n",
    "many heads": b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X-A: b\r\n" * 20_000 + b"\r\n",
    "long path": b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "odd path": b"GET /v1/models/%00%ff/../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "splitting": b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: a\r\n b\r\n\r\n",
}  # fmt: skip


@pytest.mark.parametrize("name", RAW)
def test_connections(demo: Server, name: str) -> None:
    try:
        received = raw(demo, RAW[name])
    except OSError:  # reset, because it sends more after the answer
        return
    assert b"HTTP/1.1 5" not in received[:12] and b"root:" not in received
