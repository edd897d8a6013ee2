"""GET /metrics: vLLM's names under `vllm:`, so that its dashboards work, and what is Quire's own under `quire:`.

Nothing is kept here: each scrape reads what the engine last sent along and what serve/observe/account.py has counted.
Families are made on the event loop, where nothing changes meanwhile; a thread writes them out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

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


class _FamilyCollector(Collector):
    """Families that are there already."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


async def metrics(request: Request) -> Response:
    server = server_of(request)
    families = list(MetricFamilies(server, client_of(request)))
    encode, content_type = exposition_writer(request.headers.get("accept", ""))
    registry = CollectorRegistry()
    registry.register(_FamilyCollector(families))
    ProcessCollector(registry=registry)
    body = await server.engine.in_thread(client_of(request), encode, registry)
    return Response(body, headers={"content-type": content_type})


def exposition_writer(accept: str) -> tuple[Callable[[Collector], bytes], str]:
    """Return what writes metrics in the format that an Accept header asks for, and the type of the result.

    Names are the same in both formats. The library's own choice replaces their colons in OpenMetrics unless the
    client sends `escaping=allow-utf-8`, and raises for a version that is no number.
    """
    types = [part.partition(";")[0].strip().lower() for part in accept.split(",")]
    if "application/openmetrics-text" in types:
        write = partial(openmetrics.generate_latest, escaping=openmetrics.ALLOWUTF8)
        return write, openmetrics.CONTENT_TYPE_LATEST
    return partial(generate_latest, escaping=openmetrics.ALLOWUTF8), CONTENT_TYPE_PLAIN_0_0_4


