"""The bodies of the smaller routes: tokenize, detokenize, and the short form of a completion."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from quire.serve.api.protocol.fields import SamplingFields
from quire.serve.api.protocol.receipt import Receipt


class GenerateRequest(SamplingFields, kw_only=True):
    client_fields: ClassVar[dict[str, str]] = {"max_tokens": "max_new_tokens"}

    prompt: str | list[int]
    max_new_tokens: int | None = None


class GenerateResponse(msgspec.Struct, omit_defaults=True, kw_only=True):
    request_id: str
    text: str
    generated_tokens: int
    latency_ms: float
    finish_reason: str
    model: str
    warnings: list[str] | None = None
    receipt: Receipt | UnsetType = UNSET


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """A request with either `prompt` or `messages`; the fields after `return_token_strs` go with messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeResponse(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None
