"""The state that routes share, and the steps that open every route: read the body, find the client."""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar, cast

import msgspec
from starlette.requests import Request

from quire import __version__
from quire.frontend.location import ModelFiles
from quire.frontend.model_card import ModelCard
from quire.serve.answer.form import AnswerForms
from quire.serve.api.ollama.pull import ModelPulls
from quire.serve.api.protocol.fields import RequestFields, SamplingFields
from quire.serve.api.protocol.messages import CountTokensRequest
from quire.serve.api.protocol.other import GenerateRequest
from quire.serve.api.protocol.responses import InputTokensRequest
from quire.serve.api.responses.store import ResponseStore
from quire.serve.api.templates import ChatTemplates
from quire.serve.async_engine import AsyncEngine
from quire.serve.client_threads import ClientThreads
from quire.serve.http.auth import ANYONE, ApiClient
from quire.serve.http.body import BodyReader
from quire.serve.http.errors import ApiError
from quire.serve.http.wire import decode_object, parse
from quire.serve.observe.line_writer import STDOUT, LineWriter
from quire.serve.observe.live_view import LiveViews
from quire.serve.observe.logs import tell
from quire.serve.observe.observer import HttpCounts, Observer
from quire.serve.settings import ServeConfig

T = TypeVar("T", bound=msgspec.Struct)
R = TypeVar("R")
MAX_COUNTING = 64  # waiting calls of one client
_NO_EFFECT = ("verbosity", "vllm_xargs")
_CHOICE_FIELDS = ("prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids")
# Requests whose answers have no place for those.
_WITHOUT_CHOICES = (CountTokensRequest, GenerateRequest, InputTokensRequest)


@dataclass(slots=True)
class ServerContext:
    """The parts of a server that its routes use."""

    engine: AsyncEngine
    settings: ServeConfig
    names: list[str]  # of the model; answers use the first
    forms: AnswerForms
    templates: ChatTemplates
    files: ModelFiles  # of the model
    pooling: str = "mean"  # of embeddings
    total_weight: float = 1.0  # of all clients with keys
    observers: Sequence[Observer] = ()  # of finished requests, besides `http`
    http: HttpCounts = field(default_factory=HttpCounts)
    started_s: float = field(default_factory=time.time)
    lines: LineWriter = field(default_factory=LineWriter)  # messages to the operator
    draining: bool = False
    bodies: BodyReader = field(init=False)
    responses: ResponseStore = field(init=False)
    card: ModelCard | None = None  # of `files`, once a client has asked for it
    pulls: ModelPulls = field(default_factory=ModelPulls)  # downloads of other models
    counting: ClientThreads = field(init=False)  # counts tokens; generations never wait for it
    live: LiveViews = field(init=False)  # the engine's activity, for the page

    def __post_init__(self) -> None:
        settings = self.settings
        self.bodies = BodyReader(
            settings.max_body_bytes, settings.max_body_elements, self.engine.info.max_model_len
        )
        self.responses = ResponseStore(
            settings.max_stored_responses, settings.max_stored_bytes, self.total_weight
        )
        self.counting = ClientThreads(1, MAX_COUNTING, "counting")
        self.live = LiveViews(self.engine.live)

    @property
    def mode(self) -> str:
        """Return `model`, or `dry-run` if answers are echoes of prompts."""
        return "dry-run" if self.settings.dry_run else "model"

    @property
    def fingerprint(self) -> str:
        """Return what OpenAI's API calls `system_fingerprint`: the version that answers, and whether it has a model."""
        return f"quire-{__version__}" + ("-dry-run" if self.settings.dry_run else "")

    def tell(self, text: str, to: int = STDOUT) -> None:
        """Write a message to the operator."""
        tell(self.lines, self.settings, text, to)

    def check_model(self, name: str | None) -> str:
        """Return the model's name for the answer. Raise ApiError 404 for a model that is not served."""
        if name is not None and name not in self.names and not self.settings.any_model_name:
            raise ApiError(
                404,
                f"the model {name[:128]!r} is not served here; available: {', '.join(self.names)}",
                "model",
                "model_not_found",
            )
        return name or self.names[0]


def server_of(request: Request) -> ServerContext:
    return cast(ServerContext, request.app.state.server)


def client_of(request: Request) -> ApiClient:
    return cast(ApiClient, request.scope.get("client_key", ANYONE))


def label_of(request: Request) -> str:
    """Return the id that the client gave its request (`X-Request-Id`), or ""."""
    return cast(str, request.scope.get("client_label", ""))


def thread_of(request: Request) -> Callable[[Callable[[], R]], Awaitable[R]]:
    """Return a function that runs work for the request's client in one of the tokenizer's threads."""
    return partial(server_of(request).engine.in_thread, client_of(request))


async def read_request(request: Request, cls: type[T]) -> tuple[T, list[str]]:
    """Read the body of a request.

    Returns:
        The body as a `cls`, and a warning for each field that is ignored.

    Raises:
        ApiError: 400 for a body that is malformed or has fields of other types; 413 and 503 for one that is too large.
    """
    settings = server_of(request).settings
    bodies = server_of(request).bodies
    body, warnings = await bodies.read(request, lambda raw: parse(decode_object(raw), cls, settings.strict))
    request.scope["api_request"] = body  # for errors, which name its fields
    for name in _NO_EFFECT:
        if getattr(body, name, None) not in (None, 1):
            warnings.append(f"{name} has no effect in Quire")
    if isinstance(body, _WITHOUT_CHOICES):
        given = [name for name in _CHOICE_FIELDS if getattr(body, name) not in (None, False)]
        warnings += [f"{name} has no effect here: use /v1/chat/completions" for name in given]
    policy = server_of(request).engine.config.scheduling_policy
    if isinstance(body, RequestFields) and body.priority and policy != "priority":
        warnings.append("priority has no effect: the server runs without --scheduling-policy priority")
    if isinstance(body, RequestFields) and not server_of(request).engine.config.learns_step_times:
        given = [name for name in ("target_itl", "target_ttft") if getattr(body, name) is not None]
        warnings += [
            f"{name} has no effect: the server runs with a fixed size of chunks (--mixed-prefill-tokens) or without chunks"
            for name in given
        ]
    return body, warnings


def stream_interval(server: ServerContext, body: SamplingFields) -> int:
    """Return how many new tokens of an answer make an event of its stream; 0 if it is not streamed."""
    return (body.stream_interval or server.settings.stream_interval) if body.stream else 0


def answer_id(prefix: str, given: str | None) -> str:
    """Return the id of an answer; a client may choose the part after the prefix."""
    return f"{prefix}-{given or uuid.uuid4().hex}"