class MetricFamilies:
    """All families with their values now. Of tokens by client, those that `viewer` may see."""

    def __init__(self, server: ServerContext, viewer: ApiClient = ANYONE) -> None:
        self._viewer = viewer
        self._server, self._engine = server, server.engine
        self._account = server.engine.account
        self._base = {"model_name": server.names[0], "engine": "0"}

    def __iter__(self) -> Iterator[Metric]:
        yield from self._state()
        yield from self._tokens()
        yield from self._requests()
        yield from self._latencies()
        yield from self._older()
        yield from self._http()
        yield from self._own()

    # ----------------------------------------------------------------------------------- forms

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

    # ------------------------------------------------------------------------------ vLLM's names

    def _usage(self) -> float:
        figures, blocks = self._account.figures, self._engine.info.num_blocks
        return (blocks - figures.free_blocks) / blocks if figures.totals.steps else 0.0

    def _state(self) -> Iterator[Metric]:
        load, figures, info = self._engine.admission.load, self._account.figures, self._engine.info
        yield self._gauge("vllm:num_requests_running", "Requests in the running batch.", load.running)
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait for the engine.", load.waiting)
        yield self._gauges(
            "vllm:num_requests_waiting_by_reason",
            "Requests that wait for room (capacity), or for something else first (deferred).",
            "reason",
            {"capacity": load.waiting - figures.held, "deferred": figures.held},
        )
        yield self._gauge("vllm:kv_cache_usage_perc", "Part of the KV cache in use, 0 to 1.", self._usage())
        states = {"awake": 1.0, "weights_offloaded": 0.0, "discard_all": 0.0}
        yield self._gauges("vllm:engine_sleep_state", "Quire is always awake.", "sleep_state", states)
        labels = {
            "block_size": str(info.block_size),
            "num_gpu_blocks": str(info.num_blocks),
            "cache_dtype": info.dtype,
            "enable_prefix_caching": str(info.prefix_caching),
            "eviction": info.eviction,
        }
        yield self._gauge("vllm:cache_config_info", "Settings of the KV cache, as labels.", 1, labels)

    def _tokens(self) -> Iterator[Metric]:
        account, totals = self._account, self._account.figures.totals
        yield self._counter(
            "vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", totals.queried_tokens
        )
        yield self._counter(
            "vllm:prefix_cache_hits", "Tokens found in the prefix cache.", totals.cached_tokens
        )
        yield self._counter("vllm:num_preemptions", "Preemptions.", totals.preemptions)
        yield self._counter(
            "vllm:prompt_tokens", "Prompt tokens of admitted requests.", account.prompt_tokens
        )
        yield self._counter("vllm:generation_tokens", "Tokens generated.", totals.generated_tokens)
        yield self._counter(
            "vllm:prompt_tokens_cached", "Prompt tokens from the prefix cache.", account.cached_tokens
        )
        computed = account.prompt_tokens - account.cached_tokens
        sources = {"local_compute": computed, "local_cache_hit": account.cached_tokens}
        yield self._counters(
            "vllm:prompt_tokens_by_source", "Prompt tokens by where they came from.", "source", sources
        )
        yield self._counters(
            "vllm:prompt_tokens_cached_by_source",
            "Cached prompt tokens by where they were.",
            "source",
            {"device": account.cached_tokens},
        )

    def _requests(self) -> Iterator[Metric]:
        account = self._account
        yield self._counters(
            "vllm:request_success", "Requests that ended, by how.", "finished_reason", account.ended
        )
        yield self._counters(
            "vllm:admission_rejections",
            "Requests turned away with 503, by why.",
            "reason",
            self._engine.admission.rejections,
        )
        for name, text, histogram in (
            ("request_prompt_tokens", "Prompt tokens of a request.", account.prompt_sizes),
            ("request_generation_tokens", "Tokens generated for a request.", account.generation_sizes),
            ("request_max_num_generation_tokens", "Tokens of the longest choice.", account.longest_sizes),
            ("request_params_max_tokens", "max_tokens of a request.", account.max_tokens),
            ("request_prefill_kv_computed_tokens", "Prompt tokens computed.", account.computed_sizes),
            ("iteration_tokens_total", "Tokens run in a step.", account.step_tokens),
            ("request_params_n", "n of a request.", account.choices),
            ("request_num_preemptions", "Preemptions of a request.", account.preemptions),
        ):
            yield self._histogram(f"vllm:{name}", text, histogram)

    def _latencies(self) -> Iterator[Metric]:
        account = self._account
        for name, text, histogram in (
            ("time_to_first_token", "From arrival to the first token.", account.ttft_s),
            ("inter_token_latency", "From a token to the next.", account.itl_s),
            ("request_time_per_output_token", "Mean of a request, after its first token.", account.tpot_s),
            ("e2e_request_latency", "From arrival to the last token.", account.e2e_s),
            ("request_queue_time", "From arrival in the engine to its batch.", account.queue_s),
            ("request_inference_time", "From the batch to the last token.", account.inference_s),
            ("request_prefill_time", "From the batch to the first token.", account.prefill_s),
            ("request_decode_time", "From the first token to the last.", account.decode_s),
        ):
            yield self._histogram(f"vllm:{name}_seconds", f"{text} Seconds.", histogram)

    def _older(self) -> Iterator[Metric]:
        """Names that vLLM has given up and that dashboards still ask for."""
        older = "Older name of"
        yield self._gauge("vllm:gpu_cache_usage_perc", f"{older} kv_cache_usage_perc.", self._usage())
        yield self._histogram(
            "vllm:time_per_output_token_seconds", f"{older} inter_token_latency_seconds.", self._account.itl_s
        )

    def _http(self) -> Iterator[Metric]:
        """As the instrumentation of FastAPI names them, which vLLM uses; without the labels of an engine."""
        labels = ["method", "handler", "status"]
        requests = CounterMetricFamily("http_requests", "HTTP requests by route and status.", labels=labels)
        for key, count in self._server.http.requests.items():
            requests.add_metric(key, count)
        yield requests
        text = "From a request's head to the end of its answer, by route."
        seconds = HistogramMetricFamily("http_request_duration_seconds", text, labels=labels[:2])
        for route, histogram in self._server.http.seconds.items():
            seconds.add_metric(route, histogram.buckets(), histogram.sum)
        yield seconds

    # -------------------------------------------------------------------------------- Quire's own

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
            "quire:blocks", "Blocks of the KV cache: used; free, but still cached; blank.", "state", states
        )
        yield self._counter(
            "quire:block_evictions", "Cached blocks that had to make room.", figures.evictions
        )
        yield self._counter(
            "quire:pressure_events",
            "Times that blocks ran out: preemptions, and admissions that began to wait.",
            figures.totals.pressure,
        )
        yield self._counter(
            "quire:requests_not_finite",
            "Requests ended because the model's output was NaN or infinite.",
            figures.totals.not_finite,
        )
        yield self._counter(
            "quire:log_lines_dropped",
            "Lines dropped because standard output or error was not read fast enough.",
            self._server.lines.dropped,
        )
        yield self._gauge("quire:requests_open", "Answers that are asked for and not over.", engine.num_open)
        yield self._counter(
            "quire:requests_completed", "HTTP requests answered in full.", account.of(None).completed
        )
        yield self._counters(
            "quire:queue_seconds",
            "Time that requests waited in the engine, by why.",
            "cause",
            account.waited_s,
        )
        for name, text, value in (
            ("lost_to_prefills_seconds", "Time lost to other requests' prompts.", account.lost_s),
            ("preempted_seconds", "Time that preempted requests waited.", account.preempted_s),
            ("recompute_seconds", "Time to compute again what a preemption threw away.", account.recompute_s),
            ("recomputed_tokens", "Tokens computed again after preemptions.", account.recomputed_tokens),
        ):
            yield self._counter(f"quire:{name}", text, value)
        family = CounterMetricFamily(
            "quire:client_tokens",
            "Tokens of each client's requests that are over.",
            labels=[*self._base, "client", "kind"],
        )
        for name, totals in account.clients.items():
            if self._viewer.sees in (None, name):
                for kind, count in (
                    ("prompt", totals.prompt_tokens),
                    ("generation", totals.generated_tokens),
                ):
                    family.add_metric([*self._base.values(), name, kind], count)
        yield family
        yield self._histogram("quire:step_seconds", "Length of a step. Seconds.", account.step_s)
        yield self._histogram("quire:step_rows", "Requests in a step.", account.step_rows)
        phases = {name: float(seconds) for name, seconds in engine.info.phases_s.items()}
        yield self._gauges("quire:start_up_seconds", "Start-up of the engine, by phase.", "phase", phases)
        yield self._gauge("quire:build_info", "The version, as a label.", 1, {"version": __version__})
