"""GET /metrics: Prometheus metrics under vLLM's names (`vllm:`), for its dashboards, and Quire's own (`quire:`).

This module keeps no state: each scrape reads the engine's last figures and the counters of account.py. The families
are built on the event loop, where nothing changes meanwhile; a thread encodes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import get_args

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from quire import __version__
from quire.serve.api.context import ServerContext, client_of, server_of
from quire.serve.http.auth import ANYONE, ApiClient
from quire.serve.observe.histogram import Histogram
from quire.types import TransferKind


class _FamilyCollector(Collector):
    """A collector of families that are already built."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


async def metrics(request: Request) -> Response:
    """Return the metrics in the Prometheus text format, or in OpenMetrics if the Accept header asks for it."""
    server = server_of(request)
    families = list(MetricFamilies(server, client_of(request)))
    encode, content_type = exposition_writer(request.headers.get("accept", ""))
    registry = CollectorRegistry()
    registry.register(_FamilyCollector(families))
    ProcessCollector(registry=registry)
    body = await server.engine.in_thread(client_of(request), encode, registry)
    return Response(body, headers={"content-type": content_type})


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


class MetricFamilies:
    """All metric families with their current values, in the order of export.

    The token counts by client include only clients that `viewer` may see.
    """

    def __init__(self, server: ServerContext, viewer: ApiClient = ANYONE) -> None:
        self._viewer = viewer
        self._server, self._engine = server, server.engine
        self._account = server.engine.account
        self._base = {"model_name": server.names[0], "engine": "0"}

    def __iter__(self) -> Iterator[Metric]:
        yield from self._state()
        yield from self._tokens()
        yield from self._drafts()
        yield from self._requests()
        yield from self._latencies()
        yield from self._older()
        yield from self._http()
        yield from self._own()

    # -------------------------------------------------------------------------------- builders

    def _gauge(self, name: str, text: str, value: float, labels: Mapping[str, str] | None = None) -> Metric:
        labels = {**self._base, **(labels or {})}
        family = GaugeMetricFamily(name, text, labels=list(labels))
        family.add_metric(list(labels.values()), value)
        return family

    def _gauges(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        return self._by_label(GaugeMetricFamily(name, text, labels=[*self._base, label]), values)

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=list(self._base))
        family.add_metric(list(self._base.values()), value)
        return family

    def _counters(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        return self._by_label(CounterMetricFamily(name, text, labels=[*self._base, label]), values)

    def _by_label(
        self, family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[str, float]
    ) -> Metric:
        for key, value in values.items():
            family.add_metric([*self._base.values(), key], value)
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(name, text, labels=list(self._base))
        family.add_metric(list(self._base.values()), histogram.buckets(), histogram.sum)
        return family

    # ---------------------------------------------------------------------------- vLLM's metrics

    def _usage(self) -> float:
        figures, blocks = self._account.figures, self._engine.info.num_blocks
        return (blocks - figures.free_blocks) / blocks if figures.totals.steps else 0.0

    def _state(self) -> Iterator[Metric]:
        load, figures, info = self._engine.admission.load, self._account.figures, self._engine.info
        yield self._gauge(
            "vllm:num_requests_running", "Number of requests in the running batch.", load.running
        )
        yield self._gauge(
            "vllm:num_requests_waiting", "Number of requests waiting in the engine.", load.waiting
        )
        yield self._gauges(
            "vllm:num_requests_waiting_by_reason",
            "Number of waiting requests by reason: capacity (no room) or deferred (waiting for something else).",
            "reason",
            {"capacity": load.waiting - figures.held, "deferred": figures.held},
        )
        yield self._gauge(
            "vllm:kv_cache_usage_perc", "Fraction of KV cache blocks in use, 0 to 1.", self._usage()
        )
        states = {"awake": 1.0, "weights_offloaded": 0.0, "discard_all": 0.0}
        yield self._gauges(
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
        yield self._gauge("vllm:cache_config_info", "KV cache settings, as labels.", 1, labels)

    def _tokens(self) -> Iterator[Metric]:
        account, totals = self._account, self._account.figures.totals
        yield self._counter(
            "vllm:prefix_cache_queries",
            "Number of prompt tokens looked up in the prefix cache.",
            totals.queried_tokens,
        )
        yield self._counter(
            "vllm:prefix_cache_hits",
            "Number of prompt tokens found in the prefix cache.",
            totals.cached_tokens,
        )
        yield self._counter("vllm:num_preemptions", "Number of preemptions.", totals.preemptions)
        yield self._counter(
            "vllm:prompt_tokens", "Number of prompt tokens in admitted requests.", account.prompt_tokens
        )
        yield self._counter("vllm:generation_tokens", "Number of generated tokens.", totals.generated_tokens)
        yield self._counter(
            "vllm:prompt_tokens_cached",
            "Number of prompt tokens taken from the prefix cache.",
            account.cached_tokens,
        )
        computed = account.prompt_tokens - account.cached_tokens
        sources = {"local_compute": computed, "local_cache_hit": account.cached_tokens}
        yield self._counters(
            "vllm:prompt_tokens_by_source",
            "Number of prompt tokens by source: computed or cached.",
            "source",
            sources,
        )
        yield self._counters(
            "vllm:prompt_tokens_cached_by_source",
            "Number of cached prompt tokens by location of the cache.",
            "source",
            {"device": account.cached_tokens},
        )

    def _drafts(self) -> Iterator[Metric]:
        totals = self._account.figures.totals
        yield self._counter(
            "vllm:spec_decode_num_drafts", "Number of rows that verified draft tokens.", totals.draft_rows
        )
        yield self._counter(
            "vllm:spec_decode_num_draft_tokens", "Number of draft tokens verified.", totals.draft_tokens
        )
        yield self._counter(
            "vllm:spec_decode_num_accepted_tokens",
            "Number of draft tokens accepted.",
            totals.accepted_tokens,
        )
        yield self._counters(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Number of draft tokens accepted, by position among the drafts of a row.",
            "position",
            {str(position): count for position, count in enumerate(totals.accepted_at)},
        )

    def _requests(self) -> Iterator[Metric]:
        account = self._account
        yield self._counters(
            "vllm:request_success",
            "Number of finished requests by finish reason.",
            "finished_reason",
            account.ended,
        )
        yield self._counters(
            "vllm:admission_rejections",
            "Number of requests rejected with 503, by reason.",
            "reason",
            self._engine.admission.rejections,
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
            yield self._histogram(f"vllm:{name}", text, histogram)

    def _latencies(self) -> Iterator[Metric]:
        account = self._account
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
            yield self._histogram(f"vllm:{name}_seconds", f"Histogram in seconds. {text}", histogram)

    def _older(self) -> Iterator[Metric]:
        """Yield metrics under names that vLLM no longer uses but dashboards still query."""
        older = "Deprecated name of"
        yield self._gauge("vllm:gpu_cache_usage_perc", f"{older} kv_cache_usage_perc.", self._usage())
        yield self._histogram(
            "vllm:time_per_output_token_seconds", f"{older} inter_token_latency_seconds.", self._account.itl_s
        )

    def _http(self) -> Iterator[Metric]:
        """Yield HTTP metrics under the names of vLLM's FastAPI instrumentator, without engine labels."""
        labels = ["method", "handler", "status"]
        requests = CounterMetricFamily(
            "http_requests", "Number of HTTP requests by method, route and status class.", labels=labels
        )
        for key, count in self._server.http.requests.items():
            requests.add_metric(key, count)
        yield requests
        text = "Duration of HTTP requests in seconds, from the request's head to the end of the answer."
        seconds = HistogramMetricFamily("http_request_duration_seconds", text, labels=labels[:2])
        for route, histogram in self._server.http.seconds.items():
            seconds.add_metric(route, histogram.buckets(), histogram.sum)
        yield seconds

    # --------------------------------------------------------------------------- Quire's metrics

    def _own(self) -> Iterator[Metric]:
        engine, account = self._engine, self._account
        figures, blocks = account.figures, engine.info.num_blocks
        free = figures.free_blocks if figures.totals.steps else blocks
        states = {
            "used": blocks - free,
            "cached": figures.cached_blocks,
            "blank": free - figures.cached_blocks,
        }
        yield self._gauges(
            "quire:blocks",
            "Number of KV cache blocks by state: used, cached (free, but reusable as a prefix) and blank.",
            "state",
            states,
        )
        yield self._counter(
            "quire:block_evictions", "Number of cached blocks evicted to make room.", figures.evictions
        )
        totals = figures.totals
        yield self._counters(
            "quire:kv_fetched_tokens",
            "Number of cached tokens whose blocks were not on the device, by the tier that they came from.",
            "tier",
            {tier: totals.fetched_tokens.get(tier, 0) for tier in ("host", "disk", "prefill")},
        )
        yield self._counters(
            "quire:kv_moved_bytes",
            "Number of bytes of blocks copied to and from the device, by kind of transfer.",
            "kind",
            {kind: totals.moved_bytes.get(kind, 0) for kind in get_args(TransferKind)},
        )
        yield self._counter(
            "quire:kv_unsaved_blocks",
            "Number of evicted blocks for which host memory had no free row.",
            totals.unsaved_blocks,
        )
        yield self._counter(
            "quire:pressure_events",
            "Number of times that blocks ran out: preemptions, and admissions that had to wait.",
            figures.totals.pressure,
        )
        yield self._counter(
            "quire:requests_not_finite",
            "Number of requests aborted because the model's output was NaN or infinite.",
            figures.totals.not_finite,
        )
        yield self._counter(
            "quire:log_lines_dropped",
            "Number of log lines dropped because standard output or standard error was not read fast enough.",
            self._server.lines.dropped,
        )
        yield self._gauge(
            "quire:requests_open",
            "Number of unfinished choices (answers), waiting ones included.",
            engine.num_open,
        )
        yield self._counter(
            "quire:requests_completed",
            "Number of HTTP requests answered completely.",
            account.of(None).completed,
        )
        yield self._counters(
            "quire:queue_seconds",
            "Time in seconds that requests waited in the engine, by cause.",
            "cause",
            account.waited_s,
        )
        for name, text, value in (
            (
                "lost_to_prefills_seconds",
                "Time in seconds that decoding requests lost to the prefills of others.",
                account.lost_s,
            ),
            ("preempted_seconds", "Time in seconds that preempted requests waited.", account.preempted_s),
            (
                "recompute_seconds",
                "Time in seconds to recompute tokens after preemptions.",
                account.recompute_s,
            ),
            (
                "recomputed_tokens",
                "Number of tokens recomputed after preemptions.",
                account.recomputed_tokens,
            ),
        ):
            yield self._counter(f"quire:{name}", text, value)
        family = CounterMetricFamily(
            "quire:client_tokens",
            "Number of tokens in finished requests, by client and kind.",
            labels=[*self._base, "client", "kind"],
        )
        for name, client in account.clients.items():
            if self._viewer.sees in (None, name):
                for kind, count in (
                    ("prompt", client.prompt_tokens),
                    ("generation", client.generated_tokens),
                ):
                    family.add_metric([*self._base.values(), name, kind], count)
        yield family
        yield self._histogram("quire:step_seconds", "Histogram of step durations in seconds.", account.step_s)
        yield self._histogram("quire:step_rows", "Histogram of requests per step.", account.step_rows)
        phases = {name: float(seconds) for name, seconds in engine.info.phases_s.items()}
        yield self._gauges(
            "quire:start_up_seconds", "Start-up time of the engine in seconds, by phase.", "phase", phases
        )
        yield self._gauge("quire:build_info", "Version of Quire, as a label.", 1, {"version": __version__})
