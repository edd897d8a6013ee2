"""POST /tokenize and /detokenize: the model's tokenizer and chat template for clients."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from quire.frontend.length import max_chars_of
from quire.frontend.templates.chat import render_chat
from quire.serve.api.context import ServerContext, client_of, read_request, server_of
from quire.serve.api.protocol.other import DetokenizeRequest, TokenizeRequest, TokenizeResponse
from quire.serve.http.errors import bad_request
from quire.serve.http.wire import json_response

_MAX_COUNTED = 1 << 20  # bytes or token ids; one second of work


def count_ids(server: ServerContext, text: str, add_special_tokens: bool, field: str) -> list[int]:
    """Tokenize a text without generating from it.

    Args:
        server: the server.
        text: a prompt.
        add_special_tokens: add the tokenizer's special tokens.
        field: the request field that errors name.

    Raises:
        ApiError: 400 if the text is too long for a prompt of the model, or for this route.
    """
    context = server.engine.info.max_model_len
    most = max_chars_of(server.engine.tokenizer, context)
    if len(text) > most:
        raise bad_request(
            f"{field} has {len(text)} characters of text; max_model_len ({context} tokens) holds at most {most}",
            field,
        )
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > _MAX_COUNTED:
        raise bad_request(
            f"{field} has {size} bytes of text; at most {_MAX_COUNTED} are tokenized here", field
        )
    return server.engine.tokenizer.encode(text, add_special_tokens)


async def tokenize(request: Request) -> Response:
    """Return the token ids of a text or of a conversation."""
    server = server_of(request)
    body, _ = await read_request(request, TokenizeRequest)
    server.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("set either prompt or messages, not both", "prompt")
    client, text = client_of(request), body.prompt
    if text is None:
        render = partial(_render, server, body)
        text = await server.templates.in_thread(client, body.chat_template, render)
    return await server.counting.run(client, partial(_tokenize, server, body, text))


def _tokenize(server: ServerContext, body: TokenizeRequest, text: str) -> Response:
    engine = server.engine
    if body.prompt is not None:
        ids = count_ids(server, text, body.add_special_tokens is not False, "prompt")
    else:
        ids = count_ids(server, text, bool(body.add_special_tokens), "messages")
    pieces = [engine.tokenizer.piece(token) for token in ids] if body.return_token_strs else None
    return json_response(TokenizeResponse(len(ids), engine.info.max_model_len, ids, pieces))


def _render(server: ServerContext, body: TokenizeRequest) -> str:
    continues = bool(body.continue_final_message)
    generation_prompt = body.add_generation_prompt
    return render_chat(
        server.templates.renderer(body.chat_template),
        server.engine.tokenizer,
        body.messages or [],
        body.tools,
        not continues if generation_prompt is None else generation_prompt,
        continues,
        body.chat_template_kwargs,
        chat_template=server.templates.choose(body.chat_template, bool(body.tools)),
    )


async def detokenize(request: Request) -> Response:
    """Return the text of token ids."""
    server = server_of(request)
    body, _ = await read_request(request, DetokenizeRequest)
    server.check_model(body.model)
    return await server.counting.run(client_of(request), partial(_detokenize, server, body.tokens))


def _detokenize(server: ServerContext, tokens: list[int]) -> Response:
    engine = server.engine
    size = engine.info.vocab_size
    most = min(_MAX_COUNTED, max_chars_of(engine.tokenizer, engine.info.max_model_len))
    if len(tokens) > most:
        raise bad_request(f"tokens holds {len(tokens)} ids; at most {most} are converted here", "tokens")
    if tokens and not (min(tokens) >= 0 and max(tokens) < size):
        raise bad_request(f"tokens must be at least 0 and below the vocabulary size {size}", "tokens")
    return json_response({"prompt": engine.tokenizer.decode(tokens, False)})
