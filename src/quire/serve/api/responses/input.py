"""The conversion of requests of OpenAI's Responses API into chats.

instructions                                   a system message, for this response only
message                                        a message
reasoning, message, function_call of one turn  one message of the assistant
function_call_output                           a message with role tool
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.serve.api.protocol.chat import ChatRequest
from quire.serve.api.protocol.fields import shared_fields
from quire.serve.api.protocol.responses import ResponsesRequest
from quire.serve.http.errors import bad_request

_REFUSED = ("background", "context_management", "conversation", "max_tool_calls", "moderation", "prompt")
_TEXTS = ("input_text", "output_text", "text", "refusal")
_PAIRS, _KEY_CHARS, _VALUE_CHARS = 16, 64, 512  # limits of metadata, as in OpenAI's API
_LOGPROBS = "message.output_text.logprobs"
ConversationDict = dict[str, Any]


def chat_of(request: ResponsesRequest, history: Sequence[ConversationDict]) -> tuple[ChatRequest, list[str]]:
    """Convert a request into a chat that continues `history`.

    Returns:
        The chat, and a warning for each field without effect.

    Raises:
        ApiError: 400 for fields and items that Quire does not support.
    """
    for name in _REFUSED:
        if getattr(request, name):
            raise bad_request(f"{name} is not available in Quire", name)
    if request.n not in (None, 1):
        raise bad_request(f"n must be 1 on this route, got {request.n}: use /v1/chat/completions", "n")
    items = [{"role": "user", "content": request.input}] if isinstance(request.input, str) else request.input
    messages = [*history, *messages_of(items, history)]
    if request.instructions:
        messages.insert(0, {"role": "system", "content": request.instructions})
    if not messages:
        raise bad_request("input must hold at least one item", "input")
    chat = ChatRequest(messages=messages, **shared_fields(request))
    if request.max_output_tokens is not None:
        if request.max_output_tokens < 1:
            raise bad_request(
                f"max_output_tokens must be at least 1, got {request.max_output_tokens}", "max_output_tokens"
            )
        chat.max_completion_tokens = request.max_output_tokens
    if request.top_logprobs or _LOGPROBS in (request.include or ()):
        chat.logprobs, chat.top_logprobs = True, request.top_logprobs
    if request.tools:  # an empty list means no tools
        chat.tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools)]
        chat.tool_choice = _choice(request.tool_choice)
    elif request.tool_choice not in (None, "auto"):
        chat.tool_choice = request.tool_choice
    return chat, _set_output_fields(request, chat)


def _set_output_fields(request: ResponsesRequest, chat: ChatRequest) -> list[str]:
    """Set the chat's output format and reasoning effort, check the metadata, and return warnings."""
    text_format = (request.text or {}).get("format")
    if text_format is not None:
        if not isinstance(text_format, dict) or text_format.get("type") not in (
            "text",
            "json_object",
            "json_schema",
        ):
            raise bad_request("text.format must have type text, json_object or json_schema", "text")
        chat.response_format = text_format
    effort = (request.reasoning or {}).get("effort")
    if not isinstance(effort, (str, type(None))):
        raise bad_request("reasoning.effort must be a string", "reasoning")
    chat.reasoning_effort = effort or request.reasoning_effort
    metadata = {} if request.metadata is None else request.metadata
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise bad_request("metadata must be an object whose values are strings", "metadata")
    if len(metadata) > _PAIRS or any(
        len(k) > _KEY_CHARS or len(v) > _VALUE_CHARS for k, v in metadata.items()
    ):
        raise bad_request(
            f"metadata must hold at most {_PAIRS} pairs, with keys of at most {_KEY_CHARS} characters and values of "
            f"at most {_VALUE_CHARS}",
            "metadata",
        )
    warnings = []
    if request.truncation not in (None, "disabled"):
        warnings.append("truncation has no effect in Quire: a conversation that is too long is refused")
    for name in request.include or ():
        if name != _LOGPROBS:
            warnings.append(f"include {name[:64]!r} has no effect in Quire")
    if (request.text or {}).get("verbosity"):
        warnings.append("text.verbosity has no effect in Quire")
    return warnings


