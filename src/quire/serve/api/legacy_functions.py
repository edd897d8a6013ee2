"""The fields of OpenAI's chats before tools: `functions`, `function_call`, and messages with them."""

from __future__ import annotations

from typing import Any

from quire.serve.api.protocol.chat import ChatRequest
from quire.serve.http.errors import bad_request

_CHOICES = ("none", "auto")


def convert_functions(chat: ChatRequest) -> bool:
    """Replace functions by tools, and calls and results in the messages by those of tools.

    Returns:
        Whether the request has functions, so that the answer must have a `function_call`.

    Raises:
        ApiError: 400 for malformed functions, and for functions beside tools.
    """
    chat.messages = [_converted(message, i) for i, message in enumerate(chat.messages)]
    choice = chat.function_call
    if chat.functions is None:
        if choice not in (None, "none"):
            raise bad_request("function_call needs functions; use tool_choice with tools", "function_call")
        return False
    if not chat.functions:
        raise bad_request("functions must hold at least one function; omit the field for none", "functions")
    if chat.tools is not None or chat.tool_choice is not None:
        raise bad_request("set either tools or functions, not both", "functions")
    for i, function in enumerate(chat.functions):
        if not isinstance(function.get("name"), str):
            raise bad_request(f"functions[{i}].name must be a string", "functions")
    chat.tools = [{"type": "function", "function": function} for function in chat.functions]
    chat.parallel_tool_calls = False
    if isinstance(choice, dict):
        name = choice.get("name")
        if name not in [function["name"] for function in chat.functions]:
            raise bad_request(
                f"function_call names {str(name)[:64]!r}, which is not one of the functions", "function_call"
            )
        chat.tool_choice = {"type": "function", "function": {"name": name}}
    elif choice is None or choice in _CHOICES:
        chat.tool_choice = choice
    else:
        raise bad_request(
            "function_call must be none, auto, or an object with the name of a function", "function_call"
        )
    return True


def _converted(message: dict[str, Any], index: int) -> dict[str, Any]:
    """Return a message with `tool_calls` instead of `function_call`, or with role `tool` instead of `function`."""
    if message.get("role") == "function":
        return {"tool_call_id": f"call_{index - 1}", **message, "role": "tool"}
    call = message.get("function_call")
    if message.get("role") != "assistant" or not isinstance(call, dict) or message.get("tool_calls"):
        return message
    kept = {key: value for key, value in message.items() if key not in ("function_call", "tool_calls")}
    return {**kept, "tool_calls": [{"id": f"call_{index}", "type": "function", "function": call}]}
