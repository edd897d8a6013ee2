"""POST /v1/messages and /v1/messages/count_tokens, for clients of Anthropic's API."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from quire.serve.answer.tools.tool_use import tool_use
from quire.serve.api.anthropic.answer import MessageAnswer
from quire.serve.api.anthropic.input import chat_of
from quire.serve.api.context import client_of, read_request, server_of
from quire.serve.api.conversation import chat_prompt, open_chat
from quire.serve.api.protocol.messages import CountTokensRequest, MessagesRequest
from quire.serve.api.tokens import count_ids
from quire.serve.http.wire import json_response


async def messages(request: Request) -> Response:
    message, warnings = await read_request(request, MessagesRequest)
    chat, more = await server_of(request).engine.in_thread(client_of(request), chat_of, message)
    answer = MessageAnswer(await open_chat(request, chat, [*warnings, *more]))
    return await answer.send(request, bool(chat.stream))


async def count_tokens(request: Request) -> Response:
    """Count the tokens of the prompt that the same request to /v1/messages would have."""
    server = server_of(request)
    message, _ = await read_request(request, CountTokensRequest)
    server.check_model(message.model)

    def render() -> str:
        chat, _ = chat_of(message)
        use = tool_use(chat)
        template = server.templates.choose(chat.chat_template, bool(use.tools))
        return chat_prompt(server, chat, use.tools, template)

    client = client_of(request)
    text = await server.templates.in_thread(client, message.chat_template, render)
    ids = await server.counting.run(client, lambda: count_ids(server, text, False, "messages"))
    return json_response({"input_tokens": len(ids)})
