"""OpenTelemetry traces: a span per request with child spans for queue, prefill and decode, sent to an OTLP collector.

Spans are created when a request has ended, from the times in its track (account.py), so tracing adds no work before
that. A thread of the OpenTelemetry library sends them. The names of spans and attributes are those of vLLM, which
follow OpenTelemetry's conventions for generative AI where such exist.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from quire.serve.answer.generation import Generation
from quire.serve.observe.account import RequestTrack
from quire.types import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

_FLUSH_S = 2.0  # time to send the last spans when the server stops


class Tracing:
    """An Observer that exports a trace per request. It has a private tracer provider and changes no global state."""

    def __init__(self, exporter: SpanExporter, model: str) -> None:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource({"service.name": "quire"}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("quire")
        self._propagator = TraceContextTextMapPropagator()
        self._model = model

    def ended(self, scope: Scope, status: int) -> None:
        generation: Generation | None = scope.get("generation")
        if generation is None or not generation.tracks:
            return
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

        epoch_s = time.time() - time.monotonic()  # converts monotonic times to the epoch times of spans
        context = self._propagator.extract(dict(Headers(scope=scope).items()))
        span = self._tracer.start_span(
            "llm_request", context, SpanKind.SERVER, start_time=_ns(scope["arrival_s"] + epoch_s)
        )
        track = max(generation.tracks, key=lambda one: one.end_s or 0.0)
        error = generation.error
        span.set_attributes(self._attributes(scope, generation, track, error.status if error else status))
        if error is not None:
            span.set_status(StatusCode.ERROR, error.message)
        self._phases(track, set_span_in_context(span), epoch_s)
        span.end(_ns(time.time()))

    def _attributes(
        self, scope: Scope, generation: Generation, track: RequestTrack, status: int
    ) -> dict[str, str | int | float]:
        params, timing = track.params, track.timing
        found: dict[str, str | int | float] = {
            "gen_ai.request.id": scope["request_id"],
            "gen_ai.response.model": self._model,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.n": len(generation.tracks),
            "gen_ai.usage.num_sequences": len(generation.tracks),
            "gen_ai.usage.prompt_tokens": generation.prompt_tokens,
            "gen_ai.usage.completion_tokens": generation.completion_tokens,
            "gen_ai.usage.cached_tokens": generation.cached_tokens,
            "http.route": scope["path"][:128],
            "http.response.status_code": status,
        }
        if params.max_tokens is not None:
            found["gen_ai.request.max_tokens"] = params.max_tokens
        if track.first_s is not None:
            found["gen_ai.latency.time_to_first_token"] = track.first_s - track.arrival_s
        if track.end_s is not None:
            found["gen_ai.latency.e2e"] = track.end_s - track.arrival_s
        if timing is not None and timing.admitted_s is not None and timing.first_token_s is not None:
            found["gen_ai.latency.time_in_queue"] = timing.admitted_s - timing.arrival_s
            found["gen_ai.latency.time_in_model_prefill"] = timing.first_token_s - timing.admitted_s
            found["gen_ai.latency.time_in_model_decode"] = timing.until_s - timing.first_token_s
            found["gen_ai.latency.time_in_model_inference"] = timing.until_s - timing.admitted_s
            found["quire.lost_to_prefills"] = timing.lost_s
            found["quire.preemptions"] = timing.preemptions
        return found

    def _phases(self, track: RequestTrack, inside: Any, epoch_s: float) -> None:
        """Add spans for the phases of the choice that ended last."""
        timing = track.timing
        if timing is None:
            return
        marks = (timing.arrival_s, timing.admitted_s, timing.first_token_s, timing.until_s)
        for name, begin_s, end_s in zip(("queue", "prefill", "decode"), marks, marks[1:]):
            if begin_s is not None and end_s is not None:
                span = self._tracer.start_span(name, inside, start_time=_ns(begin_s + epoch_s))
                span.end(_ns(end_s + epoch_s))

    def close(self) -> None:
        # The library ignores its time limit while it retries an unreachable collector.
        flush = threading.Thread(target=self._provider.force_flush, name="last-spans", daemon=True)
        flush.start()
        flush.join(_FLUSH_S)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def make_tracing(endpoint: str, model: str) -> Tracing:
    """Build the observer that sends traces to an OTLP/HTTP collector.

    Args:
        endpoint: URL of the collector; without a path, /v1/traces is used.
        model: model name in the spans.

    Raises:
        ConfigError: if the URL is invalid or the OpenTelemetry libraries are not installed.
    """
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"otlp_endpoint must be a URL such as http://localhost:4318, got {endpoint!r}")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ConfigError(
            f"otlp_endpoint needs OpenTelemetry ({error}); install it with: pip install 'quire-llm[otlp]'"
        ) from None
    path = parts.path if parts.path.strip("/") else "/v1/traces"
    return Tracing(OTLPSpanExporter(endpoint=urlunsplit(parts._replace(path=path))), model)
