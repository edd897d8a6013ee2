"""Log lines as text and as JSON, periodic statistics, and traces sent to a test collector."""

from __future__ import annotations

import gzip
import json
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from serving import Server, chat, events, serving

from quire.serve.observe.tracing import make_tracing
from quire.types import ConfigError

LINE = re.compile(
    r"INFO \d\d-\d\d \d\d:\d\d:\d\d quire\.stats: Engine 000: Avg prompt throughput: (?P<prompt>[\d.]+) tokens/s, "
    r"Avg generation throughput: (?P<generation>[\d.]+) tokens/s, Running: (?P<running>\d+) reqs, "
    r"Waiting: (?P<waiting>\d+) reqs, GPU KV cache usage: (?P<kv>[\d.]+)%, Prefix cache hit rate: (?P<hit>[\d.]+)%\n"
)


def wait_for(condition: Callable[[], Any], seconds: float = 15) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)
    return found


def test_a_line_with_figures() -> None:
    flags = ("--dry-run-step-ms", "5", "--max-num-seqs", "2", "--log-stats-interval", "0.3")
    with serving("demo", "--dry-run", *flags) as server:
        time.sleep(0.7)
        assert "Avg prompt" not in server.output, "there is nothing to tell of an idle server"
        body = {"prompt": [7] * 64, "n": 3, "max_tokens": 300, "ignore_eos": True}
        server.post("/v1/completions", body)
        wait_for(lambda: "generation throughput: 0.0 tokens/s, Running: 0 reqs" in server.lines[-1])
        found = [match for line in server.lines if (match := LINE.fullmatch(line))]
        assert len(found) == sum("Avg prompt" in line for line in server.lines) >= 4
        assert any(m["running"] == "2" and m["waiting"] == "1" for m in found)
        assert max(float(m["kv"]) for m in found) > 0 and max(float(m["hit"]) for m in found) > 40
        told = sum(float(m["generation"]) for m in found) * 0.3
        assert 450 < told < 950, "900, and less where a busy machine stretches the time between two lines"
        lines = len(server.lines)
        time.sleep(1)
        assert len(server.lines) == lines, "an idle server is told of once"


def test_json_lines() -> None:
    flags = ("--log-format", "json", "--log-stats-interval", "0.2", "--log-level", "info")
    with serving("demo", "--dry-run", *flags) as server:
        server.post("/generate", {"prompt": "Hi", "max_tokens": 4})
        wait_for(lambda: "prefix_cache_hit_rate" in server.output)
        server.signal(signal.SIGTERM)
        server.wait()
        lines = [json.loads(line) for line in server.lines]
    for line in lines:
        assert {"time", "level", "logger", "message"} <= line.keys()
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", line["time"])
    assert any("serving on http://" in line["message"] for line in lines)
    assert {line["logger"] for line in lines} >= {"quire", "quire.stats", "uvicorn.error"}
    figures = next(line for line in lines if line["logger"] == "quire.stats")
    assert figures["generation_tokens_per_s"] > 0 and figures["running"] == 0


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_line_for_each_request(form: str) -> None:
    with serving("demo", "--dry-run", "--log-requests", "--log-format", form) as server:
        chats = "/v1/chat/completions"
        for number, body in enumerate([chat("Hi", max_tokens=3), chat("Hi", stream=True), {}]):
            server.post(chats, body, headers={"x-request-id": f"number-{number}"})
        server.http.get("/health")
        server.http.get("/no%0Asuch")
        wait_for(lambda: "such" in server.output)
        lines = [line for line in server.lines if "quire.requests" in line]
    assert len(lines) == 4 and "number-1" in lines[1]
    if form == "text":
        wanted = (
            rf"INFO .* quire\.requests: POST {chats} 200 in [\d.]+ ms, \d+ \+ 3 tokens, length \(number-0\)\n"
        )
        assert re.fullmatch(wanted, lines[0]), lines[0]
        assert f"POST {chats} 400 in" in lines[2] and r"GET /no\nsuch 404" in lines[3]
        return
    whole, stream, bad, missing = map(json.loads, lines)
    assert (whole["status"], whole["completion_tokens"], whole["ended"]) == (200, 3, "length")
    assert whole["path"] == chats and 0 < whole["ttft_ms"] <= whole["ms"]
    assert (stream["request_id"], stream["ended"]) == ("number-1", "stop")
    assert bad["status"] == 400 and "ended" not in bad and missing["status"] == 404


def test_an_exception_is_one_json_line() -> None:
    import logging

    from quire.serve.observe.logs import JsonLines

    try:
        raise ValueError("broken")
    except ValueError:
        record = logging.LogRecord("quire", logging.ERROR, "", 0, "it %s", ("failed",), sys.exc_info())
    found = JsonLines().format(record)
    assert "\n" not in found and json.loads(found)["message"] == "it failed"
    assert "ValueError: broken" in json.loads(found)["exception"]


