"""Sources of answers: a model in this process, or a server with OpenAI's API."""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from quire.cli.flags import DEFAULT_MAX_TOKENS
from quire.types import ConfigError, QuireError, RequestError

if TYPE_CHECKING:
    from quire.llm import LLM

_TIMEOUT_S = 600.0  # without any data from the server


class ServerFailed(QuireError):
    """A server that cannot be reached, or that ended an answer early."""


@dataclass(slots=True)
class AnswerFigures:
    """Figures of an answer. `cached` is None if the source does not tell it."""

    tokens: int = 0
    prompt_tokens: int = 0
    cached: int | None = None
    seconds: float = 0.0
    finish_reason: str | None = None

    def text(self) -> str:
        """Return one line: tokens, speed, cached prompt tokens, and why the answer ended if that matters."""
        speed = f"{self.tokens / self.seconds:.0f} tokens/s" if self.seconds > 0 else "- tokens/s"
        parts = [f"{self.tokens} tokens, {speed}"]
        if self.cached is not None:
            parts.append(f"{self.cached} of {self.prompt_tokens} prompt tokens from the prefix cache")
        if self.finish_reason == "length":
            parts.append("cut off at max_tokens: /set max_tokens NUMBER")
        return "; ".join(parts)


class AnswerSource(Protocol):
    """A model that answers conversations."""

    title: str

    def stream(
        self, messages: list[dict[str, Any]], fields: dict[str, Any], figures: AnswerFigures
    ) -> Iterator[str]:
        """Yield the answer piece by piece, and fill in `figures`.

        Raises:
            RequestError: if the conversation or a field is refused.
        """
        ...


class LocalModel:
    """A model that runs in this process."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self.title = f"{llm.info.model} on {llm.info.device}"

    def stream(
        self, messages: list[dict[str, Any]], fields: dict[str, Any], figures: AnswerFigures
    ) -> Iterator[str]:
        """Yield the answer piece by piece, and fill in `figures`."""
        params = self._llm.default_params(fields, DEFAULT_MAX_TOKENS)
        begin, shown = time.perf_counter(), 0
        with closing(self._llm.stream(self._llm.chat_prompt(messages), params)) as outputs:  # type: ignore[type-var]
            for output in outputs:
                answer = output.outputs[0]
                figures.tokens, figures.seconds = len(answer.token_ids), time.perf_counter() - begin
                figures.prompt_tokens, figures.cached = len(output.prompt_token_ids), output.num_cached_tokens
                figures.finish_reason = answer.finish_reason
                yield answer.text[shown:]
                shown = len(answer.text)


class RemoteModel:
    """A model of a server with OpenAI's API. The key comes from OPENAI_API_KEY or QUIRE_API_KEY."""

    def __init__(self, url: str, model: str | None) -> None:
        """Ask the server for its models.

        Args:
            url: address of the server, with or without /v1.
            model: name of a model; None takes the first that the server lists.

        Raises:
            ConfigError: if the address or the key is wrong, or the server lists no model.
            ServerFailed: if the server cannot be reached.
        """
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigError(
                f"url must be the address of a server, such as http://127.0.0.1:8000, got {url!r}"
            )
        self._base = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"
        key = os.environ.get("OPENAI_API_KEY") or os.environ.get("QUIRE_API_KEY", "").split(",")[0]
        self._headers = {
            "Content-Type": "application/json",
            **({"Authorization": f"Bearer {key}"} if key else {}),
        }
        with self._open("/v1/models", None) as response:
            cards = json.load(response).get("data") or []
        names = [card["id"] for card in cards if "id" in card]
        if model is None and not names:
            raise ConfigError(f"{self._base} lists no model: name one")
        self._model = model or names[0]
        self.title = f"{self._model} at {self._base}"

    def stream(
        self, messages: list[dict[str, Any]], fields: dict[str, Any], figures: AnswerFigures
    ) -> Iterator[str]:
        """Yield the answer piece by piece, and fill in `figures`. Leaving early closes the connection."""
        body = {
            "model": self._model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": DEFAULT_MAX_TOKENS,
            **fields,
        }
        begin, ended = time.perf_counter(), False
        with self._open("/v1/chat/completions", body) as response:
            for line in _lines(response):
                if not line.startswith("data:"):
                    continue
                if (data := line[5:].strip()) == "[DONE]":
                    ended = True
                    break
                yield from _piece(json.loads(data), figures)
                figures.seconds = time.perf_counter() - begin
        if not ended:
            raise ServerFailed(f"{self._base} closed the connection before the end of the answer")

    def _open(self, path: str, body: dict[str, Any] | None) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, self._headers)
        try:
            response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=_TIMEOUT_S)
            return response
        except urllib.error.HTTPError as error:
            raise self._refusal(error) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise ServerFailed(f"no server answers at {self._base}: {reason}") from None

    def _refusal(self, error: urllib.error.HTTPError) -> QuireError:
        if error.code in (401, 403):
            return ConfigError(f"{self._base} requires an API key: set OPENAI_API_KEY")
        text = error.read().decode(errors="replace")
        try:
            text = json.loads(text)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            text = " ".join(text.split())[:200]
        message = f"{self._base} answered {error.code}: {text}"
        return RequestError(message) if error.code < 500 else ServerFailed(message)


def _lines(response: http.client.HTTPResponse) -> Iterator[str]:
    try:
        for line in response:
            yield line.decode("utf-8", "replace").rstrip("\r\n")
    except (OSError, http.client.HTTPException) as error:
        raise ServerFailed(f"the connection was lost: {error}") from None


def _piece(chunk: dict[str, Any], figures: AnswerFigures) -> Iterator[str]:
    """Yield the text of one event of a stream, and take its figures.

    Raises:
        ServerFailed: if the event is an error.
    """
    if error := chunk.get("error"):
        raise ServerFailed(str(error.get("message", error) if isinstance(error, dict) else error))
    if usage := chunk.get("usage"):
        figures.tokens, figures.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
        figures.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    for choice in chunk.get("choices", ())[:1]:
        delta = choice.get("delta") or {}
        figures.finish_reason = choice.get("finish_reason") or figures.finish_reason
        if text := delta.get("reasoning") or delta.get("reasoning_content") or delta.get("content"):
            yield text
