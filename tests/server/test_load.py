"""Overload: limits, timeouts, clients that disconnect or do not read, and fair shares."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
from serving import Server, chat, events, serving

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LONG = {"prompt": "a b c d", "max_tokens": 1500, "ignore_eos": True}  # 30 s with steps of 20 ms


@contextmanager
def busy(server: Server, **headers: str) -> Iterator[None]:
    """Hold a slot with a long request inside this context."""
    with server.http.stream("POST", TEXT, json={**LONG, "stream": True}, headers=headers) as response:
        lines = response.iter_lines()  # keeps the response open while it exists
        next(lines)
        yield


def test_requests_beyond_max_waiting_get_503() -> None:
    flags = ["--dry-run", "--dry-run-step-ms", "20", "--max-num-seqs", "1", "--max-waiting", "2"]
    with serving("demo", *flags) as server, ThreadPoolExecutor(8) as pool:
        body = {**LONG, "max_tokens": 10}
        with busy(server):
            runs = [pool.submit(server.post, TEXT, body) for _ in range(8)]
            refused = [run.result() for run in itertools.islice(as_completed(runs), 6)]
        assert [answer.status_code for answer in refused] == [503] * 6
        assert sorted(run.result().status_code for run in runs) == [200] * 2 + [503] * 6
        turned_away = refused[0]
        assert int(turned_away.headers["retry-after"]) >= 1
        assert turned_away.json()["error"]["code"] == "overloaded"
        assert server.post(TEXT, {**body, "n": 4}).status_code == 400  # never fits
        assert server.wait_until_idle()["requests"]["rejected"] == 6
        assert server.post(TEXT, {"prompt": "a"}).status_code == 200


def test_tokens_beyond_max_waiting_tokens_get_503() -> None:
    flags = ["--dry-run", "--dry-run-step-ms", "20", "--max-num-seqs", "1", "--max-waiting-tokens", "100"]
    with serving("demo", *flags) as server, ThreadPoolExecutor(8) as pool:
        body = {"prompt": [5] * 60, "max_tokens": 10, "ignore_eos": True}
        with busy(server):
            runs = [pool.submit(server.post, TEXT, body) for _ in range(6)]
            refused = [run.result() for run in itertools.islice(as_completed(runs), 5)]
        assert [answer.status_code for answer in refused] == [503] * 5
        assert sorted(run.result().status_code for run in runs) == [200] + [503] * 5


def test_timeouts() -> None:
    with serving("demo", "--dry-run", "--dry-run-step-ms", "20", "--request-timeout", "2.5") as server:
        answer = server.post(TEXT, {**LONG, "timeout": 0.2})
        assert answer.status_code == 504 and answer.json()["error"]["code"] == "timeout"
        assert "0.2 s" in answer.json()["error"]["message"]
        *chunks, error, done = events(server.post(TEXT, {**LONG, "timeout": 1.5, "stream": True}))
        assert chunks and error["error"]["code"] == "timeout" and done == "[DONE]"
        answer = server.post(TEXT, {**LONG, "timeout": 60})  # the server's limit is lower
        assert answer.status_code == 504 and "2.5 s" in answer.json()["error"]["message"]
        assert server.wait_until_idle()["blocks"]["used"] == 0


def test_timeout_of_a_request_that_never_ran() -> None:
    flags = ["--dry-run", "--dry-run-step-ms", "20", "--max-num-seqs", "1"]
    body = {**LONG, "stream": True}
    with serving("demo", *flags) as server, server.http.stream("POST", TEXT, json=body) as first:
        lines = first.iter_lines()
        next(lines)
        answer = server.post(TEXT, {**body, "timeout": 0.2})
        assert answer.status_code == 504  # an HTTP status, because no answer had started


def test_a_client_that_leaves_frees_its_blocks_at_once() -> None:
    with serving("demo", "--dry-run", "--dry-run-step-ms", "20") as server:
        for body in ({**LONG, "stream": True}, {**LONG, "stream": True, "n": 4}):
            with server.http.stream("POST", TEXT, json=body) as response:
                lines = response.iter_lines()
                next(lines)
                assert server.stats()["blocks"]["used"] > 0
            assert server.wait_until_idle()["blocks"]["used"] == 0  # long before its last token
        before = server.stats()["requests"]["aborted"]
        with contextlib.suppress(httpx.ReadTimeout):
            httpx.post(server.url + TEXT, json=LONG, timeout=2)
        stats = server.wait_until_idle()
        assert stats["requests"]["aborted"] == before + 1 and stats["blocks"]["used"] == 0


def test_a_client_that_does_not_read_is_dropped() -> None:
    """The memory of its answer stays bounded meanwhile, and other clients are served."""
    with serving("demo", "--dry-run", "--slow-reader-timeout", "1") as server:
        body = json.dumps({**LONG, "max_tokens": 2000, "n": 16, "stream": True, "logprobs": 20}).encode()
        host, port = server.url.removeprefix("http://").split(":")
        before = psutil.Process(server.process.pid).memory_info().rss
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((host, int(port)))
            head = (
                f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\n\r\n"
            )
            client.sendall(head.encode() + body)
            time.sleep(0.5)
            assert server.post(TEXT, {"prompt": "a b"}).status_code == 200
            stats = server.wait_until_idle(30)
            assert stats["blocks"]["used"] == 0
            grown = psutil.Process(server.process.pid).memory_info().rss - before
            assert grown < 400 << 20
            server.wait_for(lambda: "disconnected a client that did not read for 1 s" in server.output)
            client.settimeout(20)
            received = bytearray()
            with contextlib.suppress(ConnectionError):
                while piece := client.recv(1 << 20):
                    received += piece
        assert received.startswith(b"HTTP/1.1 200 ") and b"[DONE]" not in received  # closed before the end


def keyed(server: Server, key: str) -> httpx.Client:
    limits = httpx.Limits(max_connections=None)
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.Client(base_url=server.url, headers=headers, timeout=60, limits=limits)


@contextmanager
def stopped(server: Server) -> Iterator[None]:
    """Suspend the engine process inside this context, so that requests queue up."""
    engine = psutil.Process(server.engine_pid())
    engine.suspend()
    try:
        yield
    finally:
        engine.resume()


def wait_until_open(server: Server, client: httpx.Client, count: int) -> None:
    """Wait until the server has `count` open requests, without asking the engine."""
    pattern = re.compile(rf"^quire:requests_open{{.*}} {count}.0$", re.MULTILINE)
    server.wait_for(lambda: pattern.search(client.get("/metrics").text))


def burst(client: httpx.Client, count: int, tokens: int) -> list[float]:
    """Send `count` requests at once and return the times of their answers, in order."""

    def one(number: int) -> float:
        body = {"prompt": [5 + number, 6, 7], "max_tokens": tokens, "ignore_eos": True}
        assert client.post(TEXT, json=body).status_code == 200
        return time.monotonic()

    with ThreadPoolExecutor(count) as pool:
        return sorted(pool.map(one, range(count)))


def test_a_burst_of_one_key_does_not_starve_another(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alpha name=alpha admin\nbeta name=beta\n# comment\ngamma name=gamma\n")
    flags = ["--dry-run", "--dry-run-step-ms", "10", "--max-num-seqs", "2", "--api-key-file", str(keys)]
    with (
        serving("demo", *flags) as server,
        ThreadPoolExecutor(2) as pool,
        keyed(server, "alpha") as one,
        keyed(server, "beta") as other,
    ):
        with stopped(server):
            first = pool.submit(burst, one, 40, 20)
            wait_until_open(server, one, 40)
            second = pool.submit(burst, other, 6, 20)
            wait_until_open(server, one, 46)
        alpha, beta = first.result(), second.result()
        # In turns, beta's six requests take as long as about twelve; without turns they would be last.
        before_beta = sum(end < beta[-1] for end in alpha)
        assert before_beta < 25, f"{before_beta} of 40 came first"
        served = one.get("/stats").json()["tokens"]["by_client"]
        assert served == {"alpha": 40 * 23, "beta": 6 * 23}


def test_weights_are_shares(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alpha name=alpha weight=3\nbeta name=beta weight=1\n")
    flags = ["--dry-run", "--dry-run-step-ms", "10", "--max-num-seqs", "1", "--api-key-file", str(keys)]
    with (
        serving("demo", *flags) as server,
        ThreadPoolExecutor(2) as pool,
        keyed(server, "alpha") as one,
        keyed(server, "beta") as other,
    ):
        with stopped(server):
            runs = [pool.submit(burst, client, 24, 10) for client in (one, other)]
            wait_until_open(server, one, 48)
        alpha, beta = (run.result() for run in runs)
        half = alpha[11]  # when alpha had 12 answers
        assert 2 <= sum(end <= half for end in beta) <= 7


def test_one_key_cannot_fill_the_queue_for_all(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alpha\nbeta\n")
    flags = ["--dry-run", "--dry-run-step-ms", "20", "--max-num-seqs", "1", "--max-waiting", "4"]
    with (
        serving("demo", *flags, "--api-key-file", str(keys)) as server,
        ThreadPoolExecutor(10) as pool,
        keyed(server, "alpha") as one,
        keyed(server, "beta") as other,
    ):

        def post(client: httpx.Client) -> int:
            return client.post(TEXT, json={**LONG, "max_tokens": 10}).status_code

        with busy(server, Authorization="Bearer alpha"):
            alpha = [pool.submit(post, one) for _ in range(7)]
            assert [run.result() for run in itertools.islice(as_completed(alpha), 3)] == [503] * 3
            assert post(other) == 200  # the stream leaves the only slot to it for a while
            assert sum(run.done() for run in alpha) == 3
        assert sorted(run.result() for run in alpha) == [200] * 4 + [503] * 3


def test_many_streams_with_random_leavers(dry: Server) -> None:
    """Every request ends exactly once, and no resources are left."""

    def one(number: int) -> Any:
        body = chat(f"question {number} " + "word " * (number % 50), stream=True)
        with dry.http.stream("POST", CHAT, json=body) as response:
            assert response.status_code == 200
            if number % 3 == 0:
                next(response.iter_lines())
                return None
            lines = [line for line in response.iter_lines() if line]
        assert lines[-1] == "data: [DONE]" and lines.count("data: [DONE]") == 1
        text = "".join(
            c["delta"].get("content", "") for line in lines[:-1] for c in json.loads(line[6:])["choices"]
        )
        return text == f"user\nquestion {number} " + "word " * (number % 50) + "\nassistant\n"

    with ThreadPoolExecutor(48) as pool:
        found = list(pool.map(one, range(300)))
    assert found.count(None) == 100 and found.count(True) == 200
    stats = dry.wait_until_idle()
    assert stats["blocks"]["used"] == 0
