"""GET /metrics and /stats: the names, types, labels and buckets that vLLM's dashboards expect, and correct values."""

from __future__ import annotations

import concurrent.futures
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families
from serving import Server, chat, events, serving

from dashboard import expressions

GAUGES = {
    "num_requests_running": set(), "num_requests_waiting": set(), "kv_cache_usage_perc": set(),
    "gpu_cache_usage_perc": set(), "num_requests_waiting_by_reason": {"reason"}, "engine_sleep_state": {"sleep_state"},
    "cache_config_info": {"block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching", "eviction"},
}  # fmt: skip
COUNTERS = {
    "prefix_cache_queries": set(), "prefix_cache_hits": set(), "num_preemptions": set(), "prompt_tokens": set(),
    "generation_tokens": set(), "prompt_tokens_cached": set(), "prompt_tokens_by_source": {"source"},
    "prompt_tokens_cached_by_source": {"source"}, "request_success": {"finished_reason"},
    "admission_rejections": {"reason"},
}  # fmt: skip
TTFT = "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
TOKEN = "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80"
REQUEST = "0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"
HISTOGRAMS = {
    "time_to_first_token_seconds": TTFT,
    "inter_token_latency_seconds": TOKEN,
    "time_per_output_token_seconds": TOKEN,
    "request_time_per_output_token_seconds": TOKEN,
    **{
        f"{name}_seconds": REQUEST
        for name in (
            "e2e_request_latency", "request_queue_time", "request_inference_time", "request_prefill_time",
            "request_decode_time",
        )
    },
    **dict.fromkeys(
        (
            "request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens",
            "request_params_max_tokens", "request_prefill_kv_computed_tokens",
        ),
        "1 2 5 10 20 50 100 200 500 1000 2000",
    ),
    "iteration_tokens_total": "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384",
    "request_params_n": "1 2 5 10 20",
    "request_num_preemptions": "1 2 3 4 5 10 20",
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Start a server with few blocks, so that requests wait for blocks and preempt each other."""
    flags = ("--dry-run-step-ms", "6", "--kv-cache-memory", str(48 * 16 * 1024), "--max-num-seqs", "6")
    with serving("demo", "--dry-run", "--check-invariants", *flags) as found:
        yield found


def scrape(server: Server) -> dict[str, Any]:
    found = server.http.get("/metrics")
    assert found.status_code == 200 and found.headers["content-type"].startswith("text/plain; version=")
    return {family.name: family for family in text_string_to_metric_families(found.text)}


def value(families: dict[str, Any], sample: str, **labels: str) -> float:
    (found,) = [
        one.value
        for family in families.values()
        for one in family.samples
        if one.name == sample and labels.items() <= one.labels.items()
    ]
    return found


def test_names_types_labels_and_buckets(server: Server) -> None:
    families = scrape(server)
    base = {"model_name", "engine"}
    for kind, names in (("gauge", GAUGES), ("counter", COUNTERS)):
        for name, labels in names.items():
            family = families[f"vllm:{name}"]
            assert family.type == kind and family.samples, name
            for sample in family.samples:
                assert sample.labels.keys() == base | labels, sample
                assert sample.name == f"vllm:{name}" + ("_total" if kind == "counter" else "")
                assert sample.labels["model_name"] == "demo" and sample.labels["engine"] == "0"
    for name, bounds in HISTOGRAMS.items():
        family = families[f"vllm:{name}"]
        assert family.type == "histogram"
        ends = [s.labels["le"] for s in family.samples if s.name.endswith("_bucket")]
        assert [float(end) for end in ends[:-1]] == [float(one) for one in bounds.split()], name
        assert ends[-1] == "+Inf"
        assert {s.name.removeprefix(f"vllm:{name}") for s in family.samples} == {"_bucket", "_sum", "_count"}
    assert all(family.documentation for family in families.values())
    assert "process_resident_memory_bytes" in families


def test_openmetrics(server: Server) -> None:
    found = server.http.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert found.headers["content-type"].startswith("application/openmetrics-text")
    assert list(parse_openmetrics(found.text))


ACCEPTS = {
    "Prometheus 2.42": "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    "Prometheus 2.28": "application/openmetrics-text; version=0.0.1,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    "Prometheus 3": "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
    "Prometheus 3, underscores": "application/openmetrics-text;version=1.0.0;escaping=underscores;q=0.6,*/*;q=0.2",
    "text": "text/plain;version=1.0.0;escaping=underscores",
    "browser": "text/html,*/*",
    "no version": "application/openmetrics-text;version=abc",
    "odd": ";;=,,application/openmetrics-text;;version;version==;q=,\xff",
    "nothing": "",
}


@pytest.mark.parametrize("name", ACCEPTS)
def test_names_are_the_same_whatever_is_accepted(server: Server, name: str) -> None:
    found = server.http.get("/metrics", headers={"accept": ACCEPTS[name].encode("latin-1")})
    assert found.status_code == 200
    openmetrics = "openmetrics" in found.headers["content-type"]
    assert openmetrics == ("openmetrics-text" in ACCEPTS[name])
    read = parse_openmetrics if openmetrics else text_string_to_metric_families
    names = {sample.name for family in read(found.text) for sample in family.samples}
    plain = {sample.name for family in scrape(server).values() for sample in family.samples}
    assert names == plain and "vllm:num_requests_running" in names


def test_settings_are_those_in_effect(server: Server) -> None:
    (sample,) = scrape(server)["vllm:cache_config_info"].samples
    assert sample.labels["enable_prefix_caching"] == "True" and sample.labels["eviction"] == "lru"
    for family in scrape(server).values():
        for one in family.samples:
            assert "None" not in one.labels.values(), one


def ask(server: Server, text: str, tokens: int) -> None:
    body = chat(text, max_tokens=tokens, ignore_eos=True, stream=True)
    assert events(server.post("/v1/chat/completions", body))[-1] == "[DONE]"


def test_counts_add_up(server: Server) -> None:
    before = scrape(server)
    texts = ["word " * (20 * i) + str(i) for i in range(8)] + ["word " * 140]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda text: ask(server, text, 120), texts))
        list(
            pool.map(lambda _: server.post("/generate", {"prompt": "Hi", "n": 1, "max_tokens": 1}), range(2))
        )
    stats = server.wait_until_idle()
    after = scrape(server)

    def grown(sample: str, **labels: str) -> float:
        return value(after, sample, **labels) - value(before, sample, **labels)

    tokens = 9 * 120 + 2
    assert grown("vllm:generation_tokens_total") == tokens
    assert grown("vllm:request_success_total", finished_reason="length") == 11
    assert grown("vllm:request_success_total", finished_reason="abort") == 0
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
                 "request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens",
                 "request_params_n", "request_params_max_tokens", "request_num_preemptions"):  # fmt: skip
        assert grown(f"vllm:{name}_count") == 11, name
    assert grown("vllm:inter_token_latency_seconds_count") == tokens - 11
    assert grown("vllm:request_time_per_output_token_seconds_count") == 9
    assert grown("vllm:request_generation_tokens_sum") == tokens
    prompts = grown("vllm:request_prompt_tokens_sum")
    assert grown("vllm:prompt_tokens_total") == prompts
    computed = grown("vllm:prompt_tokens_by_source_total", source="local_compute")
    cached = grown("vllm:prompt_tokens_by_source_total", source="local_cache_hit")
    assert computed + cached == prompts and cached == grown("vllm:prompt_tokens_cached_total") > 0
    assert grown("vllm:request_prefill_kv_computed_tokens_sum") == computed
    assert grown("vllm:prefix_cache_hits_total") >= cached
    assert value(after, "vllm:num_preemptions_total") == stats["blocks"]["preemptions"] > 0
    assert value(after, "quire:pressure_events_total") >= stats["blocks"]["preemptions"]
    assert value(after, "quire:block_evictions_total") == stats["blocks"]["evictions"]
    assert value(after, "quire:queue_seconds_total", cause="blocks") > 0
    assert value(after, "quire:recompute_seconds_total") > 0 < value(after, "quire:preempted_seconds_total")
    assert value(after, "quire:lost_to_prefills_seconds_total") > 0
    in_engine = sum(grown(f"vllm:request_{part}_time_seconds_sum") for part in ("queue", "inference"))
    assert 0 < in_engine <= grown("vllm:e2e_request_latency_seconds_sum")
    # every step is reported, and each token ran in one of them
    assert value(after, "vllm:iteration_tokens_total_count") == stats["last_step"]["step"] + 1
    assert value(after, "vllm:iteration_tokens_total_sum") == stats["tokens"]["computed"]
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert value(after, f"vllm:{name}") == 0


def test_gauges_follow_the_load(server: Server) -> None:
    with concurrent.futures.ThreadPoolExecutor(10) as pool:
        asked = [pool.submit(ask, server, f"{i} and so on", 600) for i in range(10)]
        families: dict[str, Any] = {}

        def waiting() -> float:
            families.update(scrape(server))
            return value(families, "vllm:num_requests_waiting")

        server.wait_for(waiting)
        assert value(families, "vllm:num_requests_running") > 0
        assert 0 < value(families, "vllm:kv_cache_usage_perc") <= 1
        for one in asked:
            one.result()


def test_aborted_and_turned_away(server: Server) -> None:
    before = scrape(server)
    found = server.post(
        "/v1/completions", {"prompt": "Hi", "max_tokens": 400, "ignore_eos": True, "timeout": 0.05}
    )
    assert found.status_code == 504
    server.wait_until_idle()
    after = scrape(server)
    labels = {"finished_reason": "abort"}
    name = "vllm:request_success_total"
    assert value(after, name, **labels) - value(before, name, **labels) == 1


def test_a_key_is_needed(dry: Server) -> None:
    with serving("demo", "--dry-run", "--api-key", "secret") as server:
        assert server.http.get("/metrics").status_code == 401
        found = server.http.get("/metrics", headers={"authorization": "Bearer secret"})
        assert found.status_code == 200 and "vllm:num_requests_running{" in found.text


def test_http_requests_by_route(server: Server) -> None:
    labels = {"method": "POST", "handler": "/generate"}
    name = "http_requests_total"

    def counts() -> tuple[float, float, float, float]:
        families = scrape(server)
        rows = [(sample.labels, sample.value) for sample in families["http_requests"].samples]
        assert all(row.keys() == {"method", "handler", "status"} for row, _ in rows)
        assert not any(
            "made-up" in row["handler"] or row["handler"] in ("/health", "/metrics") for row, _ in rows
        )
        durations = families["http_request_duration_seconds"].samples
        return (
            value(families, name, **labels, status="2xx"),
            value(families, name, **labels, status="4xx"),
            value(families, name, handler="none", status="4xx"),
            sum(
                s.value for s in durations if s.name.endswith("_count") and labels.items() <= s.labels.items()
            ),
        )

    def once() -> None:
        server.post("/generate", {"prompt": "Hi", "max_tokens": 1})
        server.post("/generate", {})
        server.http.get("/made-up")
        server.http.get("/v1/models/made-up")
        server.http.get("/health")

    once()
    before = counts()
    once()
    assert [new - old for new, old in zip(counts(), before)] == [1, 1, 2, 2]


def test_tokens_by_client(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret-a name=anna\nsecret-b name=bert\n")
    with serving("demo", "--dry-run", "--api-key-file", str(keys)) as server:
        headers = {"authorization": "Bearer secret-a"}
        body = {"prompt": [7] * 5, "max_tokens": 3, "ignore_eos": True}
        assert server.post("/v1/completions", body, headers=headers).status_code == 200
        text = server.http.get("/metrics", headers=headers).text
        assert "secret" not in text and "bert" not in text
        families = {family.name: family for family in text_string_to_metric_families(text)}
        name = "quire:client_tokens_total"
        assert value(families, name, client="anna", kind="prompt") == 5
        assert value(families, name, client="anna", kind="generation") == 3


def test_stats_for_people(server: Server) -> None:
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: ask(server, f"{i} again", 30), range(8)))
    found = server.wait_until_idle()
    for name in ("ttft", "itl", "e2e", "queue"):
        figures = found["latency_ms"][name]
        assert (
            figures["count"] >= 8
            and 0 <= figures["p50"] <= figures["p90"] <= figures["p99"] <= figures["max"]
        )
    assert found["latency_ms"]["itl"]["p50"] >= 1.5, "a step takes 2 ms"
    assert found["latency_ms"]["ttft"]["p50"] < found["latency_ms"]["e2e"]["p50"]
    assert 1 <= found["batch"]["rows"]["max"] <= 6 and found["batch"]["tokens"]["max"] > 6
    assert found["batch"]["rows"]["count"] == found["last_step"]["step"] + 1
    assert found["blocks"]["pressure_events"] >= found["blocks"]["preemptions"]
    assert 0 <= found["tokens"]["hit_rate"] <= 1
    assert found["requests"]["completed"] >= 8


def test_stats_of_a_new_server() -> None:
    with serving("demo", "--dry-run") as server:
        found = server.stats()
        assert found["latency_ms"]["ttft"] is None and found["batch"]["rows"] is None
        assert value(scrape(server), "vllm:kv_cache_usage_perc") == 0


def test_the_dashboard_asks_for_what_there_is(server: Server) -> None:
    ask(server, "Hi", 3)
    there = {
        sample.name: sample.labels.keys() for family in scrape(server).values() for sample in family.samples
    }
    asked = re.compile(r"(?:sum by \(([^)]*)\) \()?(?:rate\()?((?:vllm|quire):\w+)\{")
    for expression in expressions():
        found = asked.findall(expression)
        assert found, expression
        for by, name in found:
            assert name in there, name
            assert set(filter(None, by.split(", "))) | {"model_name"} <= there[name], expression
