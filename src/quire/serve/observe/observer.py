"""Those who look at each HTTP request when it is over: counts by route, a line for each, traces (tracing.py)."""

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
    def ended(self, scope: Scope, status: int) -> None:
        """An HTTP request is over; if prompts came of it, `scope["generation"]` is what became of them. Status 0:
        nothing was answered."""
        ...

    def close(self) -> None:
        """The server ends: bring home what is not told yet, within some seconds."""
        ...


class HttpCounts:
    """Requests by (method, route, kind of status such as 2xx), and their times by (method, route). Paths that are
    no route, or hold a name, count as "none": what clients make up must not make series."""

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
    """A line for each request that asks for something to be done, and for each that fails."""

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
            told = _figures(generation, scope["arrival_s"])
            text += f", {told['prompt_tokens']} + {told['completion_tokens']} tokens, {told['ended']}"
            figures |= told
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