# ------------------------------------------------------------------------------------------ traces


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """Run a fake collector; yield its address and the list of spans that it receives."""
    spans: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.path == "/v1/traces"
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                name = {a.key: a.value.string_value for a in resource.resource.attributes}["service.name"]
                assert name == "quire"
                spans.extend(span for scope in resource.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    web = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{web.server_port}", spans
    finally:
        web.shutdown()
        web.server_close()


def attributes(span: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


@pytest.fixture(scope="module")
def traced() -> Iterator[tuple[Server, list[Any]]]:
    with collector() as (address, spans):
        flags = ("--dry-run-step-ms", "3", "--otlp-endpoint", address)
        with serving("demo", "--dry-run", *flags, env={"OTEL_BSP_SCHEDULE_DELAY": "50"}) as server:
            yield server, spans


def spans_of(spans: list[Any], request_id: str) -> dict[str, Any]:
    """Wait for the spans of a request and return them by name."""

    def find() -> dict[str, Any] | None:
        roots = [s for s in spans if attributes(s).get("gen_ai.request.id") == request_id]
        if not roots:
            return None
        (root,) = roots
        return {"root": root, **{s.name: s for s in spans if s.parent_span_id == root.span_id}}

    return wait_for(find)


def test_a_span_for_a_request_with_its_phases_inside(traced: tuple[Server, list[Any]]) -> None:
    server, spans = traced
    trace_id, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    headers = {"x-request-id": "mine", "traceparent": f"00-{trace_id}-{parent}-01"}
    began_ns = time.time_ns()
    body = chat("Hello there", max_tokens=40, ignore_eos=True, stream=True, temperature=0.5)
    assert events(server.post("/v1/chat/completions", body, headers=headers))[-1] == "[DONE]"
    ended_ns = time.time_ns()
    found = spans_of(spans, "mine")
    root = found["root"]
    assert (root.name, root.trace_id.hex(), root.parent_span_id.hex()) == ("llm_request", trace_id, parent)
    assert began_ns <= root.start_time_unix_nano < root.end_time_unix_nano <= ended_ns + 5_000_000_000
    values = attributes(root)
    assert values["gen_ai.usage.completion_tokens"] == 40 and values["gen_ai.request.temperature"] == 0.5
    assert values["gen_ai.response.model"] == "demo" and values["http.route"] == "/v1/chat/completions"
    assert values["http.response.status_code"] == 200 and values["gen_ai.request.max_tokens"] == 40
    assert 0 < values["gen_ai.latency.time_to_first_token"] < values["gen_ai.latency.e2e"]
    decode_s = values["gen_ai.latency.time_in_model_decode"]
    assert 39 * 0.003 * 0.9 < decode_s < values["gen_ai.latency.e2e"]
    assert found.keys() == {"root", "queue", "prefill", "decode"}
    assert (
        root.start_time_unix_nano <= found["queue"].start_time_unix_nano
        <= found["queue"].end_time_unix_nano == found["prefill"].start_time_unix_nano
        < found["prefill"].end_time_unix_nano == found["decode"].start_time_unix_nano
        < found["decode"].end_time_unix_nano <= root.end_time_unix_nano
    )  # fmt: skip
    assert all(found[name].trace_id.hex() == trace_id for name in ("queue", "prefill", "decode"))


def test_a_request_that_fails(traced: tuple[Server, list[Any]]) -> None:
    server, spans = traced
    body = {"prompt": "Hi", "max_tokens": 400, "ignore_eos": True, "timeout": 0.1}
    assert server.post("/v1/completions", body, headers={"x-request-id": "late"}).status_code == 504
    root = spans_of(spans, "late")["root"]
    assert attributes(root)["http.response.status_code"] == 504 and root.status.code == 2
    server.http.get("/health")
    assert server.post("/v1/completions", {}, headers={"x-request-id": "bad"}).status_code == 400
    time.sleep(0.3)
    assert {s.name for s in spans} <= {"llm_request", "queue", "prefill", "decode"}
    assert not any(attributes(s).get("gen_ai.request.id") == "bad" for s in spans)


def test_what_is_left_is_sent_at_the_end() -> None:
    with collector() as (address, spans), serving("demo", "--dry-run", "--otlp-endpoint", address) as server:
        server.post("/generate", {"prompt": "Hi", "max_tokens": 2})
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        assert {s.name for s in spans} == {"llm_request", "queue", "prefill", "decode"}


def test_a_collector_that_is_not_there_harms_nobody() -> None:
    env = {"OTEL_BSP_SCHEDULE_DELAY": "20"}
    with serving("demo", "--dry-run", "--otlp-endpoint", "http://127.0.0.1:9", env=env) as server:
        for _ in range(3):
            assert server.post("/generate", {"prompt": "Hi", "max_tokens": 2}).status_code == 200
        time.sleep(0.3)
        assert httpx.get(server.url + "/health").status_code == 200
        began = time.monotonic()
        server.signal(signal.SIGTERM)
        assert server.wait(20) == 0
        assert time.monotonic() - began < 9, "the library tries for ten seconds and more"


def test_without_the_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(
        ConfigError, match=r"otlp_endpoint needs OpenTelemetry .*pip install 'quire-llm\[otlp\]'"
    ):
        make_tracing("http://localhost:4318", "demo")
    with pytest.raises(ConfigError, match="must be a URL"):
        make_tracing("localhost:4318", "demo")
