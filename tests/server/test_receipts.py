"""Latency receipts: the terms add up to the latency, under load and preemption, and name the right cause."""

from __future__ import annotations

import concurrent.futures
import json
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
from serving import Server, chat, events, serving

STEP_MS = 4
TERMS = [
    "read", "prepare", "submit", "queue", "transfer", "prefill", "lost_to_prefills", "preempted", "recompute", "decode",
    "deliver",
]  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Start a server with few blocks, so that requests wait for blocks and preempt each other."""
    flags = (
        "--dry-run-step-ms",
        str(STEP_MS),
        "--kv-cache-memory",
        str(48 * 16 * 1024),
        "--max-num-seqs",
        "6",
    )
    with serving("demo", "--dry-run", "--check-invariants", *flags) as found:
        yield found


def check(receipt: dict[str, Any], took_ms: float) -> None:
    terms = receipt["terms_ms"]
    assert list(terms) == TERMS
    assert abs(sum(terms.values()) - receipt["e2e_ms"]) < 1, receipt
    assert abs(sum(receipt["queue_ms"].values()) - terms["queue"]) < 0.1, receipt
    assert all(value >= -0.01 for value in [*terms.values(), *receipt["queue_ms"].values()]), receipt
    assert 0 < receipt["ttft_ms"] <= receipt["e2e_ms"] <= took_ms, receipt
    prompt = receipt["prompt_tokens"]
    assert prompt["cached"] + prompt["computed"] == prompt["total"]
    assert prompt["cache_ended"] in ("end", "new", "evicted")
    assert receipt["preemptions"] or not receipt["recomputed_tokens"]


def ask(server: Server, path: str, **body: Any) -> dict[str, Any]:
    """Send a request and return its receipt after checking the sums."""
    began = time.perf_counter()
    found = server.post(path, {**body, "receipt": True})
    took_ms = (time.perf_counter() - began) * 1000
    assert found.status_code == 200, found.text
    if body.get("stream"):
        *chunks, last, done = events(found)
        assert done == "[DONE]" and not any("receipt" in chunk for chunk in chunks)
        answer = last
    else:
        answer = found.json()
    check(answer["receipt"], took_ms)
    return answer["receipt"]


def test_terms_under_mixed_load_with_preemption(server: Server) -> None:
    rng = random.Random(1)

    def one(i: int) -> dict[str, Any]:
        text = "word " * rng.randrange(1, 200) + str(i)
        fields: dict[str, Any] = {
            "max_tokens": rng.randrange(1, 200),
            "ignore_eos": True,
            "stream": i % 3 > 0,
        }
        if i % 3 == 2:
            fields["stream_options"] = {"include_usage": True}
        if i % 5 == 0:
            fields["stop"] = ["word word word word word word"]
            fields["ignore_eos"] = False
        if i % 2:
            return ask(server, "/v1/chat/completions", **chat(text, **fields))
        return ask(server, "/v1/completions", prompt=text, n=1 + i % 3, **fields)

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        receipts = list(pool.map(one, range(80)))
    server.wait_until_idle()
    assert any(receipt["preemptions"] for receipt in receipts)
    assert any(receipt["terms_ms"]["recompute"] > 0 for receipt in receipts)
    assert any(receipt["terms_ms"]["lost_to_prefills"] > 0 for receipt in receipts)
    causes = {cause for receipt in receipts for cause, ms in receipt["queue_ms"].items() if ms > STEP_MS}
    assert {"slots", "blocks"} <= causes, causes


def test_alone(server: Server) -> None:
    body = {"prompt": [7] * 40, "max_tokens": 50, "ignore_eos": True}
    found = ask(server, "/v1/completions", **{**body, "max_tokens": 300})
    terms = found["terms_ms"]
    assert found["output_tokens"] == 300 and found["choice"] == 0
    assert terms["decode"] >= 299 * STEP_MS * 0.9
    assert terms["decode"] > 0.5 * found["e2e_ms"]
    assert terms["lost_to_prefills"] == terms["preempted"] == terms["recompute"] == 0
    again = ask(server, "/v1/completions", **body)["prompt_tokens"]
    assert again == {"total": 40, "cached": 32, "computed": 8, "cache_ended": "end", "fetched": {}}
    other = ask(server, "/v1/completions", **{**body, "prompt": [7] * 17 + [8] * 23})["prompt_tokens"]
    assert other == {"total": 40, "cached": 16, "computed": 24, "cache_ended": "new", "fetched": {}}


def test_a_stop_string_ends_the_bookkeeping_too(server: Server) -> None:
    text = "one two three four five six seven eight nine ten"
    found = ask(server, "/generate", prompt=text, max_tokens=100, stop=["six"], ignore_eos=True)
    tokens = found["output_tokens"]
    assert 3 < tokens < 50 and found["terms_ms"]["decode"] >= (tokens - 2) * STEP_MS * 0.9


def test_waiting_for_a_slot(server: Server) -> None:
    body = {"prompt": "Hi", "max_tokens": 60, "ignore_eos": True}
    found = ask(server, "/v1/completions", n=7, **body)  # one more than the slots
    assert found["choice"] == 6 and found["queue_ms"]["slots"] > 50 * STEP_MS


def test_only_when_it_is_asked_for(server: Server) -> None:
    assert "receipt" not in server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 2}).json()
    assert "receipt" not in server.post("/generate", {"prompt": "Hi", "max_tokens": 2}).json()
    with serving("demo", "--dry-run", "--receipts") as always:
        body = {"prompt": "Hi", "max_tokens": 2}
        assert "receipt" in always.post("/v1/completions", body).json()
        assert "receipt" in always.post("/v1/chat/completions", chat("Hi")).json()
        assert "receipt" not in always.post("/v1/completions", {**body, "receipt": False}).json()


def test_of_the_demo_model(demo: Server) -> None:
    fields = chat("What is 27 + 45?", temperature=0, stream=True)
    found = ask(demo, "/v1/chat/completions", **fields)
    assert found["terms_ms"]["prefill"] > 0 and found["terms_ms"]["decode"] > 0
    schema = {"type": "object", "properties": {"a" * 30: {"type": "integer"}}, "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    found = ask(demo, "/v1/chat/completions", **fields, response_format=form, max_tokens=8)
    assert found["queue_ms"]["grammar"] > 0 and found["terms_ms"]["prefill"] > 0


def test_of_the_demo_model_with_too_few_blocks() -> None:
    """Combine chunked prefill, overlapped steps, preemption and aborts."""
    flags = ("--kv-cache-memory", str(24 * 114688), "--max-num-batched-tokens", "64", "--check-invariants")
    rng = random.Random(2)
    with serving("demo", "--dtype", "float32", *flags) as server:

        def one(i: int) -> dict[str, Any]:
            fields: dict[str, Any] = {"max_tokens": rng.randrange(20, 60), "ignore_eos": True, "seed": i}
            return ask(server, "/v1/completions", prompt=[7 + i % 3] * rng.randrange(1, 120), **fields)

        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            receipts = list(pool.map(one, range(36)))
        assert any(receipt["terms_ms"]["recompute"] > 0 for receipt in receipts)
        assert server.wait_until_idle()["blocks"]["used"] == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_the_other_apis_of_conversations(server: Server, path: str, stream: bool) -> None:
    said = (
        {"input": "Hello"}
        if path.endswith("responses")
        else {"messages": [{"role": "user", "content": "Hi"}]}
    )
    limit = "max_output_tokens" if path.endswith("responses") else "max_tokens"
    began = time.perf_counter()
    found = server.post(path, {"model": "demo", limit: 9, "stream": stream, "receipt": True, **said})
    took_ms = (time.perf_counter() - began) * 1000
    assert found.status_code == 200, found.text
    if stream:
        lines = [
            line for line in found.text.splitlines() if '"receipt"' in line and line.startswith("data: ")
        ]
        (line,) = lines
        event = json.loads(line.removeprefix("data: "))
        receipt = event.get("response", event)["receipt"]
    else:
        receipt = found.json()["receipt"]
    check(receipt, took_ms)
    assert receipt["output_tokens"] == 9
