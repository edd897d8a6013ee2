"""The bodies of the routes below /api, as in Ollama's API."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from quire.serve.api.protocol.chat import TokenLogprob
from quire.serve.api.protocol.fields import RequestFields
from quire.serve.api.protocol.receipt import Receipt

# Options with the name and meaning that they have in OpenAI's API or in vLLM's.
SAME_OPTIONS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "stop",
    "presence_penalty",
    "frequency_penalty",
)
# The fields of a chat, by the names that they have in requests of this API.
_CLIENT_FIELDS = {
    **{name: f"options.{name}" for name in SAME_OPTIONS},
    "repetition_penalty": "options.repeat_penalty",
    "max_tokens": "options.num_predict",
    "response_format": "format",
    "chat_template": "template",
}


class OllamaOptions(msgspec.Struct, kw_only=True):
    """The options that have an effect. Others, such as num_gpu, are ignored with a warning."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None  # -1: any
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_penalty: float | None = None
    num_predict: int | None = None  # 0, -1 and -2: the rest of the context
    num_ctx: int | None = None  # checked: a request uses as much of the context as it needs


class OllamaRequest(RequestFields, kw_only=True):
    """The fields of every request of this API that uses the model."""

    client_fields: ClassVar[dict[str, str]] = _CLIENT_FIELDS

    options: OllamaOptions | None = None
    keep_alive: str | float | None = None  # accepted and ignored: the model stays loaded


class OllamaTextRequest(OllamaRequest, kw_only=True):
    """The fields of every request that generates."""

    stream: bool | None = None  # None: true
    format: str | dict[str, Any] | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    receipt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    truncate: bool | None = None
    shift: bool | None = None


class OllamaChatRequest(OllamaTextRequest, kw_only=True):
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


class OllamaGenerateRequest(OllamaTextRequest, kw_only=True):
    prompt: str | None = None
    system: str | None = None
    template: str | None = None
    context: list[int] | None = None
    raw: bool | None = None

    suffix: str | None = None
    images: Any = None


class OllamaEmbedRequest(OllamaRequest, kw_only=True):
    input: str | list[str]
    truncate: bool | None = None  # None: true
    dimensions: int | None = None


class OllamaEmbeddingsRequest(OllamaRequest, kw_only=True):
    prompt: str | None = None


class OllamaModelRequest(msgspec.Struct, kw_only=True):
    """The body of POST /api/show."""

    model: str | None = None
    name: str | None = None  # the older name of `model`
    verbose: bool | None = None


class OllamaPullRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    name: str | None = None  # the older name of `model`
    stream: bool | None = None  # None: true
    insecure: bool | None = None  # has no effect


# -------------------------------------------------------------------------------------- answers


class OllamaFunctionCall(msgspec.Struct):
    name: str
    arguments: dict[str, Any]
    index: int


class OllamaToolCall(msgspec.Struct):
    id: str
    function: OllamaFunctionCall


class OllamaMessage(msgspec.Struct, kw_only=True):
    role: str = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaToolCall] | UnsetType = UNSET


class OllamaAnswerFields(msgspec.Struct, kw_only=True):
    """The fields of an answer or of one line of a stream. Reason, durations and counts come with the last line.

    Durations are in nanoseconds.
    """

    model: str
    created_at: str
    done: bool = False
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET
    receipt: Receipt | UnsetType = UNSET


class OllamaChatResponse(OllamaAnswerFields, kw_only=True):
    message: OllamaMessage


class OllamaGenerateResponse(OllamaAnswerFields, kw_only=True):
    response: str
    thinking: str | UnsetType = UNSET
    context: list[int] | UnsetType = UNSET


class OllamaEmbedResponse(msgspec.Struct, kw_only=True):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int = 0
    prompt_eval_count: int
    warnings: list[str] | UnsetType = UNSET


class OllamaEmbeddingsResponse(msgspec.Struct, kw_only=True):
    embedding: list[float]
    warnings: list[str] | UnsetType = UNSET
