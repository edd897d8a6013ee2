"""The Ray Serve application: answers, streams, affinity of conversations, scaling up and down."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

PORT = 18437
BODY = {"prompt": "a b c d", "max_tokens": 4}


@pytest.fixture(scope="module")
def url(cluster: Any) -> Iterator[str]:
    import ray
    from ray import serve

    from quire.ray import build_app

    ray.init(address=cluster.address, ignore_reinit_error=True, log_to_driver=False)
    fast = {
        "upscale_delay_s": 0.5,
        "downscale_delay_s": 1.0,
        "look_back_period_s": 1.0,
        "metrics_interval_s": 0.5,
    }
    serve.start(http_options={"port": PORT})
    app = build_app(
        "demo",
        max_replicas=2,
        target_ongoing_requests=4,
        flags=["--dry-run", "--dry-run-step-ms", "20"],
        autoscaling=fast,
    )
    serve.run(app)
    yield f"http://127.0.0.1:{PORT}"
    serve.shutdown()


def replicas() -> int:
    from ray import serve

    deployment = serve.status().applications["default"].deployments["QuireReplica"]
    return deployment.replica_states.get("RUNNING", 0)


def test_answers_and_streams(url: str) -> None:
    answer = httpx.post(f"{url}/v1/completions", json=BODY)
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"].strip() == "a b c d"
    assert httpx.post(f"{url}/v1/completions", json={"max_tokens": -1}).status_code == 400
    assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "demo"
    with httpx.stream("POST", f"{url}/v1/completions", json={**BODY, "stream": True}) as stream:
        lines = [line for line in stream.iter_lines() if line]
    assert lines[-1] == "data: [DONE]" and len(lines) >= 3


def test_replicas_follow_the_load_and_conversations_stay(url: str) -> None:
    assert replicas() == 1
    body = {**BODY, "max_tokens": 100, "ignore_eos": True}
    enough = threading.Event()

    def load(number: int) -> None:
        while not enough.is_set():
            assert httpx.post(f"{url}/v1/completions", json=body, timeout=120).status_code == 200

    def talk(number: int) -> int:
        hits, prompt = 0, f"the sea is calm today, {number} " * 70
        for _ in range(3):
            answer = httpx.post(f"{url}/v1/completions", json={**body, "prompt": prompt}, timeout=120).json()
            hits += answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 200
            prompt += " and so on" * 4
        return hits

    with ThreadPoolExecutor(24) as pool:
        try:
            loads = [pool.submit(load, number) for number in range(12)]
            wait_for(lambda: replicas() == 2)
            talks = [pool.submit(talk, number) for number in range(12)]
            # By chance two of three turns would find the one before; load may justify a detour.
            assert sum(one.result() for one in talks) >= 21
        finally:
            enough.set()
        for one in loads:
            one.result()
    wait_for(lambda: replicas() == 1)
    assert httpx.post(f"{url}/v1/completions", json=BODY).status_code == 200


def wait_for(condition: Any, seconds: float = 120) -> None:
    end_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end_s, f"not within {seconds} s"
        time.sleep(0.3)
