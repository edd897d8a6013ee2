"""The bodies of POST /v1/chat/completions, as in OpenAI's API."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from quire.serve.api.protocol.fields import ConversationFields, Usage
from quire.serve.api.protocol.receipt import Receipt


class ChatRequest(ConversationFields, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    echo: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_prompt_text: bool | None = None
    functions: list[dict[str, Any]] | None = None  # the older form of tools
    function_call: str | dict[str, Any] | None = None  # the older form of tool_choice

    audio: Any = None
    modalities: Any = None
    moderation: Any = None
    prediction: Any = None
    web_search_options: Any = None
    mm_processor_kwargs: Any = None
    media_io_kwargs: Any = None
    verbosity: str | None = None


class FunctionCall(msgspec.Struct, omit_defaults=True):
    name: str | None = None
    arguments: str | UnsetType = UNSET


class ToolCallPart(msgspec.Struct, omit_defaults=True):
    """A call in a message, or a piece of one in a stream. Only the first piece has id, type and name."""

    index: int | UnsetType = UNSET
    id: str | None = None
    type: str | None = None
    function: FunctionCall | UnsetType = UNSET


class AssistantMessage(msgspec.Struct):
    role: str
    content: str | None
    refusal: str | None = None
    tool_calls: list[ToolCallPart] | UnsetType = UNSET
    function_call: FunctionCall | UnsetType = UNSET
    audio: None = None
    reasoning: str | None = None
    reasoning_content: str | None = None  # the older name of `reasoning`


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TokenLogprob] | UnsetType = UNSET


class ChoiceLogprobs(msgspec.Struct):
    content: list[TokenLogprob] | None
    refusal: None = None


class ChatChoice(msgspec.Struct):
    index: int
    message: AssistantMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: str
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatResponse(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    service_tier: None = None
    prompt_logprobs: list[Any] | None = None
    prompt_token_ids: list[int] | None = None
    kv_transfer_params: None = None
    prompt_text: str | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET
    receipt: Receipt | UnsetType = UNSET


class Delta(msgspec.Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallPart] | UnsetType = UNSET
    function_call: FunctionCall | UnsetType = UNSET


class ChunkChoice(msgspec.Struct):
    index: int
    delta: Delta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET

    @property
    def only_text(self) -> str | None:
        """Return the content, if the piece holds nothing else; otherwise None."""
        delta = self.delta
        if (
            self.logprobs is None
            and self.finish_reason is None
            and self.token_ids is UNSET
            and delta.role is UNSET
            and isinstance(delta.content, str)
        ):
            return delta.content
        return None


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET
    receipt: Receipt | UnsetType = UNSET
