"""POST /v1/embeddings: pooled hidden states of the served model.

Each input is an ordinary engine request that ends with its first token; the pooled states come with that token.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from quire.frontend.processor import Prompt
from quire.serve.api.context import client_of, label_of, read_request, server_of
from quire.serve.api.prompts import prompt_job, prompts_of
from quire.serve.api.protocol.embeddings import EmbeddingsRequest, EmbeddingsResponse, EmbeddingsUsage
from quire.serve.api.protocol.fields import RequestFields
from quire.serve.api.sampling_fields import MAX_CHOICES, check_request
from quire.serve.async_engine import PromptJob
from quire.serve.http.errors import bad_request
from quire.serve.http.stream import wait_until_finished
from quire.serve.http.wire import encode, json_response
from quire.types import Pooling, SamplingParams


async def embeddings(request: Request) -> Response:
    """Return a vector for each input."""
    server = server_of(request)
    body, warnings = await read_request(request, EmbeddingsRequest)
    model = server.check_model(body.model)
    check_request(body)
    prompts = prompts_of(body.input, "input")
    if len(prompts) > MAX_CHOICES:
        raise bad_request(f"input must hold at most {MAX_CHOICES} inputs, got {len(prompts)}", "input")
    if body.encoding_format not in (None, "float", "base64"):
        raise bad_request(
            f"encoding_format must be float or base64, got {body.encoding_format[:64]!r}", "encoding_format"
        )
    if body.dimensions is not None and body.dimensions < 1:
        raise bad_request(f"dimensions must be at least 1, got {body.dimensions}", "dimensions")
    pooling = pooling_of(body.pooling or server.pooling)
    pooled = await pool_prompts(request, body, len(prompts), lambda: prompts, pooling)
    data = await server.engine.in_thread(client_of(request), _encoded_data, pooled.states, body)
    usage = EmbeddingsUsage(pooled.prompt_tokens, pooled.prompt_tokens)
    return json_response(EmbeddingsResponse(data=data, model=model, usage=usage, warnings=warnings or UNSET))


@dataclass(frozen=True, slots=True)
class PooledPrompts:
    """The pooled hidden states of the prompts of a request, in their order: float32 [hidden] each."""

    states: list[bytes]
    prompt_tokens: int


async def pool_prompts(
    request: Request,
    body: RequestFields,
    count: int,
    make_prompts: Callable[[], Sequence[Prompt]],
    pooling: Pooling,
) -> PooledPrompts:
    """Compute the pooled hidden states of prompts.

    Args:
        request: the HTTP request.
        body: its decoded body.
        count: number of prompts.
        make_prompts: returns them; runs in a thread.
        pooling: how to pool.

    Raises:
        ApiError: 503 under overload, 504 after a timeout.
        RequestError: for a prompt that cannot be served.
    """
    server = server_of(request)
    params = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
    special = body.add_special_tokens is not False

    def jobs() -> list[PromptJob]:
        return [
            prompt_job(server, body, prompt, params, add_special_tokens=special, pooling=pooling)
            for prompt in make_prompts()
        ]

    generation = await server.engine.generate(
        client_of(request), count, jobs, 0, body.timeout, label_of(request)
    )
    await wait_until_finished(request, generation)
    return PooledPrompts([state.pooled or b"" for state in generation.states], generation.prompt_tokens)


def pooling_of(name: str) -> Pooling:
    """Return the pooling of this name. Raise ApiError 400 if there is none."""
    if name not in ("mean", "last"):
        raise bad_request(f"pooling must be mean or last, got {name[:64]!r}", "pooling")
    return "last" if name == "last" else "mean"


def _encoded_data(pooled: Sequence[bytes], body: EmbeddingsRequest) -> list[msgspec.Raw]:
    """Encode the embeddings. Runs in a thread, because each may hold thousands of numbers."""
    from quire.frontend.normalize import embedding  # imports numpy, which other routes do not need

    encoded = []
    for index, states in enumerate(pooled):
        try:
            vector = embedding(states, body.dimensions, body.normalize is not False)
        except ValueError as error:
            raise bad_request(str(error), "dimensions") from None
        as_text = body.encoding_format == "base64"
        values = base64.b64encode(vector.tobytes()).decode() if as_text else vector.tolist()
        encoded.append(msgspec.Raw(encode({"object": "embedding", "index": index, "embedding": values})))
    return encoded
