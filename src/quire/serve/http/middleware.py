"""The middleware around all routes: request ids, host and key checks, and error answers.

It is one plain ASGI layer, which adds two function calls to a request and none to the chunks of a stream.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.serve.http.auth import ApiKeys, bearer
from quire.serve.http.errors import ApiError, as_api_error
from quire.serve.http.guard import Guard
from quire.serve.http.page import PAGE_PATHS
from quire.serve.http.wire import error_response
from quire.serve.observe.observer import Observer

log = logging.getLogger("quire.serve")

OPEN_PATHS = frozenset({"/health", "/healthz", "/ping", *PAGE_PATHS})
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class RequestMiddleware:
    """The ASGI layer that sets `X-Request-Id`, checks origin and API key, and converts exceptions to error answers.

    Every observer is told when a request has ended.
    """

    def __init__(
        self, app: ASGIApp, guard: Guard, keys: ApiKeys, observers: Sequence[Observer], dry_run: bool = False
    ) -> None:
        """`dry_run`: say in each answer that it comes from no model."""
        self._dry_run = dry_run
        self._app, self._guard, self._keys, self._observers = app, guard, keys, observers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        scope["client_label"] = given if _REQUEST_ID.fullmatch(given) else ""
        request_id = scope["client_label"] or uuid.uuid4().hex
        scope["request_id"], scope["arrival_s"] = request_id, time.monotonic()
        status = 0  # no answer has started

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                found = MutableHeaders(scope=message)
                # The names that OpenAI and Anthropic use.
                found["x-request-id"] = found["request-id"] = request_id
                if self._dry_run:
                    found["x-quire-mode"] = "dry-run"
            await send(message)

        try:
            self._guard.check(scope, headers)
            if scope["path"] not in OPEN_PATHS:
                client = self._keys.client(bearer(headers.get("authorization"), headers.get("x-api-key")))
                if client is None:
                    raise _unauthorized(headers)
                scope["client_key"] = client
            await self._app(scope, receive, named)
        except ClientDisconnect:  # while it sent its body, so no answer can be sent
            pass
        except Exception as error:
            found = as_api_error(error)
            if found.status >= 500 and not isinstance(error, ApiError):
                log.exception("request %s failed", request_id)
            if not status:
                await error_response(found, scope)(scope, receive, named)
        finally:
            for observer in self._observers:
                observer.ended(scope, status)


def _unauthorized(headers: Headers) -> ApiError:
    given = bearer(headers.get("authorization"), headers.get("x-api-key")) is not None
    message = (
        "the API key is not accepted by this server"
        if given
        else "this server needs an API key: send the header `Authorization: Bearer KEY`"
    )
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
