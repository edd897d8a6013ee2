"""The bodies of /v1/responses and /v1/conversations, as in OpenAI's API.

serve/api/responses/answer.py makes items and events, which are plain objects.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from quire.serve.api.protocol.fields import ConversationFields
from quire.serve.api.protocol.receipt import Receipt


class InputTokensRequest(ConversationFields, kw_only=True):
    """The body of POST /v1/responses/input_tokens, which counts the tokens of a response's prompt."""

    client_fields: ClassVar[dict[str, str]] = {
        "max_tokens": "max_output_tokens",
        "response_format": "text.format",
    }

    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    include: list[str] | None = None
    truncation: str | None = None

    background: bool | None = None
    context_management: Any = None
    conversation: Any = None
    max_tool_calls: Any = None
    moderation: Any = None
    prompt: Any = None


class ResponsesRequest(InputTokensRequest, kw_only=True):
    input: str | list[dict[str, Any]]


class ResponsesUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseObject(msgspec.Struct, kw_only=True):
    """A response. In the first events of a stream it is in progress; in the last one it has all its output."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: str
    background: bool = False
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None = None
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: str | None
    conversation: dict[str, str] | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str = "disabled"
    usage: ResponsesUsage | UnsetType = UNSET
    user: str | UnsetType = UNSET
    metadata: dict[str, str]
    warnings: list[str] | UnsetType = UNSET
    receipt: Receipt | UnsetType = UNSET


class ItemList(msgspec.Struct, kw_only=True):
    """A page of items. `data` holds items that are already JSON."""

    object: str = "list"
    data: list[msgspec.Raw]
    first_id: str
    last_id: str
    has_more: bool


class ConversationRequest(msgspec.Struct, kw_only=True):
    """The body of POST /v1/conversations."""

    items: list[dict[str, Any]] | None = None
    metadata: dict[str, Any] | None = None


class ConversationUpdate(msgspec.Struct, kw_only=True):
    """The body of POST /v1/conversations/{id}."""

    metadata: dict[str, Any] | None


class ConversationItems(msgspec.Struct, kw_only=True):
    """The body of POST /v1/conversations/{id}/items."""

    items: list[dict[str, Any]]


class ConversationObject(msgspec.Struct, kw_only=True):
    """A conversation without its items."""

    id: str
    object: str = "conversation"
    created_at: int
    metadata: dict[str, str]
