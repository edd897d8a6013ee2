"""POST /api/chat, /api/generate, /api/embed and /api/embeddings, for clients of Ollama's API."""

from __future__ import annotations

import time
from collections.abc import Sequence

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from quire.frontend.length import first_tokens
from quire.frontend.processor import Prompt
from quire.serve.answer.reasoning_formats import choose_reasoning
from quire.serve.api.context import ServerContext, client_of, read_request, server_of
from quire.serve.api.conversation import open_chat, open_text
from quire.serve.api.embeddings import pool_prompts, pooling_of
from quire.serve.api.ollama.answer import OllamaChatAnswer, OllamaGenerateAnswer, nanoseconds, now
from quire.serve.api.ollama.input import chat_of, chat_of_prompt, check_context
from quire.serve.api.ollama.names import served_name, tagged
from quire.serve.api.protocol.chat import ChatRequest
from quire.serve.api.protocol.ollama import (
    OllamaChatRequest,
    OllamaChatResponse,
    OllamaEmbeddingsRequest,
    OllamaEmbeddingsResponse,
    OllamaEmbedRequest,
    OllamaEmbedResponse,
    OllamaGenerateRequest,
    OllamaGenerateResponse,
    OllamaMessage,
    OllamaRequest,
    OllamaTextRequest,
)
from quire.serve.api.sampling_fields import MAX_CHOICES, check_request
from quire.serve.http.errors import bad_request
from quire.serve.http.wire import encode, json_response
from quire.types import RequestError

_LOADED = "load"  # done_reason of the answer to a request without a prompt


async def ollama_chat(request: Request) -> Response:
    """Answer a conversation. The answer is streamed as JSON lines unless `stream` is false."""
    server = server_of(request)
    body, warnings = await read_request(request, OllamaChatRequest)
    model = _resolve_model(server, body)
    if not body.messages:
        message = OllamaMessage()
        return json_response(
            OllamaChatResponse(model=model, created_at=now(), message=message, done=True, done_reason=_LOADED)
        )
    in_thread = server.engine.in_thread
    chat, more = await in_thread(client_of(request), chat_of, body, server.engine.info.max_model_len)
    _check_thinking(server, body, chat)
    opened = await open_chat(request, chat, [*warnings, *more])
    return await OllamaChatAnswer(opened, model, request.scope["arrival_s"]).send(request, bool(chat.stream))


async def ollama_generate(request: Request) -> Response:
    """Answer a prompt, or continue it unchanged with `raw`. Streamed as JSON lines unless `stream` is false."""
    server = server_of(request)
    body, warnings = await read_request(request, OllamaGenerateRequest)
    model, info = _resolve_model(server, body), server.engine.info
    if not body.prompt:
        return json_response(
            OllamaGenerateResponse(model=model, created_at=now(), response="", done=True, done_reason=_LOADED)
        )
    chat, more = chat_of_prompt(body, body.prompt, info.max_model_len)
    context = body.context or []
    check_context(context, info.vocab_size)
    warnings += more
    if body.raw or _lacks_template(server, body):
        opened = await open_text(request, chat, body.prompt, warnings, context)
    else:
        _check_thinking(server, body, chat)
        opened = await open_chat(request, chat, warnings, context=context)
    answer = OllamaGenerateAnswer(opened, model, request.scope["arrival_s"], not body.raw)
    return await answer.send(request, bool(chat.stream))


def _lacks_template(server: ServerContext, body: OllamaGenerateRequest) -> bool:
    """Return whether neither model nor request has a template, and the request needs none."""
    if body.system or body.template:
        return False
    try:
        server.templates.choose(None, with_tools=False)
    except RequestError:
        return True
    return False


def _resolve_model(server: ServerContext, body: OllamaRequest) -> str:
    """Set the body's model to its served name; return the name for the answer, which is the client's."""
    given, body.model = body.model, served_name(server, body.model)
    return given or tagged(body.model)


def _check_thinking(server: ServerContext, body: OllamaTextRequest, chat: ChatRequest) -> None:
    """Raise ApiError 400 if a request wants reasoning of a model whose chat template has none."""
    if not body.think:
        return
    template = server.templates.choose(chat.chat_template, bool(chat.tools))
    if choose_reasoning(server.forms.reasoning_parser, template) is None:
        raise bad_request(f'think: "{server.names[0]}" does not support thinking; set it to false', "think")


# ------------------------------------------------------------------------------------ embeddings


async def ollama_embed(request: Request) -> Response:
    """Return an embedding of length 1 for each input, which is cut to what fits unless `truncate` is false."""
    server = server_of(request)
    body, warnings = await read_request(request, OllamaEmbedRequest)
    model = _resolve_model(server, body)
    texts = [body.input] if isinstance(body.input, str) and body.input else list(body.input)
    if len(texts) > MAX_CHOICES:
        raise bad_request(f"input must hold at most {MAX_CHOICES} texts, got {len(texts)}", "input")
    if body.dimensions is not None and body.dimensions < 1:
        raise bad_request(f"dimensions must be at least 1, got {body.dimensions}", "dimensions")
    vectors, count = await _embed(request, body, texts, body.truncate is not False, body.dimensions)
    answer = OllamaEmbedResponse(
        model=model,
        embeddings=vectors,
        total_duration=nanoseconds(time.monotonic() - request.scope["arrival_s"]),
        prompt_eval_count=count,
        warnings=warnings or UNSET,
    )
    encoded = await server.engine.in_thread(client_of(request), encode, answer)
    return Response(encoded, media_type="application/json")


async def ollama_embeddings(request: Request) -> Response:
    """Return the embedding of one prompt with its own length: the older form of /api/embed."""
    server = server_of(request)
    body, warnings = await read_request(request, OllamaEmbeddingsRequest)
    _resolve_model(server, body)
    texts = [body.prompt] if body.prompt else []
    vectors, _ = await _embed(request, body, texts, True, normalize=False)
    return json_response(
        OllamaEmbeddingsResponse(embedding=vectors[0] if vectors else [], warnings=warnings or UNSET)
    )


async def _embed(
    request: Request,
    body: OllamaRequest,
    texts: Sequence[str],
    truncate: bool,
    dimensions: int | None = None,
    normalize: bool = True,
) -> tuple[list[list[float]], int]:
    """Return the embeddings of `texts` and their number of tokens. No text, no embedding, as in Ollama's API."""
    server = server_of(request)
    check_request(body)
    if not texts:
        return [], 0

    def prompts() -> list[Prompt]:
        if not truncate:
            return list(texts)
        tokenizer, most = server.engine.tokenizer, server.engine.info.max_model_len - 1
        special = body.add_special_tokens is not False
        return [first_tokens(tokenizer, text, most, special) for text in texts]

    pooled = await pool_prompts(request, body, len(texts), prompts, pooling_of(server.pooling))

    def vectors() -> list[list[float]]:
        from quire.frontend.normalize import embedding  # imports numpy, which other routes do not need

        try:
            return [embedding(states, dimensions, normalize).tolist() for states in pooled.states]
        except ValueError as error:
            raise bad_request(str(error), "dimensions") from None

    return await server.engine.in_thread(client_of(request), vectors), pooled.prompt_tokens
