"""POST /tokenize and /detokenize: the model's tokenizer and chat template, for clients that count tokens."""

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

_MAX_COUNTED = 1 << 20  # bytes, or token ids: a second of work


def count_ids(server: ServerContext, text: str, add_special_tokens: bool, field: str) -> list[int]:
    """Tokenize a text that nobody generates from. Raises ApiError 400 if it is too long to be a prompt."""
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
    server = server_of(request)
    wanted, _ = await read_request(request, TokenizeRequest)
    server.check_model(wanted.model)
    if (wanted.prompt is None) == (wanted.messages is None):
        raise bad_request("give either prompt or messages", "prompt")
    client, text = client_of(request), wanted.prompt
    if text is None:
        render = partial(_render, server, wanted)
        text = await server.templates.in_thread(client, wanted.chat_template, render)
    return await server.counting.run(client, partial(_tokenize, server, wanted, text))


def _tokenize(server: ServerContext, wanted: TokenizeRequest, text: str) -> Response:
    engine = server.engine
    if wanted.prompt is not None:
        ids = count_ids(server, text, wanted.add_special_tokens is not False, "prompt")
    else:
        ids = count_ids(server, text, bool(wanted.add_special_tokens), "messages")
    pieces = [engine.tokenizer.token_text(token) for token in ids] if wanted.return_token_strs else None
    return json_response(TokenizeResponse(len(ids), engine.info.max_model_len, ids, pieces))


def _render(server: ServerContext, wanted: TokenizeRequest) -> str:
    continues = bool(wanted.continue_final_message)
    generation_prompt = wanted.add_generation_prompt
    return render_chat(
        server.templates.renderer(wanted.chat_template),
        server.engine.tokenizer,
        wanted.messages or [],
        wanted.tools,
        not continues if generation_prompt is None else generation_prompt,
        continues,
        wanted.chat_template_kwargs,
        chat_template=server.templates.choose(wanted.chat_template, bool(wanted.tools)),
    )


async def detokenize(request: Request) -> Response:
    server = server_of(request)
    wanted, _ = await read_request(request, DetokenizeRequest)
    server.check_model(wanted.model)
    return await server.counting.run(client_of(request), partial(_detokenize, server, wanted.tokens))


def _detokenize(server: ServerContext, tokens: list[int]) -> Response:
    engine = server.engine
    size = engine.info.vocab_size
    most = min(_MAX_COUNTED, max_chars_of(engine.tokenizer, engine.info.max_model_len))
    if len(tokens) > most:
        raise bad_request(f"tokens holds {len(tokens)} ids; at most {most} are converted here", "tokens")
    if tokens and not (min(tokens) >= 0 and max(tokens) < size):
        raise bad_request(f"tokens must be at least 0 and below the vocabulary size {size}", "tokens")
    return json_response({"prompt": engine.tokenizer.decode(tokens, False)})
