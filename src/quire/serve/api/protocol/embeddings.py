"""The bodies of POST /v1/embeddings, as in OpenAI's API."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from quire.serve.api.protocol.fields import RequestFields


class EmbeddingsRequest(RequestFields, kw_only=True):
    input: str | list[str | int | list[int]]
    encoding_format: str | None = None
    dimensions: int | None = None
    pooling: str | None = None  # mean or last; None: the server's setting
    normalize: bool | None = None


class EmbeddingsUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[Any]
    model: str
    usage: EmbeddingsUsage
    warnings: list[str] | UnsetType = UNSET
