"""The chat templates of a server: the model's or the operator's, and those that requests bring.

Both are rendered in helper processes. Templates of requests have a process and a thread of their own, which
yield to all others, so that a slow one delays nobody who brings none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from quire.frontend.templates.chat import template_of
from quire.frontend.templates.renderer import TemplateRenderer
from quire.serve.async_engine import AsyncEngine
from quire.serve.client_threads import ClientThreads
from quire.serve.http.auth import ApiClient
from quire.serve.http.errors import bad_request
from quire.types import ConfigError, QuireError

T = TypeVar("T")
_NICE = 10
_MAX_WAITING = 64  # templates of a client's requests


class ChatTemplates:
    """Chooses, and renders, the template of a request. Owns the processes and the threads for both kinds.

    Args:
        engine: prepares requests in its threads.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._given: str | None = None  # the operator's template, which replaces the model's
        self._trusts_requests = engine.settings.trust_request_chat_template
        self._renderer = TemplateRenderer()
        self._foreign = TemplateRenderer(processes=1, nice=_NICE)
        self._threads = ClientThreads(1, _MAX_WAITING, "templates of requests")

    def read_setting(self) -> None:
        """Read the operator's template, which may be a file. Raises ConfigError if it is wrong."""
        given = self._engine.settings.chat_template
        if given is None:
            return
        try:
            if "{" not in given:
                given = Path(given).read_text(encoding="utf-8")
            self._renderer.traits(given)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the chat template {given} cannot be read: {error}") from None
        except QuireError as error:
            raise ConfigError(f"chat_template: {error}") from None
        self._given = given

    def choose(self, asked: str | None, with_tools: bool) -> str:
        """Return the request's, the operator's or the model's template. Raises ApiError 400."""
        if asked and not self._trusts_requests:
            raise bad_request(
                "chat_template is not taken from requests: start the server with --trust-request-chat-template",
                "chat_template",
            )
        return asked or self._given or template_of(self._engine.tokenizer, with_tools)

    def renderer(self, asked: str | None) -> TemplateRenderer:
        return self._foreign if asked else self._renderer

    async def in_thread(self, client: ApiClient, asked: str | None, work: Callable[[], T]) -> T:
        """Run `work`, which renders the template of a client's request, in a thread for its kind."""
        return await (self._threads.run(client, work) if asked else self._engine.in_thread(client, work))

    def warm(self) -> None:
        """Start a process and let it compile the server's template, before the first request needs it."""
        with contextlib.suppress(QuireError):  # requests will be told
            self._renderer.traits(self._given or template_of(self._engine.tokenizer, False))

    def close(self) -> None:
        self._renderer.close()
        self._foreign.close()
        self._threads.close()
