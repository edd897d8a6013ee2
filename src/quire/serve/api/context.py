"""What every route needs: the engine, the settings, the names of the model; and a request once it is parsed."""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar, cast

import msgspec
from starlette.requests import Request

from quire.serve.answer.form import Forms
from quire.serve.api.protocol.messages import CountTokensRequest
from quire.serve.api.protocol.other import GenerateRequest
from quire.serve.api.protocol.responses import ResponsesRequest
from quire.serve.api.protocol.sampling import RequestFields
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
MAX_COUNTING = 64  # calls of a client that may wait
_NO_EFFECT = ("stream_interval", "verbosity", "vllm_xargs")
_OF_CHOICES = ("prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids")
_WITHOUT_CHOICES = (
    CountTokensRequest,
    GenerateRequest,
    ResponsesRequest,
)  # their answers have no place for those


@dataclass(slots=True)
class ServerContext:
    engine: AsyncEngine
    settings: ServeConfig
    names: list[str]  # of the model; the first is used in answers
    forms: Forms  # of its answers
    templates: ChatTemplates
    pooling: str = "mean"  # of embeddings
    total_weight: float = 1.0  # of all clients that there are keys for
    observers: Sequence[Observer] = ()  # of requests that are over, beside `http`
    http: HttpCounts = field(default_factory=HttpCounts)
    started_s: float = field(default_factory=time.time)
    lines: LineWriter = field(default_factory=LineWriter)  # to whoever started the server
    draining: bool = False
    bodies: BodyReader = field(init=False)
    responses: ResponseStore = field(init=False)
    counting: ClientThreads = field(init=False)  # for work that no generation waits for: counting tokens
    live: LiveViews = field(init=False)  # what the engine does, for those who look

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

    def tell(self, text: str, to: int = STDOUT) -> None:
        """Say something to whoever started the server."""
        tell(self.lines, self.settings, text, to)

    def check_model(self, name: str | None) -> str:
        """The model's name for the answer; ApiError 404 for another model."""
        if name is not None and name not in self.names:
            raise ApiError(
                404,
                f"the model {name[:128]!r} is not served here; there is {' and '.join(self.names)}",
                "model",
                "model_not_found",
            )
        return name or self.names[0]


def server_of(request: Request) -> ServerContext:
    return cast(ServerContext, request.app.state.server)


def client_of(request: Request) -> ApiClient:
    return cast(ApiClient, request.scope.get("client_key", ANYONE))


def thread_of(request: Request) -> Callable[[Callable[[], R]], Awaitable[R]]:
    """Return what runs work of the request's client in one of the tokenizer's threads."""
    return partial(server_of(request).engine.in_thread, client_of(request))


async def read_request(request: Request, cls: type[T]) -> tuple[T, list[str]]:
    """The body as a `cls`, and warnings about what is ignored."""
    settings = server_of(request).settings
    bodies = server_of(request).bodies
    found, warnings = await bodies.read(
        request, lambda body: parse(decode_object(body), cls, settings.strict)
    )
    request.scope["asked"] = found  # for errors that are found where the fields have other names
    for name in _NO_EFFECT:
        if getattr(found, name, None) not in (None, 1):
            warnings.append(f"{name} has no effect in Quire")
    if isinstance(found, _WITHOUT_CHOICES):
        given = [name for name in _OF_CHOICES if getattr(found, name) not in (None, False)]
        warnings += [f"{name} has no effect here: use /v1/chat/completions" for name in given]
    policy = server_of(request).engine.config.scheduling_policy
    if isinstance(found, RequestFields) and found.priority and policy != "priority":
        warnings.append("priority has no effect: the server runs without --scheduling-policy priority")
    return found, warnings


def length_field(wanted: object, *names: str) -> str | None:
    """The first of the fields `names` in which a request says how long its answer may be."""
    return next((name for name in names if getattr(wanted, name) is not None), None)


def answer_id(prefix: str, given: str | None) -> str:
    """The id of an answer; a client may choose what comes behind the prefix."""
    return f"{prefix}-{given or uuid.uuid4().hex}"
