"""POST /v1/messages and /v1/messages/count_tokens, for clients of Anthropic's API."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from quire.serve.chat import begin, chat_prompt, chat_template
from quire.serve.context import client_of, read_request, server_of, thread_of
from quire.serve.errors import messages_error
from quire.serve.messages.answer import MessageAnswer
from quire.serve.messages.input import chat_of
from quire.serve.protocol.messages import CountTokensRequest, MessagesRequest
from quire.serve.stream import Framing, finished, named_event, stream
from quire.serve.tools.request import tool_use
from quire.serve.wire import json_response


async def messages(request: Request) -> Response:
    wanted, warnings = await read_request(request, MessagesRequest)
    chat, more = await server_of(request).engine.in_thread(client_of(request), chat_of, wanted)
    turn = await begin(request, chat, [*warnings, *more])
    answer = MessageAnswer(turn)
    if chat.stream:
        slow_s = turn.server.settings.slow_reader_timeout
        return await stream(request, turn.generation, answer.chunks, answer.last, slow_s, framing(request))
    return await finished(request, turn.generation, answer.response, thread_of(request))


def framing(request: Request) -> Framing:
    request_id = request.scope["request_id"]
    return Framing(lambda error: named_event(messages_error(error, request_id)))


async def count_tokens(request: Request) -> Response:
    """How many tokens the prompt of such a request has."""
    server = server_of(request)
    wanted, _ = await read_request(request, CountTokensRequest)
    server.check_model(wanted.model)

    def count() -> int:
        chat, _ = chat_of(wanted)
        use = tool_use(chat)
        prompt = chat_prompt(server, chat, use.tools, chat_template(server, chat, use))
        return len(server.engine.tokenizer.encode(prompt, False))

    return json_response({"input_tokens": await server.engine.in_thread(client_of(request), count)})
