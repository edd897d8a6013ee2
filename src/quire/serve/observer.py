"""Those who look at each HTTP request when it is over: traces, and a line for each. None: nobody looks."""

from __future__ import annotations

import logging
import time
from typing import Any, Protocol

from starlette.types import Scope

from quire.serve.auth import ANYONE
from quire.serve.generation import Generation

REQUESTS = "quire.requests"


class Observer(Protocol):
    def ended(self, scope: Scope, status: int) -> None:
        """An HTTP request is over; if prompts came of it, `scope["generation"]` is what became of them. Status 0:
        nothing was answered."""
        ...

    def close(self) -> None:
        """The server ends: bring home what is not told yet, within some seconds."""
        ...


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
