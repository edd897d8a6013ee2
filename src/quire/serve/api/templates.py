"""The chat templates of a server: the model's or the operator's, and those that requests bring.

Helper processes render both kinds. The templates of requests have a separate process and thread with low priority, so a
slow one does not delay requests without a template.
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
_MAX_WAITING = 64  # templates of one client


class ChatTemplates:
    """The chat templates of a server. Owns the processes and threads that render them."""

    def __init__(self, engine: AsyncEngine) -> None:
        """Create the templates of a server; `engine` has the settings, and the threads for its own templates."""
        self._engine = engine
        self._given: str | None = None  # by the operator; replaces the model's template
        self._trusts_requests = engine.settings.trust_request_chat_template
        self._renderer = TemplateRenderer()
        self._foreign = TemplateRenderer(processes=1, nice=_NICE)
        self._threads = ClientThreads(1, _MAX_WAITING, "templates of requests")

    def read_setting(self) -> None:
        """Read the operator's template, which may be a file. Raise ConfigError if it is not a valid template."""
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

    def choose(self, own: str | None, with_tools: bool) -> str:
        """Return the template for a request.

        Args:
            own: the template that the request brings, if it does.
            with_tools: whether the request has tools: some models have a separate template for them.

        Raises:
            ApiError: 400 if the request brings a template and the server does not trust it.
        """
        if own and not self._trusts_requests:
            raise bad_request(
                "chat_template is not accepted from requests: start the server with --trust-request-chat-template",
                "chat_template",
            )
        return own or self._given or template_of(self._engine.tokenizer, with_tools)

    def renderer(self, own: str | None) -> TemplateRenderer:
        """Return the renderer for a request that may bring its own template."""
        return self._foreign if own else self._renderer

    async def in_thread(self, client: ApiClient, own: str | None, work: Callable[[], T]) -> T:
        """Run `work`, which renders a client's template (`own`) or the server's, in a thread for that kind."""
        return await (self._threads.run(client, work) if own else self._engine.in_thread(client, work))

    def warm(self) -> None:
        """Start a process that compiles the server's template before the first request needs it."""
        with contextlib.suppress(QuireError):  # every request will report it
            self._renderer.traits(self._given or template_of(self._engine.tokenizer, False))

    def close(self) -> None:
        self._renderer.close()
        self._foreign.close()
        self._threads.close()
