"""POST /v1/messages and /v1/messages/count_tokens, for clients of Anthropic's API."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from quire.serve.api.anthropic.answer import MessageAnswer
from quire.serve.api.anthropic.input import chat_of
from quire.serve.api.context import client_of, read_request, server_of
from quire.serve.api.conversation import count_prompt, open_chat
from quire.serve.api.protocol.messages import CountTokensRequest, MessagesRequest
from quire.serve.http.wire import json_response


async def messages(request: Request) -> Response:
    """Answer a conversation in the form of Anthropic's messages, whole or as a stream of events."""
    message, warnings = await read_request(request, MessagesRequest)
    chat, more = await server_of(request).engine.in_thread(client_of(request), chat_of, message)
    answer = MessageAnswer(await open_chat(request, chat, [*warnings, *more]))
    return await answer.send(request, bool(chat.stream))


async def count_tokens(request: Request) -> Response:
    """Count the tokens of the prompt that the same request to /v1/messages would have."""
    message, _ = await read_request(request, CountTokensRequest)
    return json_response({"input_tokens": await count_prompt(request, message, lambda: chat_of(message)[0])})
