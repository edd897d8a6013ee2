"""Several API keys on one server: no client sees, delays or displaces the requests of another."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import Server, serving

TEXT, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
SLOTS = 4
LONG = {"prompt": "a b c d", "max_tokens": 1500, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("secret-a name=alpha\nsecret-b name=beta\nsecret-o name=ops admin\n")
    flags = ["--max-num-seqs", str(SLOTS), "--api-key-file", str(keys), "--max-stored-responses", "3"]
    with serving("demo", "--dry-run", "--dry-run-step-ms", "10", "--check-invariants", *flags) as found:
        yield found


def client(server: Server, key: str) -> httpx.Client:
    limits = httpx.Limits(max_connections=None)
    headers = {"Authorization": f"Bearer secret-{key}"}
    return httpx.Client(base_url=server.url, headers=headers, timeout=60, limits=limits)


@pytest.fixture
def alpha(server: Server) -> Iterator[httpx.Client]:
    with client(server, "a") as found:
        yield found


@pytest.fixture
def beta(server: Server) -> Iterator[httpx.Client]:
    with client(server, "b") as found:
        yield found


@pytest.fixture
def ops(server: Server) -> Iterator[httpx.Client]:
    with client(server, "o") as found:
        yield found


@contextlib.contextmanager
def streams(http: httpx.Client, count: int) -> Iterator[list[Iterator[str]]]:
    """Hold `count` long streams that have started."""
    with contextlib.ExitStack() as stack:
        found = []
        for _ in range(count):
            response = stack.enter_context(http.stream("POST", TEXT, json=LONG))
            lines = response.iter_lines()
            next(lines)
            found.append(lines)
        yield found


def state(http: httpx.Client) -> tuple[dict[str, Any], str]:
    """Return the first state of the live view, and the text that was read for it."""
    with http.stream("GET", "/live/events") as response:
        text = ""
        for line in response.iter_lines():
            text += line + "\n"
            if line.startswith("data: {"):
                return json.loads(line.removeprefix("data: ")), text
    raise AssertionError("no state came")


def test_a_key_that_holds_all_slots_gives_one_to_another(
    server: Server, alpha: httpx.Client, beta: httpx.Client, ops: httpx.Client
) -> None:
    def leave(number: int) -> None:
        with contextlib.suppress(httpx.HTTPError):
            alpha.post(TEXT, json={**LONG, "stream": False, "prompt": [number + 5]}, timeout=6)

    with streams(alpha, SLOTS) as held, ThreadPoolExecutor(30) as pool:
        waiting = [pool.submit(leave, number) for number in range(30)]
        server.wait_for(lambda: ops.get("/stats").json()["requests"]["waiting"] >= 30)
        for _ in range(3):
            answer = beta.post(TEXT, json={"prompt": "x y", "max_tokens": 5, "ignore_eos": True})
            assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 5
        server.wait_for(lambda: ops.get("/stats").json()["requests"]["active"] == SLOTS)
        found = ops.get("/stats").json()
        assert not any(run.done() for run in waiting)
        assert found["blocks"]["preemptions_for_other_keys"] >= 1
        for lines in held:  # none of them was ended
            for _ in range(20):
                next(lines)
    server.wait_for(lambda: ops.get("/stats").json()["requests"]["open"] == 0)


def test_cached_tokens_tell_nothing_of_other_keys(alpha: httpx.Client, beta: httpx.Client) -> None:
    def cached(http: httpx.Client, **fields: Any) -> int:
        body = {"prompt": list(range(100, 180)), "max_tokens": 1, "receipt": True, **fields}
        found = http.post(TEXT, json=body).json()
        assert (
            found["receipt"]["prompt_tokens"]["cached"]
            == found["usage"]["prompt_tokens_details"]["cached_tokens"]
        )
        return found["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached(alpha) == 0 and cached(alpha) >= 64
    assert cached(beta) == 0
    for salt in ("alpha", "alpha\n", "\nalpha\n"):
        assert cached(beta, cache_salt=salt) == 0
    assert cached(beta) >= 64
    assert cached(alpha, cache_salt="mine") == 0 and cached(alpha, cache_salt="mine") >= 64


def test_figures_and_live_view_show_a_key_its_own(
    server: Server, alpha: httpx.Client, beta: httpx.Client, ops: httpx.Client
) -> None:
    with streams(alpha, 3), streams(beta, 1):
        for http, name, own in ((alpha, "alpha", 3), (beta, "beta", 1)):
            found = http.get("/stats").json()
            assert found["requests"]["active"] == found["requests"]["open"] == own
            assert found["requests"]["others"] == {"waiting": 0, "active": 4 - own}
            assert set(found["tokens"]["by_client"]) == {name}
            seen, text = state(http)
            assert len(seen["running"]) == own and {r["client"] for r in seen["running"]} == {name}
            assert set(seen["stats"]["served_tokens"]) == {name}
            other = ({"alpha", "beta"} - {name}).pop()
            assert other not in text and other not in json.dumps(found)
        everything = ops.get("/stats").json()
        assert everything["requests"]["active"] == 4 and "others" not in everything["requests"]
        assert {"alpha", "beta"} <= set(everything["tokens"]["by_client"])
        assert {r["client"] for r in state(ops)[0]["running"]} == {"alpha", "beta"}
    server.wait_for(lambda: ops.get("/stats").json()["requests"]["open"] == 0)

    def labels(http: httpx.Client) -> set[str]:
        families = text_string_to_metric_families(http.get("/metrics").text)
        return {s.labels["client"] for f in families for s in f.samples if "client" in s.labels}

    assert labels(alpha) == {"alpha"} and labels(beta) == {"beta"} and labels(ops) >= {"alpha", "beta"}


def test_ids_that_a_caller_chooses_are_its_own(alpha: httpx.Client, beta: httpx.Client) -> None:
    same = {"X-Request-Id": "mine"}
    body = {"max_tokens": 40, "ignore_eos": True, "request_id": "mine", "prompt": "once upon"}
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(http.post, TEXT, json=body, headers=same) for http in (alpha, beta)]
    assert [run.result().status_code for run in runs] == [200, 200]
    assert runs[0].result().json()["choices"] == runs[1].result().json()["choices"]


def test_stored_responses_are_a_keys_own(alpha: httpx.Client, beta: httpx.Client) -> None:
    def ask(http: httpx.Client, **fields: Any) -> httpx.Response:
        return http.post(RESPONSES, json={"model": "demo", "input": "Hi", "max_output_tokens": 2, **fields})

    kept = ask(beta).json()["id"]
    ids = [ask(alpha).json()["id"] for _ in range(5)]
    statuses = [alpha.get(f"{RESPONSES}/{name}").status_code for name in ids]
    assert statuses == [404, 404, 200, 200, 200]
    assert beta.get(f"{RESPONSES}/{kept}").status_code == 200, "another key's responses displaced it"
    for http, name in ((beta, ids[-1]), (alpha, kept)):
        assert http.get(f"{RESPONSES}/{name}").status_code == 404
        assert http.delete(f"{RESPONSES}/{name}").status_code == 404
        assert http.post(f"{RESPONSES}/{name}/cancel").status_code == 404
        assert ask(http, previous_response_id=name).status_code == 400
    assert ask(beta, previous_response_id=kept).status_code == 200
    assert beta.delete(f"{RESPONSES}/{kept}").status_code == 200
