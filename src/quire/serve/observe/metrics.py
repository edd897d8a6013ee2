"""GET /metrics: Prometheus metrics under vLLM's names (`vllm:`), for its dashboards, and Quire's own (`quire:`).

This module keeps no state: each scrape reads the engine's last figures and the counters of account.py. The families
are built on the event loop, where nothing changes meanwhile; a thread encodes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from quire.serve.api.context import ServerContext, client_of, server_of
from quire.serve.http.auth import ANYONE, ApiClient
from quire.serve.observe.metric_builder import MetricBuilder
from quire.serve.observe.own_metrics import OwnMetrics
from quire.serve.replicas.replica import Replica


class _FamilyCollector(Collector):
    """A collector of families that are already built."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


async def metrics(request: Request) -> Response:
    """Return the metrics in the Prometheus text format, or in OpenMetrics if the Accept header asks for it."""
    server = server_of(request)
    families = metric_families(server, client_of(request))
    encode, content_type = exposition_writer(request.headers.get("accept", ""))
    registry = CollectorRegistry()
    registry.register(_FamilyCollector(families))
    ProcessCollector(registry=registry)
    body = await server.engine.in_thread(client_of(request), encode, registry)
    return Response(body, headers={"content-type": content_type})


def metric_families(server: ServerContext, viewer: ApiClient = ANYONE) -> list[Metric]:
    """Return all metric families with their current values; token counts only of clients that `viewer` may see."""
    return [*VllmMetrics(server, viewer), *OwnMetrics(server, viewer)]


def exposition_writer(accept: str) -> tuple[Callable[[Collector], bytes], str]:
    """Return the encoder for the format that an Accept header asks for, and its content type.

    Names are the same in both formats. The library's own function replaces colons in OpenMetrics names unless the
    client sends `escaping=allow-utf-8`, and raises for a version that is not a number.
    """
    types = [part.partition(";")[0].strip().lower() for part in accept.split(",")]
    if "application/openmetrics-text" in types:
        write = partial(openmetrics.generate_latest, escaping=openmetrics.ALLOWUTF8)
        return write, openmetrics.CONTENT_TYPE_LATEST
    return partial(generate_latest, escaping=openmetrics.ALLOWUTF8), CONTENT_TYPE_PLAIN_0_0_4


