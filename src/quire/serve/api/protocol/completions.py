"""The bodies of POST /v1/completions, as in OpenAI's API."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from quire.serve.api.protocol.fields import SamplingFields, Usage
from quire.serve.api.protocol.receipt import Receipt


class CompletionRequest(SamplingFields, kw_only=True):
    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None

    suffix: str | None = None
    best_of: int | None = None
    prompt_embeds: Any = None


class CompletionLogprobs(msgspec.Struct):
    """Lists with one entry per token. The first token of an echoed prompt has no log-probability."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[Any] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionResponse(msgspec.Struct, kw_only=True):
    """A whole answer or one chunk of a stream, which have the same form."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    warnings: list[str] | UnsetType = UNSET
    receipt: Receipt | UnsetType = UNSET
