"""The conversion of requests of OpenAI's Responses API into chats.

instructions                                   a system message, for this response only
message                                        a message
reasoning, message, function_call of one turn  one message of the assistant
function_call_output                           a message with role tool
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from quire.serve.api.protocol.chat import ChatRequest
from quire.serve.api.protocol.fields import shared_fields
from quire.serve.api.protocol.responses import InputTokensRequest
from quire.serve.api.responses.tools import chat_tool_choice, chat_tools, flat_name
from quire.serve.http.errors import bad_request

_REFUSED = ("background", "context_management", "max_tool_calls", "moderation", "prompt")
_TEXTS = ("input_text", "output_text", "text", "refusal")
# Items about tools that OpenAI runs itself, and about the tools of a conversation: a model without them has no use for
# them, and a client that changes models in the middle of a conversation sends them again.
_LEFT_OUT = (
    "additional_tools", "apply_patch_call", "apply_patch_call_output", "code_interpreter_call", "compaction",
    "computer_call", "computer_call_output", "file_search_call", "image_generation_call", "local_shell_call",
    "local_shell_call_output", "mcp_approval_request", "mcp_approval_response", "mcp_call", "mcp_list_tools",
    "program", "program_output", "shell_call", "shell_call_output", "tool_search_call", "tool_search_output",
    "web_search_call",
)  # fmt: skip
_PAIRS, _KEY_CHARS, _VALUE_CHARS = 16, 64, 512  # limits of metadata, as in OpenAI's API
_LOGPROBS = "message.output_text.logprobs"
ConversationDict = dict[str, Any]
ItemDict = dict[str, Any]


def input_items(request: InputTokensRequest) -> list[ItemDict]:
    """Return the items of `input`, which may be a text or absent."""
    if request.input is None:
        return []
    return [{"role": "user", "content": request.input}] if isinstance(request.input, str) else request.input


def chat_of(request: InputTokensRequest, history: Sequence[ItemDict]) -> tuple[ChatRequest, list[str]]:
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
    messages, warnings = messages_of(input_items(request), history)
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
    functions, unused = chat_tools(request.tools or ())
    chat.tools = functions or None  # an empty list means no tools
    choice = chat_tool_choice(request.tool_choice)
    chat.tool_choice = None if choice == "auto" else choice
    return chat, [*warnings, *unused, *_set_output_fields(request, chat)]


def _set_output_fields(request: InputTokensRequest, chat: ChatRequest) -> list[str]:
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
    checked_metadata(request.metadata)
    warnings = []
    if request.truncation not in (None, "disabled"):
        warnings.append("truncation has no effect in Quire: a conversation that is too long is refused")
    for name in request.include or ():
        if name != _LOGPROBS:
            warnings.append(f"include {name[:64]!r} has no effect in Quire")
    if (request.text or {}).get("verbosity"):
        warnings.append("text.verbosity has no effect in Quire")
    return warnings


def checked_metadata(metadata: Any) -> dict[str, str]:
    """Return the metadata of a request. Raise ApiError 400 for metadata that OpenAI's API would refuse."""
    metadata = {} if metadata is None else metadata
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
    return metadata


def conversation_id(request: InputTokensRequest) -> str | None:
    """Return the id of the conversation that the request continues, or None. Raise ApiError 400 for another form."""
    given = request.conversation
    found = given.get("id") if isinstance(given, dict) else given
    if not isinstance(found, (str, type(None))) or (found is None and given is not None):
        raise bad_request("conversation must be an id or an object with an id", "conversation")
    if found is not None and request.previous_response_id is not None:
        raise bad_request("set either conversation or previous_response_id, not both", "conversation")
    return found


# ----------------------------------------------------------------------------------------- items


def messages_of(
    items: Sequence[ItemDict], history: Sequence[ItemDict] = ()
) -> tuple[list[ConversationDict], list[str]]:
    """Convert `history` and the items that a request adds to it into messages.

    Returns:
        The messages, and a warning if items are left out because Quire has no place for them.

    Raises:
        ApiError: 400 for an item of a type that Quire does not support, or the output of a call that is not there.
    """
    messages: list[ConversationDict] = []
    names: dict[str, str] = {}  # function names by call id
    left_out: dict[str, None] = {}  # types, in order
    for i, item in enumerate(itertools.chain(history, items), -len(history)):
        where = f"input[{i}]"
        match item.get("type", "message"):
            case "message":
                _add_message(messages, item, where)
            case "reasoning":
                given = item.get("content")
                thought = _texts([] if given is None else given, f"{where}.content", ("reasoning_text",))
                _assistant_message(messages, "content", "tool_calls").setdefault("thoughts", []).extend(
                    thought
                )
            case "function_call" | "custom_tool_call":
                call = _call(item, where)
                names[call["id"]] = call["function"]["name"]
                _assistant_message(messages).setdefault("tool_calls", []).append(call)
            case "function_call_output" | "custom_tool_call_output":
                messages.append(_call_output(item, names, where, must_be_known=i >= 0))
            case str(kind) if kind in _LEFT_OUT:
                left_out[kind] = None
            case other:
                raise bad_request(
                    f"{where} has type {str(other)[:64]!r}; Quire takes message, reasoning, function_call and "
                    "function_call_output",
                    "input",
                )
    for message in messages:
        if "thoughts" in message:
            message["reasoning_content"] = "".join(message.pop("thoughts"))
    return messages, [f"input items of type {kind!r} are left out" for kind in left_out]


def _call_output(
    item: ItemDict, names: Mapping[str, str], where: str, must_be_known: bool
) -> ConversationDict:
    call_id = _text(item, "call_id", where)
    output = _texts(item.get("output"), f"{where}.output", _TEXTS)
    message = {"role": "tool", "tool_call_id": call_id, "content": "\n".join(output)}
    if call_id in names:
        message["name"] = names[call_id]
    elif must_be_known:  # a call that is stored may have been deleted from its conversation
        raise bad_request(
            f"{where}.call_id {call_id[:64]!r} belongs to no function_call before it in the conversation",
            "input",
        )
    return message


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


def _call(item: ItemDict, where: str) -> ConversationDict:
    """Return a call of an earlier answer. A custom tool's input is a text, which becomes an argument."""
    if item["type"] == "custom_tool_call":
        arguments = json.dumps({"input": _text(item, "input", where)}, ensure_ascii=False)
    else:
        arguments = _text(item, "arguments", where)
    name = _text({"name": flat_name(item)}, "name", where)
    function = {"name": name, "arguments": arguments}
    return {"id": _text(item, "call_id", where), "type": "function", "function": function}


def _text(holder: dict[str, Any], name: str, where: str) -> str:
    value = holder.get(name)
    if not isinstance(value, str):
        raise bad_request(f"{where}.{name} must be a string", "input")
    return value
