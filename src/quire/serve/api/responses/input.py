"""A request of OpenAI's Responses API as a chat.

instructions                                   a system message, for this response only
message                                        a message
reasoning, message, function_call of one turn  one message of the assistant
function_call_output                           a message of role tool
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
_PAIRS, _KEY_CHARS, _VALUE_CHARS = 16, 64, 512  # of metadata, as OpenAI's API has it
_LOGPROBS = "message.output_text.logprobs"
ConversationDict = dict[str, Any]


def chat_of(wanted: ResponsesRequest, before: Sequence[ConversationDict]) -> tuple[ChatRequest, list[str]]:
    """The same as a chat that goes on after `before`, and warnings about what has no effect. Raises ApiError 400."""
    for name in _REFUSED:
        if getattr(wanted, name):
            raise bad_request(f"{name} is not available in Quire", name)
    if wanted.n not in (None, 1):
        raise bad_request("n must be 1 here: use /v1/chat/completions", "n")
    items = [{"role": "user", "content": wanted.input}] if isinstance(wanted.input, str) else wanted.input
    messages = [*before, *messages_of(items, before)]
    if wanted.instructions:
        messages.insert(0, {"role": "system", "content": wanted.instructions})
    if not messages:
        raise bad_request("input must hold at least one item", "input")
    chat = ChatRequest(messages=messages, **shared_fields(wanted))
    if wanted.max_output_tokens is not None:
        if wanted.max_output_tokens < 1:
            raise bad_request("max_output_tokens must be at least 1", "max_output_tokens")
        chat.max_completion_tokens = wanted.max_output_tokens
    if wanted.top_logprobs or _LOGPROBS in (wanted.include or ()):
        chat.logprobs, chat.top_logprobs = True, wanted.top_logprobs
    if wanted.tools:  # an empty list is as good as none
        chat.tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(wanted.tools)]
        chat.tool_choice = _choice(wanted.tool_choice)
    elif wanted.tool_choice not in (None, "auto"):
        chat.tool_choice = wanted.tool_choice
    return chat, _texts_and_thoughts(wanted, chat)


def _texts_and_thoughts(wanted: ResponsesRequest, chat: ChatRequest) -> list[str]:
    found = (wanted.text or {}).get("format")
    if found is not None:
        if not isinstance(found, dict) or found.get("type") not in ("text", "json_object", "json_schema"):
            raise bad_request("text.format must have type text, json_object or json_schema", "text")
        chat.response_format = found
    effort = (wanted.reasoning or {}).get("effort")
    if not isinstance(effort, (str, type(None))):
        raise bad_request("reasoning.effort must be a string", "reasoning")
    chat.reasoning_effort = effort or wanted.reasoning_effort
    metadata = {} if wanted.metadata is None else wanted.metadata
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise bad_request("metadata must be an object with strings", "metadata")
    if len(metadata) > _PAIRS or any(
        len(k) > _KEY_CHARS or len(v) > _VALUE_CHARS for k, v in metadata.items()
    ):
        raise bad_request(
            f"metadata must hold at most {_PAIRS} pairs, with keys of at most {_KEY_CHARS} characters and values of "
            f"at most {_VALUE_CHARS}",
            "metadata",
        )
    warnings = []
    if wanted.truncation not in (None, "disabled"):
        warnings.append("truncation has no effect in Quire: a conversation that is too long is refused")
    for name in wanted.include or ():
        if name != _LOGPROBS:
            warnings.append(f"include {name[:64]!r} has no effect in Quire")
    if (wanted.text or {}).get("verbosity"):
        warnings.append("text.verbosity has no effect in Quire")
    return warnings


# ----------------------------------------------------------------------------------------- tools


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """A function in the form of chats."""
    if tool.get("type") != "function":
        raise bad_request(f"{where} has type {str(tool.get('type'))[:64]!r}; Quire takes functions", "tools")
    function = {name: value for name, value in tool.items() if name in ("name", "description", "strict")}
    function = {name: value for name, value in function.items() if value is not None}
    function["parameters"] = tool.get("parameters") or {}
    return {"type": "function", "function": function}


def _choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    """tool_choice in the form of chats."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "allowed_tools":
        tools = choice.get("tools")
        if isinstance(tools, list):
            tools = [_named(tool) if isinstance(tool, dict) else tool for tool in tools]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
    return _named(choice)


