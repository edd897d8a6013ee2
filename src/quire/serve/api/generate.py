"""POST /generate and /v1/generate: one prompt, one text, few fields."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response

from quire.serve.api.context import answer_id, client_of, label_of, read_request, server_of
from quire.serve.api.prompts import length_field, prompt_job
from quire.serve.api.protocol.other import GenerateRequest, GenerateResponse
from quire.serve.api.sampling_fields import check_fields, sampling_params
from quire.serve.http.errors import bad_request
from quire.serve.http.stream import wait_until_finished
from quire.serve.http.wire import json_response
from quire.serve.observe.receipt import receipt_maker

_MAX_TOKENS = 16


async def generate(request: Request) -> Response:
    """Continue one prompt and return one text, with few fields and without a stream."""
    started_s = time.monotonic()
    server = server_of(request)
    body, warnings = await read_request(request, GenerateRequest)
    model = server.check_model(body.model)
    check_fields(body)
    if body.stream:
        raise bad_request("stream is not available on this route: use /v1/completions", "stream")
    if body.n not in (None, 1):
        raise bad_request(f"n must be 1 on this route, got {body.n}: use /v1/completions", "n")
    engine = server.engine
    defaults = engine.processor.defaults
    max_tokens = body.max_new_tokens if body.max_tokens is None else body.max_tokens
    if max_tokens is None:
        max_tokens = defaults.get("max_tokens", _MAX_TOKENS)
    params = sampling_params(
        body, defaults, max_tokens, None, server.settings.max_logprobs, engine.info.vocab_size
    )
    client = client_of(request)
    job = prompt_job(
        server,
        body,
        body.prompt,
        params,
        add_special_tokens=body.add_special_tokens is not False,
        length_field=length_field(body, "max_tokens", "max_new_tokens"),
    )
    generation = await engine.generate(client, 1, lambda: [job], 0, body.timeout, label_of(request))
    warnings += generation.warnings
    await wait_until_finished(request, generation)
    answer = generation.states[0].output().outputs[0]
    return json_response(
        GenerateResponse(
            request_id=answer_id("gen", body.request_id),
            text=answer.text,
            generated_tokens=len(answer.token_ids),
            latency_ms=round((time.monotonic() - started_s) * 1000, 3),
            finish_reason=answer.finish_reason or "stop",
            model=model,
            warnings=warnings or None,
            receipt=receipt_maker(request, body, generation)(),
        )
    )
