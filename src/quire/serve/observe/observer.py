"""Observers of finished HTTP requests: counters by route and the request log. tracing.py has another one."""

from __future__ import annotations

import logging
import time
from typing import Any, Protocol

from starlette.types import Scope

from quire.serve.answer.generation import Generation
from quire.serve.http.auth import ANYONE
from quire.serve.observe.histogram import Histogram

REQUESTS = "quire.requests"
_NOT_COUNTED = frozenset({"/health", "/healthz", "/ping", "/version", "/metrics"})
_BOUNDS_S = (0.1, 0.5, 1.0)


class Observer(Protocol):
    """An object that is told about every HTTP request that has ended."""

    def ended(self, scope: Scope, status: int) -> None:
        """Handle the end of an HTTP request.

        Args:
            scope: the ASGI scope; `scope["generation"]` is the Generation, if the request started one.
            status: HTTP status of the answer; 0 if there was none.
        """
        ...

    def close(self) -> None:
        """Deliver the remaining data within a few seconds, because the server stops."""
        ...


class HttpCounts:
    """Counters of requests by (method, route, status class such as 2xx), and their durations by (method, route).

    Unknown paths and paths with parameters count as "none", so that clients cannot create time series.
    """

    def __init__(self) -> None:
        self.requests: dict[tuple[str, str, str], int] = {}
        self.seconds: dict[tuple[str, str], Histogram] = {}

    def ended(self, scope: Scope, status: int) -> None:
        path = scope["path"]
        if not status or path in _NOT_COUNTED:
            return
        known = "endpoint" in scope and not scope.get("path_params")
        method, route = (scope["method"], path) if known else ("none", "none")
        key = method, route, f"{status // 100}xx"
        self.requests[key] = self.requests.get(key, 0) + 1
        seconds = self.seconds.setdefault(key[:2], Histogram(_BOUNDS_S))
        seconds.observe(time.monotonic() - scope["arrival_s"])

    def close(self) -> None:
        pass


class RequestLog:
    """The request log: a line for every POST request and for every request that fails."""

    def __init__(self) -> None:
        self._log = logging.getLogger(REQUESTS)

    def ended(self, scope: Scope, status: int) -> None:
        if scope["method"] != "POST" and status < 400:
            return
        path = scope["path"][:128].encode("unicode_escape").decode()
        generation: Generation | None = scope.get("generation")
        figures: dict[str, Any] = {
            "request_id": scope["request_id"],
            "client": scope.get("client_key", ANYONE).name,
            "method": scope["method"],
            "path": path,
            "status": status,
            "ms": round((time.monotonic() - scope["arrival_s"]) * 1000, 3),
        }
        text = f"{scope['method']} {path} {status} in {figures['ms']:.1f} ms"
        if generation is not None:
            generated = _figures(generation, scope["arrival_s"])
            text += f", {generated['prompt_tokens']} + {generated['completion_tokens']} tokens, {generated['ended']}"
            figures |= generated
        self._log.info("%s (%s)", text, scope["request_id"], extra={"figures": figures})

    def close(self) -> None:
        pass


def _figures(generation: Generation, arrived_s: float) -> dict[str, Any]:
    firsts = [track.first_s for track in generation.tracks if track.first_s is not None]
    answers = [answer for state in generation.states for answer in state.answers]
    error = generation.error
    return {
        "prompt_tokens": generation.prompt_tokens,
        "cached_tokens": generation.cached_tokens,
        "completion_tokens": generation.completion_tokens,
        "ttft_ms": round((min(firsts) - arrived_s) * 1000, 3) if firsts else None,
        "ended": error.message if error else " ".join(sorted({str(a.finish_reason) for a in answers})),
    }
