"""The bodies of POST /v1/messages and /v1/messages/count_tokens, as in Anthropic's API.

serve/api/anthropic/answer.py makes the events of streams, which are plain objects.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from quire.serve.api.protocol.fields import ConversationFields
from quire.serve.api.protocol.receipt import Receipt


class CountTokensRequest(ConversationFields, kw_only=True):
    client_fields: ClassVar[dict[str, str]] = {
        "stop": "stop_sequences",
        "response_format": "output_config.format",
    }

    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None  # the older name of output_config.format

    container: Any = None
    mcp_servers: Any = None
    context_management: Any = None  # has no effect

    # Accepted and ignored: they change nothing that a client could see.
    cache_control: Any = None
    diagnostics: Any = None
    inference_geo: str | None = None
    speed: str | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: int


class MessagesUsage(msgspec.Struct, kw_only=True):
    """Token counts. The prompt has `input_tokens` plus `cache_read_input_tokens` tokens."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int


class MessagesResponse(msgspec.Struct, kw_only=True):
    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessagesUsage
    warnings: list[str] | UnsetType = UNSET
    receipt: Receipt | UnsetType = UNSET
