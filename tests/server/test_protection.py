"""Protection of clients against other sites' web pages, and of the server against stalled readers and engines."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import httpx
import pytest
from serving import Server, chat, engine_of, listens_at

CHAT = "/v1/chat/completions"
PAGES = ["/", "/static/live.js", "/static/about.json"]
DATA = [
    "/stats",
    "/metrics",
    "/v1/models",
    "/v1/responses/resp_x",
    "/live/events",
    "/health",
    "/openapi.json",
]


@pytest.mark.parametrize("path", [*PAGES, *DATA])
def test_every_route_checks_the_host(dry: Server, path: str) -> None:
    answer = dry.http.get(path, headers={"host": "evil.example"})
    assert answer.status_code == 403 and "--allowed-hosts" in answer.json()["error"]["message"]
    for headers in ({"origin": "http://evil.example"}, {"sec-fetch-site": "cross-site"}, {"origin": "null"}):
        answer = dry.http.get(path, headers=headers)
        assert answer.status_code == 403 and "--allowed-origins" in answer.json()["error"]["message"]
        assert "access-control-allow-origin" not in answer.headers


def test_a_page_elsewhere_cannot_send_requests(dry: Server) -> None:
    body = b'{"messages": [{"role": "user", "content": "Hi"}]}'
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=a"):
        answer = dry.http.post(CHAT, content=body, headers={"content-type": kind})
        assert answer.status_code == 415
        assert "send the header `Content-Type: application/json`" in answer.json()["error"]["message"]
    assert dry.http.post(CHAT, content=body).status_code == 415, "a page may leave the header out"
    for headers in (
        {"origin": "http://evil.example"},
        {"sec-fetch-site": "cross-site"},
        {"host": "a.example"},
    ):
        assert dry.post(CHAT, chat("Hi"), headers=headers).status_code == 403
        assert dry.http.delete("/v1/responses/resp_x", headers=headers).status_code == 403
        upgrade = {**headers, "connection": "Upgrade", "upgrade": "websocket"}
        assert dry.http.get("/live/events", headers=upgrade).status_code == 403
    own = {"origin": dry.url, "sec-fetch-site": "same-origin"}
    assert dry.post(CHAT, chat("Hi"), headers=own).status_code == 200
    answer = dry.http.post("/v1/messages", content=body, headers={"content-type": "text/plain"})
    assert answer.json()["type"] == "error"


ODD = [
    b"",
    b"\xff",
    b";;=,;q=x",
    b"=",
    b"abc;version=abc,*/*;q=",
    b"\xb2",
    b"[",
    b"://",
    b"Bearer",
    b"00-zz-zz-zz",
    b"a" * 9000,
]


@pytest.mark.parametrize("value", ODD)
def test_no_header_can_fail_the_server(dry: Server, value: bytes) -> None:
    names = ("accept", "accept-encoding", "authorization", "content-encoding", "content-type", "cookie", "host",
             "if-none-match", "origin", "sec-fetch-site", "traceparent", "x-api-key", "x-request-id", "range",
             "forwarded", "expect", "upgrade", "anthropic-version")  # fmt: skip
    for name in names:
        for path in ("/metrics", "/stats", "/", "/v1/responses/x?stream=%ff&=&&stream"):
            assert dry.http.get(path, headers={name: value}).status_code < 500, (name, path)
        answer = dry.post("/generate", {"prompt": "Hi", "max_tokens": 1}, headers={name: value})
        assert answer.status_code < 500, name


def test_a_large_number_of_elements_is_refused_quickly(dry: Server) -> None:
    lists = b'{"messages": [' + b"[]," * 1_300_000 + b"[]]}"
    keys = b'{"a": 1' + b"".join(b',"k%d":1' % i for i in range(300_000)) + b"}"
    for body in (lists, keys):
        answer = dry.post_bytes(CHAT, body)
        assert answer.status_code == 413 and "max_body_elements" in answer.text
    # The body may hold 135,168 numbers; the text of the ids may be as long as max_model_len tokens can be (32,768).
    answer = dry.post_bytes("/detokenize", b'{"tokens": [' + b"5," * 40_000 + b"5]}")
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tokens"


def test_stalled_readers_and_engines() -> None:
    """Standard output is a pipe that is not read; then the engine process is suspended."""
    command = [sys.executable, "-m", "quire", "serve", "demo", "--dry-run", "--port", "0", "--log-requests"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        deadline_s = time.monotonic() + 60
        while not (port := listens_at(process.pid)):
            assert process.poll() is None and time.monotonic() < deadline_s
            time.sleep(0.05)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20) as http:
            for _ in range(800):  # lines of 100 bytes: more than a pipe's buffer
                assert http.get("/nowhere").status_code == 404
            engine = engine_of(process.pid)
            engine.send_signal(signal.SIGSTOP)
            until(http, 503)
            assert http.get("/health").json()["status"] == "stalled"
            engine.send_signal(signal.SIGCONT)
            until(http, 200)
            assert http.post("/generate", json={"prompt": "Hi", "max_tokens": 1}).status_code == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
    finally:
        process.kill()
        assert process.stdout is not None
        process.stdout.close()


def until(http: httpx.Client, status: int) -> None:
    deadline_s = time.monotonic() + 40
    while http.get("/health").status_code != status:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
