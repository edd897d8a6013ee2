"""POST /v1/messages and /v1/messages/count_tokens, for clients of Anthropic's API."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from quire.serve.answer.tools.request import tool_use
from quire.serve.api.anthropic.answer import MessageAnswer
from quire.serve.api.anthropic.input import chat_of
from quire.serve.api.chat import begin, chat_prompt
from quire.serve.api.context import client_of, read_request, server_of, thread_of
from quire.serve.api.protocol.messages import CountTokensRequest, MessagesRequest
from quire.serve.api.tokens import count_ids
from quire.serve.http.errors import messages_error
from quire.serve.http.stream import StreamFraming, complete_response, named_event, stream_response
from quire.serve.http.wire import json_response


async def messages(request: Request) -> Response:
    wanted, warnings = await read_request(request, MessagesRequest)
    chat, more = await server_of(request).engine.in_thread(client_of(request), chat_of, wanted)
    turn = await begin(request, chat, [*warnings, *more])
    answer = MessageAnswer(turn)
    if chat.stream:
        slow_s = turn.server.settings.slow_reader_timeout
        return await stream_response(
            request, turn.generation, answer.chunks, answer.last, slow_s, framing(request)
        )
    return await complete_response(request, turn.generation, answer.response, thread_of(request))


def framing(request: Request) -> StreamFraming:
    request_id = request.scope["request_id"]
    return StreamFraming(lambda error: named_event(messages_error(error, request_id)))


async def count_tokens(request: Request) -> Response:
    """How many tokens the prompt of such a request has."""
    server = server_of(request)
    wanted, _ = await read_request(request, CountTokensRequest)
    server.check_model(wanted.model)

    def render() -> str:
        chat, _ = chat_of(wanted)
        use = tool_use(chat)
        template = server.templates.choose(chat.chat_template, bool(use.tools))
        return chat_prompt(server, chat, use.tools, template)

    client = client_of(request)
    text = await server.templates.in_thread(client, wanted.chat_template, render)
    ids = await server.counting.run(client, lambda: count_ids(server, text, False, "messages"))
    return json_response({"input_tokens": len(ids)})
