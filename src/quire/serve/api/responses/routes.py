"""POST /v1/responses, and stored responses: GET and DELETE /v1/responses/{id}."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from quire.serve.api.context import client_of, read_request, server_of
from quire.serve.api.conversation import open_chat
from quire.serve.api.protocol.chat import ChatRequest
from quire.serve.api.protocol.responses import ResponseObject, ResponsesRequest
from quire.serve.api.responses.answer import ResponseAnswer
from quire.serve.api.responses.input import chat_of, messages_of
from quire.serve.api.responses.store import StoredResponse
from quire.serve.http.errors import ApiError, bad_request
from quire.serve.http.wire import json_response


async def create_response(request: Request) -> Response:
    server, client = server_of(request), client_of(request)
    body, warnings = await read_request(request, ResponsesRequest)
    previous: StoredResponse | None = None
    if (previous_id := body.previous_response_id) is not None:
        previous = server.responses.get(client, previous_id)
        if previous is None:
            message = f"previous_response_id: the response {previous_id[:128]!r} does not exist or is no longer stored"
            raise ApiError(400, message, "previous_response_id", "previous_response_not_found")
    chat, more = await server.engine.in_thread(client, _chat_of, body, previous)

    def store(response: ResponseObject) -> None:
        said = [item for item in response.output if item["status"] == "completed"]
        messages = chat.messages[1:] if body.instructions else chat.messages
        server.responses.put(client, response, [*messages, *messages_of(said)])

    stored = body.store is not False and server.settings.max_stored_responses > 0
    answer = ResponseAnswer(
        await open_chat(request, chat, [*warnings, *more]), body, store if stored else None
    )
    return await answer.send(request, bool(chat.stream))


def _chat_of(body: ResponsesRequest, previous: StoredResponse | None) -> tuple[ChatRequest, list[str]]:
    return chat_of(body, previous.messages() if previous is not None else [])


def _stored(request: Request) -> StoredResponse:
    response_id = request.path_params["response_id"]
    stored = server_of(request).responses.get(client_of(request), response_id)
    if stored is None:
        raise _missing(response_id)
    return stored


def _missing(response_id: str) -> ApiError:
    return ApiError(
        404, f"the response {response_id[:128]!r} does not exist or is no longer stored", code="not_found"
    )


async def get_response(request: Request) -> Response:
    stored = _stored(request)
    if request.query_params.get("stream", "false") not in ("false", "0"):
        raise bad_request("stream is not available for a stored response: set it to false", "stream")
    return Response(stored.response, media_type="application/json")


async def delete_response(request: Request) -> Response:
    response_id = request.path_params["response_id"]
    if not server_of(request).responses.delete(client_of(request), response_id):
        raise _missing(response_id)
    return json_response({"id": response_id, "object": "response.deleted", "deleted": True})


async def cancel_response(request: Request) -> Response:
    _stored(request)
    raise bad_request("only background responses can be cancelled, and Quire does not support those")
