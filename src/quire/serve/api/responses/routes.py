"""POST /v1/responses, and what is kept of responses: GET and DELETE /v1/responses/{id}."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from quire.serve.api.chat import begin
from quire.serve.api.context import client_of, read_request, server_of, thread_of
from quire.serve.api.protocol.chat import ChatRequest
from quire.serve.api.protocol.responses import ResponsesRequest
from quire.serve.api.responses.answer import ResponseAnswer
from quire.serve.api.responses.input import chat_of, messages_of
from quire.serve.api.responses.store import StoredResponse
from quire.serve.http.errors import ApiError, bad_request
from quire.serve.http.stream import StreamFraming, complete_response, stream_response
from quire.serve.http.wire import json_response


async def create_response(request: Request) -> Response:
    server, client = server_of(request), client_of(request)
    wanted, warnings = await read_request(request, ResponsesRequest)
    before: StoredResponse | None = None
    if (previous := wanted.previous_response_id) is not None:
        before = server.responses.get(client, previous)
        if before is None:
            message = f"previous_response_id: there is no response {previous[:128]!r}, or not any more"
            raise ApiError(400, message, "previous_response_id", "previous_response_not_found")
    chat, more = await server.engine.in_thread(client, _chat_of, wanted, before)
    turn = await begin(request, chat, [*warnings, *more])
    store = wanted.store is not False and server.settings.max_stored_responses > 0
    answer = ResponseAnswer(turn, wanted, store)

    def keep() -> None:
        """Before the client learns that all is there: it may go on from it at once."""
        if store:
            said = [item for item in answer.object.output if item["status"] == "completed"]
            messages = chat.messages[1:] if wanted.instructions else chat.messages
            server.responses.put(client, answer.object, [*messages, *messages_of(said)])

    def last() -> list[bytes]:
        keep()
        return answer.last()

    if chat.stream:
        slow_s = server.settings.slow_reader_timeout
        framing = StreamFraming(answer.failed)
        return await stream_response(request, turn.generation, answer.chunks, last, slow_s, framing)
    response = await complete_response(request, turn.generation, answer.response, thread_of(request))
    keep()
    return response


def _chat_of(wanted: ResponsesRequest, before: StoredResponse | None) -> tuple[ChatRequest, list[str]]:
    return chat_of(wanted, before.messages() if before is not None else [])


def _stored(request: Request) -> StoredResponse:
    response_id = request.path_params["response_id"]
    found = server_of(request).responses.get(client_of(request), response_id)
    if found is None:
        raise _missing(response_id)
    return found


def _missing(response_id: str) -> ApiError:
    return ApiError(404, f"there is no response {response_id[:128]!r}, or not any more", code="not_found")


async def get_response(request: Request) -> Response:
    found = _stored(request)
    if request.query_params.get("stream", "false") not in ("false", "0"):
        raise bad_request("stream is not available for a response that is there already", "stream")
    return Response(found.response, media_type="application/json")


async def delete_response(request: Request) -> Response:
    response_id = request.path_params["response_id"]
    if not server_of(request).responses.delete(client_of(request), response_id):
        raise _missing(response_id)
    return json_response({"id": response_id, "object": "response.deleted", "deleted": True})


async def cancel_response(request: Request) -> Response:
    _stored(request)
    raise bad_request("only responses in the background can be cancelled, which Quire has none of")
