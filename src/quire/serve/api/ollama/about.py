"""GET /api/tags, /api/ps and /api/version, POST /api/show and /api/pull: the served model, and others to download."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from quire import __version__
from quire.frontend.model_card import ModelCard, read_model_card
from quire.serve.answer.reasoning_formats import choose_reasoning
from quire.serve.api.context import ServerContext, client_of, read_request, server_of
from quire.serve.api.ollama.answer import NDJSON
from quire.serve.api.ollama.names import served_name, tagged
from quire.serve.api.ollama.pull import ModelPull, hub_name
from quire.serve.api.protocol.ollama import OllamaModelRequest, OllamaPullRequest
from quire.serve.http.errors import ApiError, bad_request
from quire.serve.http.stream import json_line
from quire.serve.http.wire import json_response
from quire.types import ModelError, RequestError

# The version of Ollama whose API this is: some clients refuse to work with older ones.
API_VERSION = "0.12.6"
_FOREVER = timedelta(days=36525)  # a model stays loaded as long as the server runs


async def ollama_version(request: Request) -> Response:
    """Return the version of Ollama whose API this is, and Quire's own."""
    return json_response({"version": API_VERSION, "quire_version": __version__})


async def ollama_tags(request: Request) -> Response:
    """List the names of the served model."""
    server = server_of(request)
    card = await _card(request)
    models = [
        {**_entry(server, card, name), "modified_at": _time(card.modified_s), "size": card.size_bytes}
        for name in server.names
    ]
    return json_response({"models": models})


async def ollama_ps(request: Request) -> Response:
    """List the loaded model, with the memory that its weights and its KV cache take."""
    server, info = server_of(request), server_of(request).engine.info
    card = await _card(request)
    states = (info.max_num_seqs * info.states_per_request + info.num_snapshots) * info.state_bytes
    weights = info.weight_bytes + info.draft_weight_bytes
    size = weights + info.num_blocks * info.block_bytes + states + info.reserved_bytes
    more = {
        "expires_at": (datetime.fromtimestamp(server.started_s, UTC) + _FOREVER).isoformat(
            timespec="seconds"
        ),
        "size": size,
        "size_vram": size if info.device.startswith("cuda") else 0,
        "context_length": info.max_model_len,
    }
    return json_response({"models": [{**_entry(server, card, server.names[0]), **more}]})


async def ollama_show(request: Request) -> Response:
    """Describe the served model: its template, default parameters, capabilities and configuration."""
    server = server_of(request)
    body, _ = await read_request(request, OllamaModelRequest)
    name = served_name(server, body.model if body.model is not None else body.name)
    card = await _card(request)
    template = _template(server)
    parameters = [f"{key} {value}" for key, value in _defaults(server).items()]
    info = server.engine.info
    facts = {
        **card.facts,
        "general.parameter_count": info.num_parameters,
        f"{card.architecture}.context_length": info.max_model_len,
    }
    return json_response(
        {
            "modelfile": "\n".join([f"FROM {tagged(name)}", *(f"PARAMETER {line}" for line in parameters)]),
            "parameters": "\n".join(parameters),
            "template": template,
            "details": _details(server, card),
            "model_info": facts,
            "capabilities": _capabilities(server, template),
            "modified_at": _time(card.modified_s),
        }
    )


async def _card(request: Request) -> ModelCard:
    """Return the description of the model's files, which are read for the first request only."""
    server = server_of(request)
    if server.card is None:
        server.card = await server.engine.in_thread(client_of(request), read_model_card, server.files)
    return server.card


def _entry(server: ServerContext, card: ModelCard, name: str) -> dict[str, Any]:
    named = tagged(name)
    return {"name": named, "model": named, "digest": card.digest, "details": _details(server, card)}


def _details(server: ServerContext, card: ModelCard) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": card.format,
        "family": card.architecture,
        "families": [card.architecture],
        "parameter_size": _short(server.engine.info.num_parameters),
        "quantization_level": card.quantization,
    }


def _short(count: int) -> str:
    """Return a number of parameters as people write it, such as 1.2B."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= size:
            return f"{count / size:.1f}{letter}"
    return str(count)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _template(server: ServerContext) -> str:
    """Return the chat template in use; an empty string if the model has none."""
    try:
        return server.templates.choose(None, with_tools=False)
    except RequestError:
        return ""


def _defaults(server: ServerContext) -> dict[str, Any]:
    """Return the model's default options by Ollama's names."""
    names = {"repetition_penalty": "repeat_penalty", "max_tokens": "num_predict"}
    return {names.get(name, name): value for name, value in server.engine.processor.defaults.items()}


def _capabilities(server: ServerContext, template: str) -> list[str]:
    """Return what clients may use the model for.

    As in Ollama's API `embedding` marks models that do nothing else, although every model gives embeddings.
    """
    if not server.engine.info.generates:
        return ["embedding"]
    found = ["completion"]
    if "tools" in template and server.settings.tool_call_parser != "none":
        found.append("tools")
    if choose_reasoning(server.forms.reasoning_parser, template) is not None:
        found.append("thinking")
    return found


# ------------------------------------------------------------------------------------------ pull


async def ollama_pull(request: Request) -> Response:
    """Download a model into the Hugging Face cache, if the server runs with --allow-pull. It is not served then.

    Progress is streamed as JSON lines unless `stream` is false.
    """
    server = server_of(request)
    body, _ = await read_request(request, OllamaPullRequest)
    if not server.settings.allow_pull:
        raise ApiError(
            403,
            "pulling models over the API is off: start the server with --allow-pull, or download the model on its "
            "machine",
            code="forbidden",
        )
    name = body.model if body.model is not None else body.name
    if not name:
        raise bad_request("model is missing: name a Hugging Face id, such as Qwen/Qwen3-0.6B", "model")
    pull = server.pulls.start(hub_name(name))
    lines = _lines(pull)
    if body.stream is not False:
        return StreamingResponse((json_line(line) async for line in lines), media_type=NDJSON)
    last: dict[str, Any] = {}
    async for line in lines:
        last = line
    if "error" in last:
        raise ApiError(404, last["error"], "model")
    return json_response(last)


async def _lines(pull: ModelPull) -> AsyncIterator[dict[str, Any]]:
    """Yield the objects that report a pull. The last one says that it succeeded, or why not."""
    try:
        yield {"status": "pulling manifest"}
        async for progress in pull.progress():
            yield {"status": "downloading", "total": progress.total, "completed": progress.completed}
        yield {"status": "success"}
    except ModelError as error:
        yield {"error": str(error)}
    finally:
        pull.cancel()
