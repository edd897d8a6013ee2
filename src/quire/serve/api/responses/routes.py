"""POST /v1/responses and /v1/responses/input_tokens, and stored responses: /v1/responses/{id}."""

from __future__ import annotations

from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.serve.api.context import client_of, read_request, server_of
from quire.serve.api.conversation import count_prompt, open_chat
from quire.serve.api.protocol.chat import ChatRequest
from quire.serve.api.protocol.responses import InputTokensRequest, ResponsesRequest
from quire.serve.api.responses.answer import ResponseAnswer
from quire.serve.api.responses.events import replay
from quire.serve.api.responses.history import RequestHistory, history_of, stored_input
from quire.serve.api.responses.items import StoredItem, page_of
from quire.serve.api.responses.store import StoredResponse
from quire.serve.http.errors import ApiError, bad_request
from quire.serve.http.wire import json_response


async def create_response(request: Request) -> Response:
    """Answer an input in the form of OpenAI's responses, and store it unless `store` is false."""
    server, client = server_of(request), client_of(request)
    body, warnings = await read_request(request, ResponsesRequest)
    history = history_of(server.responses, client, body)
    chat, given, more = await server.engine.in_thread(client, partial(_prepare, body, history))
    stored = body.store is not False and server.settings.max_stored_responses > 0
    opened = await open_chat(request, chat, [*warnings, *more])
    answer = ResponseAnswer(opened, body, lambda response: history.keep(given, response, stored), stored)
    return await answer.send(request, bool(chat.stream))


def _prepare(
    body: ResponsesRequest, history: RequestHistory
) -> tuple[ChatRequest, list[StoredItem], list[str]]:
    chat, warnings = history.chat(body)
    return chat, stored_input(body), warnings


async def count_input_tokens(request: Request) -> Response:
    """Count the tokens of the prompt that the same request to /v1/responses would have."""
    server = server_of(request)
    body, _ = await read_request(request, InputTokensRequest)
    history = history_of(server.responses, client_of(request), body)
    count = await count_prompt(request, body, lambda: history.chat(body)[0])
    return json_response({"object": "response.input_tokens", "input_tokens": count})


def _stored(request: Request) -> StoredResponse:
    response_id = request.path_params["response_id"]
    stored = server_of(request).responses.get(client_of(request), response_id, StoredResponse)
    if stored is None:
        raise _missing(response_id)
    return stored


def _missing(response_id: str) -> ApiError:
    return ApiError(
        404, f"the response {response_id[:128]!r} does not exist or is no longer stored", code="not_found"
    )


async def get_response(request: Request) -> Response:
    """Return a stored response, or with `stream=true` its events after `starting_after`."""
    stored, query = _stored(request), request.query_params
    if query.get("stream", "false") in ("false", "0"):
        return Response(stored.response, media_type="application/json")
    after = query.get("starting_after", "-1")
    if not after.removeprefix("-").isdecimal() or len(after) > 9:
        raise bad_request(f"starting_after must be a sequence number, got {after[:16]!r}", "starting_after")

    def events() -> bytes:
        return replay(msgspec.json.decode(stored.response), int(after))

    found = await server_of(request).engine.in_thread(client_of(request), events)
    return Response(found, media_type="text/event-stream", headers={"cache-control": "no-cache"})


async def list_input_items(request: Request) -> Response:
    """Return a page of the items that a stored response answers."""
    return json_response(page_of(_stored(request).context, request.query_params))


async def delete_response(request: Request) -> Response:
    """Delete a stored response."""
    response_id = request.path_params["response_id"]
    if not server_of(request).responses.delete(client_of(request), response_id, StoredResponse):
        raise _missing(response_id)
    return json_response({"id": response_id, "object": "response.deleted", "deleted": True})


async def cancel_response(request: Request) -> Response:
    """End a response that still runs in the background."""
    _stored(request)
    raise bad_request("only background responses can be cancelled, and Quire does not support those")
