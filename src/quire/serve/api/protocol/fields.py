"""The fields that requests share: those of OpenAI's API and vLLM's additional ones. Also the usage of answers."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # accepted and ignored: chunks are never padded


class RequestFields(msgspec.Struct, kw_only=True):
    """The fields of every request to the model."""

    model: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    target_itl: float | None = None  # ms
    target_ttft: float | None = None  # ms
    request_id: str | None = None
    cache_salt: str | None = None
    timeout: float | None = None
    user: str | None = None  # accepted and ignored


class SamplingFields(RequestFields, kw_only=True):
    """The fields of every request that generates. None selects the model's default, or that of SamplingParams."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval: int | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    structural_tag: dict[str, Any] | str | None = None

    receipt: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    # Not implemented: refused unless the value changes nothing (REFUSED in serve/api/sampling_fields.py).
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    logprob_token_ids: Any = None
    kv_transfer_params: Any = None
    repetition_detection: Any = None
    thinking_token_budget: Any = None
    return_hidden_states: Any = None
    return_token_offsets: bool | None = None
    lora_path: Any = None

    # Accepted and ignored: they change nothing that a client could see.
    metadata: Any = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    service_tier: Any = None
    store: bool | None = None
    session_id: str | None = None
    vllm_xargs: Any = None


class ConversationFields(SamplingFields, kw_only=True):
    """The fields that all chat APIs share, besides messages and tools."""

    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def shared_fields(request: ConversationFields) -> dict[str, Any]:
    """Return the fields of `request` that all chat APIs share, by name, to convert it into another API's request."""
    return {name: getattr(request, name) for name in ConversationFields.__struct_fields__}


class Usage(msgspec.Struct, kw_only=True):
    """Token counts of a request. `prompt_tokens` counts each prompt once, whatever the number of its choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]
    completion_tokens_details: dict[str, int] | UnsetType = UNSET


def usage_of(
    prompt_tokens: int, completion_tokens: int, cached_tokens: int, reasoning_tokens: int | None = None
) -> Usage:
    """Return the usage of a request. `reasoning_tokens` is None if reasoning is not parsed."""
    details = UNSET if reasoning_tokens is None else {"reasoning_tokens": reasoning_tokens}
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details={"cached_tokens": cached_tokens},
        completion_tokens_details=details,
    )
