"""POST /generate and /v1/generate: one prompt in, one text out, in a handful of fields."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response

from quire.serve.api.chat import keep_last
from quire.serve.api.context import answer_id, client_of, length_field, read_request, server_of
from quire.serve.api.protocol.other import GenerateRequest, GenerateResponse
from quire.serve.api.sampling_fields import check_fields, sampling_params
from quire.serve.async_engine import PromptJob
from quire.serve.http.errors import bad_request
from quire.serve.http.stream import wait_until_finished
from quire.serve.http.wire import json_response
from quire.serve.observe.receipt import receipt_maker

_MAX_TOKENS = 16


async def generate(request: Request) -> Response:
    began = time.monotonic()
    server = server_of(request)
    wanted, warnings = await read_request(request, GenerateRequest)
    model = server.check_model(wanted.model)
    check_fields(wanted)
    if wanted.stream:
        raise bad_request("stream is not available here: use /v1/completions", "stream")
    if wanted.n not in (None, 1):
        raise bad_request("n must be 1 here: use /v1/completions", "n")
    engine = server.engine
    defaults = engine.processor.defaults
    max_tokens = wanted.max_new_tokens if wanted.max_tokens is None else wanted.max_tokens
    if max_tokens is None:
        max_tokens = defaults.get("max_tokens", _MAX_TOKENS)
    params = sampling_params(
        wanted, defaults, max_tokens, None, server.settings.max_logprobs, engine.info.vocab_size
    )
    client = client_of(request)
    field = length_field(wanted, "max_tokens", "max_new_tokens")
    job = PromptJob(
        wanted.prompt,
        params,
        wanted.priority or 0,
        wanted.cache_salt or "",
        wanted.add_special_tokens is not False,
        keep_last(server, wanted.truncate_prompt_tokens, params.max_tokens if field else None),
        length_field=field,
    )
    generation = await engine.generate(client, 1, lambda: [job], False, wanted.timeout)
    await wait_until_finished(request, generation)
    answer = generation.states[0].output().outputs[0]
    return json_response(
        GenerateResponse(
            request_id=answer_id("gen", wanted.request_id),
            text=answer.text,
            generated_tokens=len(answer.token_ids),
            latency_ms=round((time.monotonic() - began) * 1000, 3),
            finish_reason=answer.finish_reason or "stop",
            model=model,
            warnings=warnings or None,
            receipt=receipt_maker(request, wanted, generation)(),
        )
    )
