"""The conversion of Ollama's requests into chats.

options               sampling fields
thinking              reasoning of a message
tool_calls, tool_name calls and results, which get the ids that Ollama's clients leave out
format                response_format
think                 variables of the chat template
last message: assistant     the answer continues its text
"""

from __future__ import annotations

from typing import Any

from quire.serve.api.protocol.chat import ChatRequest
from quire.serve.api.protocol.fields import RequestFields
from quire.serve.api.protocol.ollama import (
    SAME_OPTIONS,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaTextRequest,
)
from quire.serve.http.errors import bad_request

_EFFORTS = ("low", "medium", "high")
_NO_LIMIT = (0, -1, -2)  # values of num_predict
ChatDict = dict[str, Any]


def chat_of(request: OllamaChatRequest, max_model_len: int) -> tuple[ChatRequest, list[str]]:
    """Convert a request to /api/chat into a chat.

    Args:
        request: the body, with at least one message.
        max_model_len: the length of the context in tokens.

    Returns:
        The chat, and a warning for each field without effect.

    Raises:
        ApiError: 400 for fields and values that Quire does not support.
    """
    chat, warnings = _chat(request, _messages(request.messages or []), max_model_len)
    if request.tools:  # an empty list means no tools
        chat.tools = [{"type": "function", **tool} for tool in request.tools]
    last = chat.messages[-1]
    if last["role"] == "assistant" and not last.get("tool_calls") and last["content"]:
        chat.continue_final_message = True
    return chat, warnings


def chat_of_prompt(
    request: OllamaGenerateRequest, prompt: str, max_model_len: int
) -> tuple[ChatRequest, list[str]]:
    """Convert a request to /api/generate into a chat of the system message, if it has one, and the prompt.

    With `raw` the chat serves for its fields only, because the prompt goes to the model unchanged. Arguments, result
    and errors are those of `chat_of`.
    """
    if request.suffix:
        raise bad_request("suffix is not available in Quire: the model cannot fill in the middle", "suffix")
    if request.images:
        raise _no_images("images")
    if request.raw:
        for name in ("system", "template", "context"):
            if getattr(request, name):
                raise bad_request(f"{name} cannot be combined with raw: write it into the prompt", name)
    messages: list[ChatDict] = [{"role": "user", "content": prompt}]
    if request.system:
        messages.insert(0, {"role": "system", "content": request.system})
    chat, warnings = _chat(request, messages, max_model_len)
    chat.chat_template = request.template or None
    return chat, warnings


