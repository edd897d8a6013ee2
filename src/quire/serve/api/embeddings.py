"""POST /v1/embeddings: pooled hidden states of the served model. Each input is a request like any other, which ends
with its first token; what it is for comes with that token."""

from __future__ import annotations

import base64
from collections.abc import Sequence

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from quire.serve.api.chat import keep_last
from quire.serve.api.completions import prompts_of
from quire.serve.api.context import client_of, read_request, server_of
from quire.serve.api.protocol.embeddings import EmbeddingsRequest, EmbeddingsResponse, EmbeddingsUsage
from quire.serve.api.sampling_fields import MAX_CHOICES, check_request
from quire.serve.async_engine import PromptJob
from quire.serve.http.errors import bad_request
from quire.serve.http.stream import wait_until_finished
from quire.serve.http.wire import encode, json_response
from quire.types import Pooling, SamplingParams


async def embeddings(request: Request) -> Response:
    server = server_of(request)
    wanted, warnings = await read_request(request, EmbeddingsRequest)
    model = server.check_model(wanted.model)
    check_request(wanted)
    prompts = prompts_of(wanted.input, "input")
    if len(prompts) > MAX_CHOICES:
        raise bad_request(f"input must hold at most {MAX_CHOICES} inputs, got {len(prompts)}", "input")
    if wanted.encoding_format not in (None, "float", "base64"):
        raise bad_request("encoding_format must be float or base64", "encoding_format")
    if wanted.dimensions is not None and wanted.dimensions < 1:
        raise bad_request(f"dimensions must be at least 1, got {wanted.dimensions}", "dimensions")
    params = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
    options = (
        params,
        wanted.priority or 0,
        wanted.cache_salt or "",
        wanted.add_special_tokens is not False,
        keep_last(server, wanted.truncate_prompt_tokens),
    )
    pooling = _pooling(wanted.pooling or server.pooling)
    generation = await server.engine.generate(
        client_of(request),
        len(prompts),
        lambda: [PromptJob(prompt, *options, pooling=pooling) for prompt in prompts],
        False,
        wanted.timeout,
    )
    await wait_until_finished(request, generation)
    pooled = [state.pooled or b"" for state in generation.states]
    data = await server.engine.in_thread(client_of(request), _data, pooled, wanted)
    usage = EmbeddingsUsage(generation.prompt_tokens, generation.prompt_tokens)
    return json_response(EmbeddingsResponse(data=data, model=model, usage=usage, warnings=warnings or UNSET))


def _pooling(name: str) -> Pooling:
    if name not in ("mean", "last"):
        raise bad_request(f"pooling must be mean or last, got {name[:64]!r}", "pooling")
    return "last" if name == "last" else "mean"


def _data(pooled: Sequence[bytes], wanted: EmbeddingsRequest) -> list[msgspec.Raw]:
    """In a thread, one by one: thousands of numbers each take their time to write."""
    from quire.frontend.normalize import embedding  # numpy, which nothing else here needs

    found = []
    for index, states in enumerate(pooled):
        try:
            vector = embedding(states, wanted.dimensions, wanted.normalize is not False)
        except ValueError as error:
            raise bad_request(str(error), "dimensions") from None
        as_text = wanted.encoding_format == "base64"
        values = base64.b64encode(vector.tobytes()).decode() if as_text else vector.tolist()
        found.append(msgspec.Raw(encode({"object": "embedding", "index": index, "embedding": values})))
    return found