# ----------------------------------------------------------------------------------------- tools


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a function in the form of the chat API."""
    if tool.get("type") != "function":
        raise bad_request(f"{where} has type {str(tool.get('type'))[:64]!r}; Quire takes functions", "tools")
    function = {name: value for name, value in tool.items() if name in ("name", "description", "strict")}
    function = {name: value for name, value in function.items() if value is not None}
    function["parameters"] = tool.get("parameters") or {}
    return {"type": "function", "function": function}


def _choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    """Return `tool_choice` in the form of the chat API."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "allowed_tools":
        tools = choice.get("tools")
        if isinstance(tools, list):
            tools = [_named_function(tool) if isinstance(tool, dict) else tool for tool in tools]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
    return _named_function(choice)


def _named_function(choice: dict[str, Any]) -> dict[str, Any]:
    return {"type": choice.get("type"), "function": {"name": choice.get("name")}}


# ----------------------------------------------------------------------------------------- items


def messages_of(
    items: Sequence[dict[str, Any]], history: Sequence[ConversationDict] = ()
) -> list[ConversationDict]:
    """Convert the items of a request or of an answer into the messages that follow `history`.

    Raises:
        ApiError: 400 for an item of a type that Quire does not support.
    """
    messages: list[ConversationDict] = []
    names = {call["id"]: call["function"]["name"] for m in history for call in m.get("tool_calls", ())}
    for i, item in enumerate(items):
        where = f"input[{i}]"
        match item.get("type", "message"):
            case "message":
                _add_message(messages, item, where)
            case "reasoning":
                thought = _texts(item.get("content") or [], f"{where}.content", ("reasoning_text",))
                _assistant_message(messages, "content", "tool_calls").setdefault("thoughts", []).extend(
                    thought
                )
            case "function_call":
                call = _call(item, where)
                names[call["id"]] = call["function"]["name"]
                _assistant_message(messages).setdefault("tool_calls", []).append(call)
            case "function_call_output":
                call_id = _text(item, "call_id", where)
                output = _texts(item.get("output"), f"{where}.output", _TEXTS)
                messages.append({"role": "tool", "tool_call_id": call_id, "content": "\n".join(output)})
                if call_id in names:
                    messages[-1]["name"] = names[call_id]
            case other:
                raise bad_request(
                    f"{where} has type {str(other)[:64]!r}; Quire takes message, reasoning, function_call and "
                    "function_call_output",
                    "input",
                )
    for message in messages:
        if "thoughts" in message:
            message["reasoning_content"] = "".join(message.pop("thoughts"))
    return messages


def _assistant_message(messages: list[ConversationDict], *without: str) -> ConversationDict:
    """Return the assistant's message that the next item joins: the last one unless it has one of the keys `without`."""
    if not messages or messages[-1]["role"] != "assistant" or any(messages[-1].get(name) for name in without):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _add_message(messages: list[ConversationDict], item: dict[str, Any], where: str) -> None:
    role = item.get("role")
    if role not in ("user", "assistant", "system", "developer"):
        raise bad_request(
            f"{where}.role must be user, assistant, system or developer, got {str(role)[:64]!r}", "input"
        )
    content = "\n".join(_texts(item.get("content"), f"{where}.content", _TEXTS))
    if role == "assistant":
        _assistant_message(messages, "content", "tool_calls")["content"] = content
    else:
        messages.append({"role": role, "content": content})


def _texts(content: Any, where: str, kinds: tuple[str, ...]) -> list[str]:
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise bad_request(f"{where} must be a string or a list of parts", "input")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds:
            raise bad_request(
                f"{where}[{i}] has type {str(kind)[:64]!r}; Quire takes parts of text: {', '.join(kinds)}",
                "input",
            )
        texts.append(_text(part, "refusal" if kind == "refusal" else "text", f"{where}[{i}]"))
    return texts


def _call(item: dict[str, Any], where: str) -> dict[str, Any]:
    function = {"name": _text(item, "name", where), "arguments": _text(item, "arguments", where)}
    return {"id": _text(item, "call_id", where), "type": "function", "function": function}


def _text(holder: dict[str, Any], name: str, where: str) -> str:
    value = holder.get(name)
    if not isinstance(value, str):
        raise bad_request(f"{where}.{name} must be a string", "input")
    return value