def _named(choice: dict[str, Any]) -> dict[str, Any]:
    return {"type": choice.get("type"), "function": {"name": choice.get("name")}}


# ----------------------------------------------------------------------------------------- items


def messages_of(
    items: Sequence[dict[str, Any]], before: Sequence[ConversationDict] = ()
) -> list[ConversationDict]:
    """Items, of a request or of an answer, as messages that follow `before`. Raises ApiError 400."""
    found: list[ConversationDict] = []
    names = {call["id"]: call["function"]["name"] for m in before for call in m.get("tool_calls", ())}
    for i, item in enumerate(items):
        where = f"input[{i}]"
        match item.get("type", "message"):
            case "message":
                _add_message(found, item, where)
            case "reasoning":
                thought = _texts(item.get("content") or [], f"{where}.content", ("reasoning_text",))
                _turn(found, "content", "tool_calls").setdefault("thoughts", []).extend(thought)
            case "function_call":
                call = _call(item, where)
                names[call["id"]] = call["function"]["name"]
                _turn(found).setdefault("tool_calls", []).append(call)
            case "function_call_output":
                call_id = _text(item, "call_id", where)
                output = _texts(item.get("output"), f"{where}.output", _TEXTS)
                found.append({"role": "tool", "tool_call_id": call_id, "content": "\n".join(output)})
                if call_id in names:
                    found[-1]["name"] = names[call_id]
            case other:
                raise bad_request(
                    f"{where} has type {str(other)[:64]!r}; Quire takes message, reasoning, function_call and "
                    "function_call_output",
                    "input",
                )
    for message in found:
        if "thoughts" in message:
            message["reasoning_content"] = "".join(message.pop("thoughts"))
    return found


def _turn(found: list[ConversationDict], *without: str) -> ConversationDict:
    """The assistant's message that the next item belongs to: the last, if it has none of `without` yet."""
    if not found or found[-1]["role"] != "assistant" or any(found[-1].get(name) for name in without):
        found.append({"role": "assistant", "content": ""})
    return found[-1]


def _add_message(found: list[ConversationDict], item: dict[str, Any], where: str) -> None:
    role = item.get("role")
    if role not in ("user", "assistant", "system", "developer"):
        raise bad_request(
            f"{where}.role must be user, assistant, system or developer, got {str(role)[:64]!r}", "input"
        )
    content = "\n".join(_texts(item.get("content"), f"{where}.content", _TEXTS))
    if role == "assistant":
        _turn(found, "content", "tool_calls")["content"] = content
    else:
        found.append({"role": role, "content": content})


def _texts(content: Any, where: str, kinds: tuple[str, ...]) -> list[str]:
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise bad_request(f"{where} must be a string or a list of parts", "input")
    found = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds:
            raise bad_request(
                f"{where}[{i}] has type {str(kind)[:64]!r}; Quire takes parts of text: {', '.join(kinds)}",
                "input",
            )
        found.append(_text(part, "refusal" if kind == "refusal" else "text", f"{where}[{i}]"))
    return found


def _call(item: dict[str, Any], where: str) -> dict[str, Any]:
    function = {"name": _text(item, "name", where), "arguments": _text(item, "arguments", where)}
    return {"id": _text(item, "call_id", where), "type": "function", "function": function}


def _text(holder: dict[str, Any], name: str, where: str) -> str:
    value = holder.get(name)
    if not isinstance(value, str):
        raise bad_request(f"{where}.{name} must be a string", "input")
    return value
