"""The ASGI application: the table of routes and the layers around them."""

from __future__ import annotations

from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from quire.serve.api.anthropic.routes import count_tokens, messages
from quire.serve.api.chat import chat_completions
from quire.serve.api.completions import completions
from quire.serve.api.context import ServerContext
from quire.serve.api.embeddings import embeddings
from quire.serve.api.generate import generate
from quire.serve.api.ollama.about import ollama_ps, ollama_pull, ollama_show, ollama_tags, ollama_version
from quire.serve.api.ollama.routes import ollama_chat, ollama_embed, ollama_embeddings, ollama_generate
from quire.serve.api.responses import conversations
from quire.serve.api.responses.routes import (
    cancel_response,
    count_input_tokens,
    create_response,
    delete_response,
    get_response,
    list_input_items,
)
from quire.serve.api.system import health, model, models, stats, version
from quire.serve.api.tokens import detokenize, tokenize
from quire.serve.http.auth import ApiKeys
from quire.serve.http.errors import ApiError, as_api_error, with_client_field
from quire.serve.http.guard import make_guard
from quire.serve.http.middleware import RequestMiddleware
from quire.serve.http.openapi import openapi
from quire.serve.http.page import page_routes
from quire.serve.http.wire import error_response
from quire.serve.observe.live import live_events
from quire.serve.observe.metrics import metrics
from quire.types import QuireError


def routes() -> list[Route]:
    """Return the routes of the APIs, without the web page."""
    post, get, delete = ["POST"], ["GET"], ["DELETE"]
    one = "/v1/conversations/{conversation_id}"
    return [
        Route("/v1/chat/completions", chat_completions, methods=post),
        Route("/v1/completions", completions, methods=post),
        Route("/v1/messages", messages, methods=post),
        Route("/v1/messages/count_tokens", count_tokens, methods=post),
        Route("/v1/responses", create_response, methods=post),
        Route("/v1/responses/input_tokens", count_input_tokens, methods=post),
        Route("/v1/responses/{response_id}", get_response, methods=get),
        Route("/v1/responses/{response_id}", delete_response, methods=delete),
        Route("/v1/responses/{response_id}/cancel", cancel_response, methods=post),
        Route("/v1/responses/{response_id}/input_items", list_input_items, methods=get),
        Route("/v1/conversations", conversations.create_conversation, methods=post),
        Route(one, conversations.get_conversation, methods=get),
        Route(one, conversations.update_conversation, methods=post),
        Route(one, conversations.delete_conversation, methods=delete),
        Route(f"{one}/items", conversations.list_items, methods=get),
        Route(f"{one}/items", conversations.add_items, methods=post),
        Route(f"{one}/items/{{item_id}}", conversations.get_item, methods=get),
        Route(f"{one}/items/{{item_id}}", conversations.delete_item, methods=delete),
        Route("/v1/embeddings", embeddings, methods=post),
        Route("/v1/generate", generate, methods=post),
        Route("/generate", generate, methods=post),
        Route("/v1/models", models, methods=get),
        Route("/v1/models/{name:path}", model, methods=get),
        Route("/api/chat", ollama_chat, methods=post),
        Route("/api/generate", ollama_generate, methods=post),
        Route("/api/embed", ollama_embed, methods=post),
        Route("/api/embeddings", ollama_embeddings, methods=post),
        Route("/api/tags", ollama_tags, methods=get),
        Route("/api/show", ollama_show, methods=post),
        Route("/api/ps", ollama_ps, methods=get),
        Route("/api/version", ollama_version, methods=get),
        Route("/api/pull", ollama_pull, methods=post),
        Route("/tokenize", tokenize, methods=post),
        Route("/detokenize", detokenize, methods=post),
        Route("/health", health, methods=get),
        Route("/healthz", health, methods=get),
        Route("/ping", health, methods=[*get, *post]),
        Route("/version", version, methods=get),
        Route("/stats", stats, methods=get),
        Route("/metrics", metrics, methods=get),
        Route("/openapi.json", openapi, methods=get),
    ]


def build_app(server: ServerContext, keys: ApiKeys) -> ASGIApp:
    """Build the application: routes, error handlers, request middleware and, if origins are allowed, CORS."""
    handlers: dict[Any, Any] = {HTTPException: _http_error, ApiError: _error, QuireError: _error, 500: _error}
    settings = server.settings
    page = (
        [*page_routes(len(keys) > 0), Route("/live/events", live_events, include_in_schema=False)]
        if settings.page
        else []
    )
    app = Starlette(routes=[*routes(), *page], exception_handlers=handlers)
    app.state.server = server
    front: ASGIApp = RequestMiddleware(
        app,
        make_guard(settings, len(keys) > 0),
        keys,
        (server.http, server.bodies, *server.observers),
        settings.dry_run,
    )
    if settings.allowed_origins:
        front = CORSMiddleware(
            front,
            allow_origins=settings.allowed_origins,
            allow_methods=settings.allowed_methods or ["*"],
            allow_headers=settings.allowed_headers or ["*"],
            allow_credentials=settings.allow_credentials,
            expose_headers=["x-request-id", "request-id", "retry-after"],
        )
    return front


async def _error(request: Request, error: Exception) -> Response:
    found = as_api_error(error)
    if found.status == 400:
        found = with_client_field(found, request.scope.get("api_request"))
    return error_response(found, request.scope)


async def _http_error(request: Request, error: Exception) -> Response:
    """Answer an error that Starlette raises: an unknown route, or a wrong method."""
    assert isinstance(error, HTTPException)
    message = {
        404: f"no route for {request.method} {request.url.path[:128]}; GET /openapi.json lists the routes",
        405: f"{request.url.path[:128]} does not accept {request.method}",
    }.get(error.status_code, error.detail)
    found = ApiError(error.status_code, message, headers=dict(error.headers or {}))
    return error_response(found, request.scope)
