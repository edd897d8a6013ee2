"""GET /openapi.json: the OpenAPI description, generated from the routes and the request and response Structs.

A field's schema comes from its type and from field_limits.py. Requests may be refused with 400 for other reasons too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire import __version__
from quire.serve.api.protocol.chat import ChatRequest, ChatResponse
from quire.serve.api.protocol.completions import CompletionRequest, CompletionResponse
from quire.serve.api.protocol.embeddings import EmbeddingsRequest, EmbeddingsResponse
from quire.serve.api.protocol.messages import CountTokensRequest, MessagesRequest, MessagesResponse
from quire.serve.api.protocol.ollama import (
    OllamaChatRequest,
    OllamaChatResponse,
    OllamaEmbeddingsRequest,
    OllamaEmbeddingsResponse,
    OllamaEmbedRequest,
    OllamaEmbedResponse,
    OllamaGenerateRequest,
    OllamaGenerateResponse,
    OllamaModelRequest,
    OllamaPullRequest,
)
from quire.serve.api.protocol.other import (
    DetokenizeRequest,
    GenerateRequest,
    GenerateResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from quire.serve.api.protocol.responses import (
    ConversationItems,
    ConversationObject,
    ConversationRequest,
    ConversationUpdate,
    InputTokensRequest,
    ItemList,
    ResponseObject,
    ResponsesRequest,
)
from quire.serve.http.field_limits import narrow
from quire.serve.http.wire import encode

# Request and response types by route; None if the response is not a Struct.
BODIES: dict[str, tuple[type[msgspec.Struct], type[msgspec.Struct] | None]] = {
    "/v1/chat/completions": (ChatRequest, ChatResponse),
    "/v1/completions": (CompletionRequest, CompletionResponse),
    "/v1/messages": (MessagesRequest, MessagesResponse),
    "/v1/messages/count_tokens": (CountTokensRequest, None),
    "/v1/responses": (ResponsesRequest, ResponseObject),
    "/v1/responses/input_tokens": (InputTokensRequest, None),
    "/v1/conversations": (ConversationRequest, ConversationObject),
    "/v1/conversations/{conversation_id}": (ConversationUpdate, ConversationObject),
    "/v1/conversations/{conversation_id}/items": (ConversationItems, ItemList),
    "/v1/embeddings": (EmbeddingsRequest, EmbeddingsResponse),
    "/v1/generate": (GenerateRequest, GenerateResponse),
    "/generate": (GenerateRequest, GenerateResponse),
    "/api/chat": (OllamaChatRequest, OllamaChatResponse),
    "/api/generate": (OllamaGenerateRequest, OllamaGenerateResponse),
    "/api/embed": (OllamaEmbedRequest, OllamaEmbedResponse),
    "/api/embeddings": (OllamaEmbeddingsRequest, OllamaEmbeddingsResponse),
    "/api/show": (OllamaModelRequest, None),
    "/api/pull": (OllamaPullRequest, None),
    "/tokenize": (TokenizeRequest, TokenizeResponse),
    "/detokenize": (DetokenizeRequest, None),
}
_EVENTS, _LINES = "text/event-stream", "application/x-ndjson"
# Media types of streams by route.
_STREAMED = {
    **dict.fromkeys(("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"), _EVENTS),
    **dict.fromkeys(("/api/chat", "/api/generate", "/api/pull"), _LINES),
}
_NOT_JSON = {"/metrics": "text/plain"}
_REF = "#/components/schemas/{name}"
_ERROR = {
    "description": "An error. Its message names the field and the limit; 503 has a Retry-After header.",
    "content": {"application/json": {"schema": {"type": "object", "required": ["error"]}}},
}


async def openapi(request: Request) -> Response:
    """Return the OpenAPI description of this server."""
    state = request.app.state
    if not hasattr(state, "openapi"):  # built for the first request
        state.openapi = encode(describe([r for r in request.app.routes if isinstance(r, Route)]))
    return Response(state.openapi, media_type="application/json")


def describe(routes: Sequence[Route]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 description of the routes whose `include_in_schema` is true."""
    structs = list(dict.fromkeys(struct for pair in BODIES.values() for struct in pair if struct is not None))
    schemas, components = msgspec.json.schema_components(structs, ref_template=_REF)
    narrow(components)
    named = dict(zip(structs, schemas))
    paths: dict[str, Any] = {}
    for route in routes:
        if not route.include_in_schema:
            continue
        path = re.sub(r"{(\w+):\w+}", r"{\1}", route.path)
        operations = paths.setdefault(path, {})
        for method in sorted((route.methods or set()) - {"HEAD"}):
            operations[method.lower()] = _operation(route, method, named)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Quire", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(route: Route, method: str, named: dict[type[msgspec.Struct], Any]) -> dict[str, Any]:
    reads, answers = BODIES.get(route.path, (None, None))
    reads = reads if method == "POST" else None
    answers = answers if method != "DELETE" else None
    schema = {"type": "object"} if answers is None else named[answers]
    kind = _NOT_JSON.get(route.path, "application/json")
    content: dict[str, Any] = {kind: {"schema": schema} if kind == "application/json" else {}}
    if route.path in _STREAMED:
        content[_STREAMED[route.path]] = {}
    text = (route.endpoint.__doc__ or "").strip().split("\n\n")[0]
    operation: dict[str, Any] = {
        "operationId": f"{method.lower()}{route.path}",
        "description": " ".join(text.split()),
        "responses": {"200": {"description": "Success.", "content": content}, "4XX": _ERROR, "5XX": _ERROR},
    }
    if names := re.findall(r"{(\w+)(?::\w+)?}", route.path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if reads is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": named[reads]}},
        }
    return operation
