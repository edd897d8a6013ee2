"""A server whose prompts are computed by another process, before and after that process is killed."""

from __future__ import annotations

import os
import signal

import psutil
import pytest
from serving import Server, serving

PATH = "/v1/completions"
PROMPT = [7 + i % 90 for i in range(300)]

pytestmark = pytest.mark.usefixtures("no_process_is_left")


def ask(server: Server, prompt: list[int]) -> dict:
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "receipt": True}
    answer = server.post(PATH, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def health(server: Server) -> dict:
    import httpx

    answer = httpx.get(server.url + "/health", timeout=10)
    assert answer.status_code == 200
    return answer.json()


def test_health_names_a_killed_prefill_process_and_requests_go_on() -> None:
    flags = ("--disaggregate", "prefill:1,decode:1", "--cpu-threads", "1", "--kv-cache-memory", "32m")
    with serving("demo", *flags, "--max-model-len", "512") as server:
        first = ask(server, PROMPT)
        receipt = first["receipt"]
        assert receipt["terms_ms"]["prefill"] > 0 and receipt["prompt_tokens"]["fetched"]["prefill"] == 288
        assert "degraded" not in health(server)
        (prefill,) = psutil.Process(server.engine_pid()).children()
        os.kill(prefill.pid, signal.SIGKILL)
        server.wait_for(lambda: "degraded" in health(server))
        (note,) = health(server)["degraded"]
        assert f"process {prefill.pid}" in note and "SIGKILL" in note
        again = ask(server, [*PROMPT[::-1], 5])
        assert again["usage"]["completion_tokens"] == 4
