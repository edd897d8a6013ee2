"""Several replicas behind one server: killed under load, counted together, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import Server, serving
from test_kill import SLOW, TEXT, stream

from quire import LLM, SamplingParams
from quire.types import EngineDead

REPLICAS = 3
STREAMS = 100  # more than all slots


pytestmark = pytest.mark.usefixtures("no_process_is_left")


def engines(server: Server) -> list[psutil.Process]:
    found = (
        p for p in psutil.Process(server.process.pid).children() if "quire.engine_process" in p.cmdline()
    )
    return sorted(found, key=lambda process: process.pid)


def samples(server: Server, name: str) -> dict[str, float]:
    """Return the values of a metric by the label `engine`."""
    families = text_string_to_metric_families(server.http.get("/metrics").text)
    return {s.labels["engine"]: s.value for family in families for s in family.samples if s.name == name}


def test_a_replica_killed_under_load_is_replaced_and_the_others_go_on() -> None:
    with serving(*SLOW, "-dp", str(REPLICAS)) as server, ThreadPoolExecutor(STREAMS) as pool:
        runs = [pool.submit(stream, server, i, 400) for i in range(STREAMS)]

        def busy() -> bool:
            counts = server.stats()
            return counts["requests"]["open"] >= STREAMS and counts["tokens"]["generated"] >= 200

        server.wait_for(busy)
        counts = server.stats()
        assert [one["active"] for one in counts["replicas"]] == [24] * REPLICAS
        assert counts["requests"]["active"] == 24 * REPLICAS
        assert counts["routing"]["held"] == STREAMS - REPLICAS * 27, "each has its slots and an eighth more"
        assert all(samples(server, "vllm:num_requests_running")[str(n)] == 24 for n in range(REPLICAS))
        before = engines(server)
        os.kill(before[1].pid, signal.SIGKILL)
        failed = 0
        for run in runs:
            events = run.result(60)
            assert events[-1] == "[DONE]"
            last = json.loads(events[-2])
            if "error" in last:
                failed += 1
                assert (
                    last["error"]["code"] == "replica_failed" and "exit code -9" in last["error"]["message"]
                )
            else:
                assert last["choices"][0]["finish_reason"] == "length"
        assert 0 < failed <= 24, "those whose answer had begun"
        server.wait_for(
            lambda: [one["status"] for one in server.stats()["replicas"]] == ["serving"] * REPLICAS
        )
        counts = server.wait_until_idle()
        assert sorted(one["restarts"] for one in counts["replicas"]) == [0, 0, 1]
        assert counts["requests"]["open"] == 0 and counts["blocks"]["used"] == 0
        # Totals include those of the process that was killed, as of its last message.
        assert counts["tokens"]["generated"] == sum(one["generated"] for one in counts["replicas"])
        assert counts["tokens"]["generated"] >= (STREAMS - failed) * 150
        assert sum(samples(server, "vllm:generation_tokens_total").values()) == counts["tokens"]["generated"]
        assert sum(samples(server, "quire:replica_restarts_total").values()) == 1
        assert sum(samples(server, "quire:replica_up").values()) == REPLICAS
        answer = server.http.get("/health")
        assert answer.status_code == 200
        assert [one["status"] for one in answer.json()["replicas"]] == ["serving"] * REPLICAS
        everyone = [*before, *engines(server)]
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        assert not psutil.wait_procs(everyone, timeout=5)[1], "a process was left"


def test_prompts_of_conversations_return_to_their_replica_and_the_live_view_shows_all() -> None:
    flags = ["demo", "--dry-run", "--check-invariants", "-dp", "2"]
    with serving(*flags) as server:
        turns: dict[int, list[int]] = {n: [300 + n] * 64 for n in range(6)}
        cached = 0
        for _ in range(3):
            for prompt in turns.values():
                body: dict[str, Any] = {
                    "prompt": prompt,
                    "max_tokens": 8,
                    "ignore_eos": True,
                    "return_token_ids": True,
                }
                answer = server.post(TEXT, body).json()
                cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                prompt += answer["choices"][0]["token_ids"] + [7] * 8
        assert cached >= 2 * 6 * 48
        counts = server.stats()
        assert all(one["requests"] >= 6 for one in counts["replicas"])
        with server.http.stream("GET", "/live/events") as response:
            kinds, steps = [], []
            for line in response.iter_lines():
                if line.startswith("event:"):
                    kinds.append(line)
                elif line.startswith("data:") and kinds[-1] == "event: steps":
                    steps = json.loads(line[5:])
                elif line.startswith("data:"):
                    state = json.loads(line[5:])
                    break
        assert [one["step"] for one in steps] == list(range(len(steps)))
        assert len(steps) >= 18 and state["stats"]["totals"]["requests"] == 18


def test_a_server_ends_in_order_while_a_replica_is_about_to_be_replaced() -> None:
    with serving("demo", "--dry-run", "-dp", "2") as server:
        first, second = engines(server)
        first.kill()
        server.wait_for(lambda: "failed" in [one["status"] for one in server.stats()["replicas"]])
        assert server.post(TEXT, {"prompt": "a b", "max_tokens": 2}).status_code == 200
        server.signal(signal.SIGTERM)
        assert server.wait() == 0 and "Traceback" not in server.output
        assert not psutil.wait_procs([first, second], timeout=5)[1]


@pytest.fixture(scope="module")
def settings() -> dict[str, Any]:
    return {
        "device": "cpu",
        "dtype": "float32",
        "kv_cache_memory": 1 << 24,
        "max_model_len": 128,
        "cpu_threads": 1,
    }


def test_replicas_of_llm_answer_as_one(settings: dict[str, Any]) -> None:
    prompts = [f"Once upon a time {n}" for n in range(5)]
    params = SamplingParams(max_tokens=6, n=2, temperature=1.0, seed=3)
    with LLM("demo", **settings) as llm:
        expected = [[c.token_ids for c in o.outputs] for o in llm.generate(prompts, params, use_tqdm=False)]
    with LLM("demo", **settings, data_parallel_size=2) as llm:
        found = llm.generate(prompts, params, use_tqdm=False)
        assert [[c.token_ids for c in output.outputs] for output in found] == expected
        stream_of = llm.stream("The sea", SamplingParams(max_tokens=50, ignore_eos=True))
        next(stream_of)
        stream_of.close()  # aborts it
        mine = [p for p in psutil.Process().children() if "quire.engine_process" in p.cmdline()]
        mine[1].kill()
        with pytest.raises(EngineDead, match="exit code -9"):
            llm.generate(prompts, params, use_tqdm=False)
    assert not psutil.wait_procs(mine, timeout=5)[1]
