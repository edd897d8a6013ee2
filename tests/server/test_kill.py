"""Processes killed under load: the remaining ends notice it and free their resources."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from serving import Server, serving

from quire.cli.main import main

TEXT = "/v1/completions"
SLOW = ["demo", "--dry-run", "--dry-run-step-ms", "20", "--max-num-seqs", "24"]
STREAMS = 40  # more than the slots
CLIENT = """
import httpx, sys
body = {"prompt": "a b c d", "max_tokens": 1500, "ignore_eos": True, "stream": True, "n": 2}
with httpx.stream("POST", sys.argv[1], json=body, timeout=60) as response:
    for line in response.iter_lines():
        print(line, flush=True)
"""

pytestmark = pytest.mark.usefixtures("no_process_is_left")


def stream(server: Server, number: int, tokens: int) -> list[str]:
    """Return the events of one stream, or the body of an answer that is not a stream."""
    body = {"prompt": [5 + number] * 4, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    answer = httpx.post(server.url + TEXT, json=body, timeout=60)
    if answer.status_code != 200:
        return [answer.text]
    return [event.removeprefix("data: ") for event in answer.text.split("\n\n") if event]


def until_busy(server: Server) -> None:
    def busy() -> bool:
        stats = server.stats()
        return stats["requests"]["open"] >= STREAMS and stats["tokens"]["generated"] >= 100

    server.wait_for(busy)


def test_killed_engine_under_load() -> None:
    with serving(*SLOW) as server, ThreadPoolExecutor(STREAMS) as pool:
        runs = [pool.submit(stream, server, i, 1000) for i in range(STREAMS)]
        until_busy(server)
        os.kill(server.engine_pid(), signal.SIGKILL)
        began = 0
        for run in runs:
            events = run.result(30)
            if len(events) == 1:  # it had not started, so the error has its own HTTP status
                assert json.loads(events[0])["error"]["code"] == "engine_dead"
                continue
            began += 1
            errors = [event for event in events[:-1] if "error" in json.loads(event)]
            assert events[-1] == "[DONE]" and events.count("[DONE]") == 1 and errors == [events[-2]]
            assert "exit code -9" in events[-2]
        assert 0 < began < STREAMS
        assert server.wait() == 1 and "exit code -9" in server.output


def test_a_killed_rank_ends_an_idle_server_and_is_named() -> None:
    flags = ["demo", "--device", "cpu", "--kv-cache-memory", "16777216", "--tensor-parallel-size", "2"]
    with serving(*flags) as server:
        assert server.http.get("/health").status_code == 200
        (rank,) = psutil.Process(server.engine_pid()).children()
        rank.kill()
        assert server.wait() == 1
        assert f"rank 1 (process {rank.pid}) ended with signal SIGKILL" in server.output


def test_sigterm_under_load_ends_every_stream_in_order() -> None:
    with serving(*SLOW) as server, ThreadPoolExecutor(STREAMS) as pool:
        runs = [pool.submit(stream, server, i, 200) for i in range(STREAMS)]
        until_busy(server)
        server.signal(signal.SIGTERM)
        for run in runs:  # the streams that wait for a slot are admitted too
            events = run.result(60)
            assert events[-1] == "[DONE]"
            assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
        assert server.wait() == 0


def test_killed_clients_free_their_blocks() -> None:
    with serving(*SLOW) as server:
        command = [sys.executable, "-c", CLIENT, server.url + TEXT]
        clients = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
        try:
            for client in clients:
                assert client.stdout is not None and client.stdout.readline().startswith("data: ")
            server.wait_for(lambda: server.stats()["requests"]["active"] == 8)
        finally:
            for client in clients:
                client.kill()
                client.wait()
        stats = server.wait_until_idle(20)  # the answers would take 30 s
        assert stats["blocks"]["used"] == 0 and stats["requests"]["aborted"] == 8
        assert server.post(TEXT, {"prompt": "a b", "max_tokens": 2}).status_code == 200


def test_a_server_that_is_killed_takes_its_engine_along() -> None:
    with serving(*SLOW) as server, ThreadPoolExecutor(4) as pool:
        runs = [pool.submit(stream, server, i, 1000) for i in range(4)]
        server.wait_for(lambda: server.stats()["tokens"]["generated"] >= 10)
        engine = psutil.Process(server.engine_pid())
        server.signal(signal.SIGKILL)
        for run in runs:
            assert isinstance(run.exception(30), httpx.HTTPError), "the connection breaks"
        engine.wait(10)


def kill_after(server: Server, completed: int) -> None:
    """Kill the engine after a number of answered requests."""
    pid = server.engine_pid()
    server.wait_for(lambda: server.stats()["requests"]["completed"] >= completed)
    os.kill(pid, signal.SIGKILL)


def test_the_benchmark_counts_what_a_killed_engine_cost(tmp_path: Path, capsys) -> None:
    file = tmp_path / "result.json"
    flags = ["--num-prompts", "96", "--input-len", "8", "--output-len", "100", "--output-json", str(file)]
    with serving(*SLOW) as server, ThreadPoolExecutor(1) as pool:
        killer = pool.submit(kill_after, server, 24)
        code = main(["bench", "serve", "--base-url", server.url, *flags])
        killer.result()
        server.wait()
    found = json.loads(file.read_text())
    assert code == 0 and found["completed"] + found["failed"] == 96
    assert found["completed"] >= 24 and found["failed"] >= 1
    assert "requests failed, the first with" in capsys.readouterr().err
