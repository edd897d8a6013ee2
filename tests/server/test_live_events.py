"""GET /live/events over the wire: its events, and that viewers that do not read cost nothing."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
from serving import Server, serving

TEXT = "/v1/completions"


def live_events(response: httpx.Response) -> Iterator[tuple[str, Any]]:
    name = ""
    for line in response.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


def test_steps_and_state(dry: Server) -> None:
    dry.post(TEXT, {"prompt": [5, 6, 7], "max_tokens": 50, "ignore_eos": True})
    with dry.http.stream("GET", "/live/events") as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        found = live_events(response)
        name, steps = next(found)
        assert name == "steps" and len(steps) >= 50 and all(step["took_s"] > 0 for step in steps)
        name, state = next(found)
        assert name == "state" and state["steps"] == [] and state["running"] == []
        assert state["stats"]["blocks"] == 16384 and state["blocks_per_cell"] == 1
        dry.post(TEXT, {"prompt": [5, 6, 7], "max_tokens": 50, "ignore_eos": True})
        more = next(told for name, told in found if name == "steps" and told)
        assert more[0]["step"] == steps[-1]["step"] + 1
    assert dry.post("/live/events", {}).status_code == 405
    assert dry.http.head("/live/events", timeout=5).headers["content-type"].startswith("text/event-stream")


def test_views_that_are_not_read() -> None:
    """They delay neither the engine nor other viewers, and the server buffers nothing for them."""
    flags = ["--dry-run", "--dry-run-step-ms", "4", "--max-num-seqs", "64"]
    with serving("demo", *flags) as server, ThreadPoolExecutor(64) as pool, contextlib.ExitStack() as stack:
        host, port = server.url.removeprefix("http://").split(":")
        for _ in range(20):
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((host, int(port)))
            client.sendall(b"GET /live/events HTTP/1.1\r\nHost: a\r\n\r\n")
        before = psutil.Process(server.process.pid).memory_info().rss
        bodies = [{"prompt": [i, *range(9)], "max_tokens": 1000, "ignore_eos": True} for i in range(1, 65)]
        named = {"X-Request-Id": "mine"}
        answers = [pool.submit(server.http.post, TEXT, json=body, headers=named) for body in bodies]
        with server.http.stream("GET", "/live/events") as response:
            states = (state for name, state in live_events(response) if name == "state")
            full = next(state for state in states if len(state["running"]) >= 32)
        # Requests go by the clients' own ids, which need not be unique.
        ids = {one["id"] for one in full["running"]}
        assert len(ids) == len(full["running"]) and all(one.startswith("mine#") for one in ids)
        assert all(answer.result().status_code == 200 for answer in answers)
        assert psutil.Process(server.process.pid).memory_info().rss - before < 150 << 20


def test_an_engine_that_dies_is_the_last_event() -> None:
    with (
        serving("demo", "--dry-run") as server,
        server.http.stream("GET", "/live/events") as response,
    ):
        found = live_events(response)
        next(found), next(found)
        psutil.Process(server.engine_pid()).kill()
        name, body = list(found)[-1]
        assert name == "end" and "the engine stopped" in body["error"]["message"]
