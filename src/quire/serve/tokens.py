"""POST /tokenize and /detokenize: the model's tokenizer and chat template, for clients that count tokens."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from quire.frontend.chat import render_chat
from quire.serve.context import Server, client_of, read_request, server_of
from quire.serve.errors import bad_request
from quire.serve.protocol.other import DetokenizeRequest, TokenizeRequest, TokenizeResponse
from quire.serve.wire import json_response


async def tokenize(request: Request) -> Response:
    server = server_of(request)
    wanted, _ = await read_request(request, TokenizeRequest)
    server.check_model(wanted.model)
    if (wanted.prompt is None) == (wanted.messages is None):
        raise bad_request("give either prompt or messages", "prompt")
    return json_response(await server.engine.in_thread(client_of(request), _tokenize, server, wanted))


def _tokenize(server: Server, wanted: TokenizeRequest) -> TokenizeResponse:
    ids = _encode(server, wanted)
    pieces = (
        [server.engine.tokenizer.token_text(token) for token in ids] if wanted.return_token_strs else None
    )
    return TokenizeResponse(len(ids), server.engine.info.max_model_len, ids, pieces)


def _encode(server: Server, wanted: TokenizeRequest) -> list[int]:
    tokenizer = server.engine.tokenizer
    if wanted.prompt is not None:
        return tokenizer.encode(wanted.prompt, wanted.add_special_tokens is not False)
    continues = bool(wanted.continue_final_message)
    generation_prompt = wanted.add_generation_prompt
    text = render_chat(
        tokenizer,
        wanted.messages or [],
        wanted.tools,
        not continues if generation_prompt is None else generation_prompt,
        continues,
        wanted.chat_template_kwargs,
        chat_template=wanted.chat_template or server.chat_template,
    )
    return tokenizer.encode(text, bool(wanted.add_special_tokens))


async def detokenize(request: Request) -> Response:
    server = server_of(request)
    wanted, _ = await read_request(request, DetokenizeRequest)
    server.check_model(wanted.model)
    if len(wanted.tokens) > (most := server.engine.info.max_model_len):
        raise bad_request(
            f"tokens must hold at most {most} (max_model_len), got {len(wanted.tokens)}", "tokens"
        )
    return json_response(
        {"prompt": await server.engine.in_thread(client_of(request), _decode, server, wanted.tokens)}
    )


def _decode(server: Server, tokens: list[int]) -> str:
    size = server.engine.info.vocab_size
    if tokens and not (min(tokens) >= 0 and max(tokens) < size):
        raise bad_request(f"tokens must be at least 0 and below the vocabulary size {size}", "tokens")
    return server.engine.tokenizer.decode(tokens, False)
