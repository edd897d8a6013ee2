"""Latency targets over HTTP: what would be late is refused with the time to wait, and the rest is answered."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from serving import Server, chat, serving

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Start a server of two slots, whose steps take 10 ms."""
    flags = ("--dry-run-step-ms", "10", "--max-num-seqs", "2", "--target-ttft", "400", "--shed", "--receipts")
    with serving("demo", "--dry-run", *flags) as found:
        yield found


def send(server: Server, count: int, **fields: Any) -> list[httpx.Response]:
    body = chat("Hi", max_tokens=30, ignore_eos=True, **fields)
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda _: server.post(CHAT, body), range(count)))


def test_late_requests_are_refused_and_the_others_keep_their_target(server: Server) -> None:
    for _ in range(6):  # the server learns how fast steps are and how fast requests end
        send(server, 2)
    answers = send(server, 24)
    refused = [one for one in answers if one.status_code == 503]
    served = [one.json()["receipt"] for one in answers if one.status_code == 200]
    assert len(refused) + len(served) == 24 and len(refused) >= 5 and len(served) >= 2
    for one in refused:
        assert (
            "the target is 0.4 s" in one.json()["error"]["message"] and int(one.headers["retry-after"]) >= 1
        )
    assert all(receipt["predicted_ttft_ms"] <= 400 for receipt in served)
    late = [receipt for receipt in served if receipt["ttft_ms"] > 2 * 400]
    assert len(late) <= len(served) // 4, "the prediction is honest"
    assert server.stats()["requests"]["rejected"] == len(refused)
    line = next(
        line for line in server.http.get("/metrics").text.splitlines() if 'reason="target_ttft"' in line
    )
    assert float(line.split()[-1]) == len(refused)


def test_a_request_has_its_own_target(server: Server) -> None:
    answers = send(server, 12, target_ttft=1e6)
    assert {one.status_code for one in answers} == {200}
    for name, value in (("target_itl", 0), ("target_ttft", -5)):
        answer = server.post(CHAT, chat("Hi", **{name: value}))
        assert answer.status_code == 400 and answer.json()["error"]["param"] == name
        assert f"{name} must be above 0" in answer.json()["error"]["message"]


def test_a_cached_prompt_is_admitted_where_a_new_one_would_be_late() -> None:
    # 3,200 prompt tokens per second: each of the prompts takes about 0.4 s.
    flags = ("--dry-run-step-ms", "10", "--max-num-batched-tokens", "32", "--target-ttft", "600", "--shed")
    with serving("demo", "--dry-run", *flags) as server:

        def ask(first: int) -> httpx.Response:
            prompt = [first, *range(3, 1303)]
            return server.post("/v1/completions", {"prompt": prompt, "max_tokens": 2, "ignore_eos": True})

        assert [ask(first).status_code for first in (1, 4, 5)] == [200] * 3
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            other = pool.submit(ask, 2)
            time.sleep(0.1)  # the other prompt is being computed
            known, new = pool.submit(ask, 1), ask(9)
            assert other.result().status_code == known.result().status_code == 200
        assert new.status_code == 503 and "the target is 0.6 s" in new.json()["error"]["message"]
        time.sleep(float(new.headers["retry-after"]))
        assert ask(9).status_code == 200, "the time to wait is honest"


def test_a_server_with_a_fixed_size_of_chunks_says_that_targets_have_no_effect(dry: Server) -> None:
    assert "warnings" not in dry.post(CHAT, chat("Hi", max_tokens=2, target_itl=5)).json(), (
        "it learns step times"
    )
    with serving("demo", "--dry-run", "--mixed-prefill-tokens", "256") as fixed:
        answer = fixed.post(CHAT, chat("Hi", max_tokens=2, target_itl=5)).json()
    assert any("target_itl has no effect" in text for text in answer["warnings"])