class VllmMetrics(MetricBuilder):
    """All families under vLLM's names with their current values, in the order of export."""

    def __iter__(self) -> Iterator[Metric]:
        yield from self._state()
        yield from self._tokens()
        yield from self._drafts()
        yield from self._requests()
        yield from self._latencies()
        yield from self._older()
        yield from self._http()

    def _state(self) -> Iterator[Metric]:
        info = self.engine.info
        yield self.engine_gauge(
            "vllm:num_requests_running", "Number of requests in the running batch.", lambda r: r.load.running
        )
        yield self.engine_gauge(
            "vllm:num_requests_waiting", "Number of requests waiting in the engine.", lambda r: r.load.waiting
        )
        yield self.engine_by_label(
            GaugeMetricFamily,
            "vllm:num_requests_waiting_by_reason",
            "Number of waiting requests by reason: capacity (no room) or deferred (waiting for something else).",
            "reason",
            lambda r: {"capacity": r.load.waiting - r.figures.held, "deferred": r.figures.held},
        )
        yield self.engine_gauge(
            "vllm:kv_cache_usage_perc", "Fraction of KV cache blocks in use, 0 to 1.", _usage
        )
        states = {"awake": 1.0, "weights_offloaded": 0.0, "discard_all": 0.0}
        yield self.gauges(
            "vllm:engine_sleep_state",
            "Sleep state of the engine; Quire is always awake.",
            "sleep_state",
            states,
        )
        labels = {
            "block_size": str(info.block_size),
            "num_gpu_blocks": str(info.num_blocks),
            "cache_dtype": info.dtype,
            "enable_prefix_caching": str(info.prefix_caching),
            "eviction": info.eviction,
        }
        yield self.gauge("vllm:cache_config_info", "KV cache settings, as labels.", 1, labels)

    def _tokens(self) -> Iterator[Metric]:
        account = self.account
        yield self.engine_counter(
            "vllm:prefix_cache_queries",
            "Number of prompt tokens looked up in the prefix cache.",
            lambda totals: totals.queried_tokens,
        )
        yield self.engine_counter(
            "vllm:prefix_cache_hits",
            "Number of prompt tokens found in the prefix cache.",
            lambda totals: totals.cached_tokens,
        )
        yield self.engine_counter(
            "vllm:num_preemptions", "Number of preemptions.", lambda totals: totals.preemptions
        )
        yield self.counter(
            "vllm:prompt_tokens", "Number of prompt tokens in admitted requests.", account.prompt_tokens
        )
        yield self.engine_counter(
            "vllm:generation_tokens", "Number of generated tokens.", lambda totals: totals.generated_tokens
        )
        yield self.counter(
            "vllm:prompt_tokens_cached",
            "Number of prompt tokens taken from the prefix cache.",
            account.cached_tokens,
        )
        computed = account.prompt_tokens - account.cached_tokens
        sources = {"local_compute": computed, "local_cache_hit": account.cached_tokens}
        yield self.counters(
            "vllm:prompt_tokens_by_source",
            "Number of prompt tokens by source: computed or cached.",
            "source",
            sources,
        )
        yield self.counters(
            "vllm:prompt_tokens_cached_by_source",
            "Number of cached prompt tokens by location of the cache.",
            "source",
            {"device": account.cached_tokens},
        )

    def _drafts(self) -> Iterator[Metric]:
        info = self.engine.info
        labels = {"method": info.spec_method, "num_speculative_tokens": str(info.states_per_request - 1)}
        yield self.gauge(
            "quire:spec_decode_config_info", "Settings of speculative decoding, as labels.", 1, labels
        )
        yield self.engine_counter(
            "vllm:spec_decode_num_drafts",
            "Number of rows that verified draft tokens.",
            lambda totals: totals.draft_rows,
        )
        yield self.engine_counter(
            "vllm:spec_decode_num_draft_tokens",
            "Number of draft tokens verified.",
            lambda totals: totals.draft_tokens,
        )
        yield self.engine_counter(
            "vllm:spec_decode_num_accepted_tokens",
            "Number of draft tokens accepted.",
            lambda totals: totals.accepted_tokens,
        )
        yield self.engine_by_label(
            CounterMetricFamily,
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Number of draft tokens accepted, by position among the drafts of a row.",
            "position",
            lambda r: {str(position): n for position, n in enumerate(r.figures.totals.accepted_at)},
        )

    def _requests(self) -> Iterator[Metric]:
        account = self.account
        yield self.counters(
            "vllm:request_success",
            "Number of finished requests by finish reason.",
            "finished_reason",
            account.ended,
        )
        yield self.counters(
            "vllm:admission_rejections",
            "Number of requests rejected with 503, by reason.",
            "reason",
            self.engine.admission.rejections,
        )
        for name, text, histogram in (
            ("request_prompt_tokens", "Histogram of prompt tokens per request.", account.prompt_sizes),
            (
                "request_generation_tokens",
                "Histogram of generated tokens per request.",
                account.generation_sizes,
            ),
            (
                "request_max_num_generation_tokens",
                "Histogram of tokens in the longest choice of a request.",
                account.longest_sizes,
            ),
            ("request_params_max_tokens", "Histogram of the max_tokens parameter.", account.max_tokens),
            (
                "request_prefill_kv_computed_tokens",
                "Histogram of prompt tokens computed per request, without cached ones.",
                account.computed_sizes,
            ),
            ("iteration_tokens_total", "Histogram of tokens per step.", account.step_tokens),
            ("request_params_n", "Histogram of the n parameter.", account.choices),
            ("request_num_preemptions", "Histogram of preemptions per request.", account.preemptions),
        ):
            yield self.histogram(f"vllm:{name}", text, histogram)

    def _latencies(self) -> Iterator[Metric]:
        account = self.account
        for name, text, histogram in (
            ("time_to_first_token", "Time to first token.", account.ttft_s),
            ("inter_token_latency", "Time between two tokens of a request.", account.itl_s),
            (
                "request_time_per_output_token",
                "Mean time per output token of a request after its first token.",
                account.tpot_s,
            ),
            ("e2e_request_latency", "Time from the arrival of a request to its last token.", account.e2e_s),
            (
                "request_queue_time",
                "Time from the arrival in the engine to admission to the batch.",
                account.queue_s,
            ),
            ("request_inference_time", "Time from admission to the last token.", account.inference_s),
            ("request_prefill_time", "Time from admission to the first token.", account.prefill_s),
            ("request_decode_time", "Time from the first token to the last one.", account.decode_s),
        ):
            yield self.histogram(f"vllm:{name}_seconds", f"Histogram in seconds. {text}", histogram)

    def _older(self) -> Iterator[Metric]:
        """Yield metrics under names that vLLM no longer uses but dashboards still query."""
        older = "Deprecated name of"
        yield self.engine_gauge("vllm:gpu_cache_usage_perc", f"{older} kv_cache_usage_perc.", _usage)
        yield self.histogram(
            "vllm:time_per_output_token_seconds", f"{older} inter_token_latency_seconds.", self.account.itl_s
        )

    def _http(self) -> Iterator[Metric]:
        """Yield HTTP metrics under the names of vLLM's FastAPI instrumentator, without engine labels."""
        labels = ["method", "handler", "status"]
        requests = CounterMetricFamily(
            "http_requests", "Number of HTTP requests by method, route and status class.", labels=labels
        )
        for key, count in self.server.http.requests.items():
            requests.add_metric(key, count)
        yield requests
        text = "Duration of HTTP requests in seconds, from the request's head to the end of the answer."
        seconds = HistogramMetricFamily("http_request_duration_seconds", text, labels=labels[:2])
        for route, histogram in self.server.http.seconds.items():
            seconds.add_metric(route, histogram.buckets(), histogram.sum)
        yield seconds


def _usage(replica: Replica) -> float:
    figures, blocks = replica.figures, replica.info.num_blocks
    return (blocks - figures.free_blocks) / blocks if figures.totals.steps else 0.0