def check_context(context: list[int], vocab_size: int) -> None:
    """Raise ApiError 400 unless all of `context` are token ids of the model."""
    wrong = next((token for token in context if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise bad_request(
            f"context token ids must be at least 0 and below the vocabulary size {vocab_size}, got {wrong}",
            "context",
        )


# ---------------------------------------------------------------------------------------- fields


def _chat(
    request: OllamaTextRequest, messages: list[ChatDict], max_model_len: int
) -> tuple[ChatRequest, list[str]]:
    """Build a chat with the fields that /api/chat and /api/generate share."""
    shared = {name: getattr(request, name) for name in RequestFields.__struct_fields__}
    chat = ChatRequest(
        messages=messages,
        stream=request.stream is not False,
        receipt=request.receipt,
        logprobs=request.logprobs,
        top_logprobs=request.top_logprobs,
        chat_template_kwargs=request.chat_template_kwargs,
        **shared,
    )
    _set_options(request, chat, max_model_len)
    _set_format(request, chat)
    _set_thinking(request, chat)
    effects = {
        "truncate": "a conversation that is too long is refused",
        "shift": "an answer ends where the context does",
    }
    warnings = [
        f"{name} has no effect in Quire: {what}" for name, what in effects.items() if getattr(request, name)
    ]
    return chat, warnings


def _set_options(request: OllamaTextRequest, chat: ChatRequest, max_model_len: int) -> None:
    options = request.options
    if options is None:
        return
    for name in SAME_OPTIONS:
        setattr(chat, name, getattr(options, name))
    if chat.seed == -1:
        chat.seed = None
    chat.repetition_penalty = options.repeat_penalty
    if options.num_predict not in _NO_LIMIT:
        chat.max_tokens = options.num_predict
    if options.num_ctx is not None and not 0 < options.num_ctx <= max_model_len:
        raise bad_request(
            f"options.num_ctx must be between 1 and {max_model_len} (max_model_len), got {options.num_ctx}; "
            "omit it, or start the server with a larger --max-model-len",
            "options.num_ctx",
        )


def _set_format(request: OllamaTextRequest, chat: ChatRequest) -> None:
    wanted = request.format
    if isinstance(wanted, dict):
        chat.response_format = {"type": "json_schema", "json_schema": {"schema": wanted}}
    elif wanted == "json":
        chat.response_format = {"type": "json_object"}
    elif wanted:
        raise bad_request(f'format must be "json" or a JSON schema, got {wanted[:64]!r}', "format")


def _set_thinking(request: OllamaTextRequest, chat: ChatRequest) -> None:
    """Set the chat template's variables for reasoning. False also leaves reasoning out of the answer."""
    think = request.think
    if think is None:
        return
    if isinstance(think, str):
        if think not in _EFFORTS:
            raise bad_request(f"think must be true, false, low, medium or high, got {think[:64]!r}", "think")
        chat.reasoning_effort = think
    chat.chat_template_kwargs = {"enable_thinking": bool(think), **(chat.chat_template_kwargs or {})}
    chat.include_reasoning = bool(think)


# -------------------------------------------------------------------------------------- messages


def _messages(given: list[ChatDict]) -> list[ChatDict]:
    """Return messages in the form of OpenAI's chats, with an id for each call and for its result."""
    messages: list[ChatDict] = []
    pending: list[ChatDict] = []  # calls without a result
    count = 0  # of calls so far
    for i, one in enumerate(given):
        where = f"messages[{i}]"
        if one.get("images"):
            raise _no_images(f"{where}.images")
        message = {name: value for name, value in one.items() if name not in ("images", "tool_name")}
        message["role"] = one.get("role")
        if message.get("content") is None:
            message["content"] = ""
        if one.get("tool_calls"):
            pending = _calls(one["tool_calls"], f"{where}.tool_calls", count)
            count += len(pending)
            message["tool_calls"] = list(pending)
        elif message["role"] == "tool":
            name = one.get("tool_name") or one.get("name")
            call = _answered(pending, one.get("tool_call_id"), name)
            if call is not None:
                pending.remove(call)
                message["tool_call_id"], name = call["id"], call["function"].get("name")
            if name is not None:
                message["name"] = name
        messages.append(message)
    return messages


def _calls(calls: Any, where: str, first: int) -> list[ChatDict]:
    """Return the calls of a message; those without an id are numbered from `first`."""
    if not isinstance(calls, list) or not all(
        isinstance(call, dict) and isinstance(call.get("function"), dict) for call in calls
    ):
        raise bad_request(f"{where} must be a list of objects with a function", "messages")
    # Nine letters and digits, which is what Mistral's templates take.
    return [
        {
            **call,
            "id": call.get("id") or f"call{first + n:05d}",
            "type": "function",
            "function": dict(call["function"]),
        }
        for n, call in enumerate(calls)
    ]


def _answered(pending: list[ChatDict], call_id: Any, name: Any) -> ChatDict | None:
    """Return the call that a result answers: by its id, otherwise the first one of the function, otherwise the first."""
    if call_id is not None:
        return next((call for call in pending if call["id"] == call_id), None)
    named = [call for call in pending if name is None or call["function"].get("name") == name]
    return next(iter(named or pending), None)


def _no_images(where: str) -> Exception:
    return bad_request(f"{where}: Quire takes no images, only text", where)
