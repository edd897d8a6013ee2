"""A request of Anthropic's API as a chat.

system                      the first message
text, thinking              content and reasoning of a message
tool_use, tool_result       calls of an assistant's message, and messages of role tool
last message: assistant     its text is continued
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.serve.api.protocol.chat import ChatRequest
from quire.serve.api.protocol.fields import shared_fields
from quire.serve.api.protocol.messages import CountTokensRequest
from quire.serve.http.errors import bad_request

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_BLOCKS = {
    "system": ("text",),
    "user": ("text", "document", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "tool_result": ("text", "document"),
}
ChatMessageDict = dict[str, Any]


def chat_of(wanted: CountTokensRequest) -> tuple[ChatRequest, list[str]]:
    """The same as a chat, and warnings about what has no effect. Raises ApiError 400."""
    for name in ("container", "mcp_servers"):
        if getattr(wanted, name):
            raise bad_request(f"{name} is not available in Quire", name)
    if wanted.n not in (None, 1):
        raise bad_request("n must be 1 here: use /v1/chat/completions", "n")
    if wanted.stop is not None:
        raise bad_request("stop is called stop_sequences here", "stop")
    messages = _messages(wanted)
    chat = ChatRequest(messages=messages, **shared_fields(wanted))
    chat.stop = wanted.stop_sequences
    last = messages[-1]
    if last["role"] == "assistant" and not last.get("tool_calls") and last["content"]:
        chat.continue_final_message = True
    _tools(wanted, chat)
    config = wanted.output_config or {}
    if (found := config.get("format") or wanted.output_format) is not None:
        if not isinstance(found, dict) or found.get("type") != "json_schema":
            raise bad_request("output_config.format must have type json_schema", "output_config")
        chat.response_format = found
    if config.get("effort"):
        chat.reasoning_effort = _text(config, "effort", "output_config")
    warnings = ["context_management has no effect in Quire"] if wanted.context_management else []
    return chat, [*warnings, *_thinking(wanted, chat)]


def _thinking(wanted: CountTokensRequest, chat: ChatRequest) -> list[str]:
    """Whether the model is to think: a variable of chat templates."""
    thinking = wanted.thinking
    if thinking is None:
        return []
    kind = thinking.get("type")
    if kind not in ("enabled", "adaptive", "between_tools", "disabled"):
        raise bad_request("thinking.type must be enabled, adaptive or disabled", "thinking")
    chat.chat_template_kwargs = {"enable_thinking": kind != "disabled", **(chat.chat_template_kwargs or {})}
    chat.include_reasoning = kind != "disabled" and thinking.get("display") != "omitted"
    return ["thinking.budget_tokens has no effect in Quire"] if "budget_tokens" in thinking else []


# ----------------------------------------------------------------------------------------- tools


def _tools(wanted: CountTokensRequest, chat: ChatRequest) -> None:
    if wanted.tools:  # an empty list is as good as none
        chat.tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(wanted.tools)]
    choice = wanted.tool_choice
    if choice is None:
        return
    kind = choice.get("type")
    if kind == "tool":
        name = _text(choice, "name", "tool_choice")
        chat.tool_choice = {"type": "function", "function": {"name": name}}
    elif isinstance(kind, str) and kind in _CHOICES:
        chat.tool_choice = _CHOICES[kind]
    else:
        raise bad_request("tool_choice.type must be auto, any, tool or none", "tool_choice")
    if choice.get("disable_parallel_tool_use"):
        chat.parallel_tool_calls = False


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise bad_request(f"{where} has type {str(tool['type'])[:64]!r}; Quire takes type custom", "tools")
    if not isinstance(tool.get("input_schema"), dict):
        raise bad_request(f"{where}.input_schema must be a JSON schema", "tools")
    function = {"name": tool.get("name"), "description": tool.get("description") or ""}
    function["parameters"] = tool["input_schema"]
    if tool.get("strict") is not None:
        function["strict"] = tool["strict"]
    return {"type": "function", "function": function}


# -------------------------------------------------------------------------------------- messages


def _messages(wanted: CountTokensRequest) -> list[ChatMessageDict]:
    found: list[ChatMessageDict] = []
    if wanted.system:
        found.append({"role": "system", "content": _texts(wanted.system, "system")})
    names: dict[str, str] = {}  # of functions, by the id of their call
    for i, message in enumerate(wanted.messages):
        role, where = message.get("role"), f"messages[{i}]"
        if role not in ("user", "assistant", "system"):
            raise bad_request(f"{where}.role must be user or assistant, got {str(role)[:64]!r}", "messages")
        blocks = _blocks(message.get("content"), role, f"{where}.content")
        found += _results(blocks, names, where) + _message(role, blocks, names, where)
    if not wanted.messages:
        raise bad_request("messages must hold at least one message", "messages")
    return _turns(found)


def _turns(messages: list[ChatMessageDict]) -> list[ChatMessageDict]:
    """Neighbours of the same role are one turn."""
    turns: list[list[ChatMessageDict]] = []
    for message in messages:
        last: ChatMessageDict = turns[-1][-1] if turns else {"role": None}
        if message["role"] == last["role"] != "tool" and "tool_calls" not in last:
            turns[-1].append(message)
        else:
            turns.append([message])
    return [_joined(turn) for turn in turns]


def _joined(turn: list[ChatMessageDict]) -> ChatMessageDict:
    found = {**turn[-1], "content": "\n".join(m["content"] for m in turn if m["content"])}
    thoughts = [m["reasoning_content"] for m in turn if "reasoning_content" in m]
    return {**found, "reasoning_content": "\n".join(thoughts)} if thoughts else found


def _blocks(content: Any, role: str, where: str) -> list[dict[str, Any]]:
    """The blocks of a message or of a tool's result, each of a type that may be there."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    if not isinstance(content, list):
        raise bad_request(f"{where} must be a string or a list of blocks")
    for i, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind not in _BLOCKS[role]:
            raise bad_request(
                f"{where}[{i}] has type {str(kind)[:64]!r}; Quire takes {', '.join(_BLOCKS[role])} here"
            )
    return content


def _texts(content: Any, role: str, where: str = "") -> str:
    """Blocks of text, together: not every template reads them one by one."""
    where = where or role
    return "\n".join(_words(block, f"{where}[{i}]") for i, block in enumerate(_blocks(content, role, where)))


def _words(block: dict[str, Any], where: str) -> str:
    if block["type"] == "text":
        return _text(block, "text", where)
    source = block.get("source")
    if not isinstance(source, dict) or source.get("type") != "text":
        raise bad_request(f"{where}.source must have type text: Quire reads no other documents", "messages")
    return _text(source, "data", f"{where}.source")


def _results(blocks: Sequence[dict[str, Any]], names: dict[str, str], where: str) -> list[ChatMessageDict]:
    """Results of tools come before what the user says beside them."""
    found = []
    for i, block in enumerate(blocks):
        if block["type"] == "tool_result":
            at = f"{where}.content[{i}]"
            call = _text(block, "tool_use_id", at)
            content = _texts(block.get("content") or "", "tool_result", f"{at}.content")
            found.append({"role": "tool", "tool_call_id": call, "content": content})
            if call in names:
                found[-1]["name"] = names[call]
    return found


def _message(
    role: str, blocks: list[dict[str, Any]], names: dict[str, str], where: str
) -> list[ChatMessageDict]:
    """What else the message says; nothing, if it holds results of tools alone."""
    texts = [block for block in blocks if block["type"] in ("text", "document")]
    if not texts and any(block["type"] == "tool_result" for block in blocks):
        return []
    message: ChatMessageDict = {"role": role, "content": _texts(texts, role, f"{where}.content")}
    thoughts, calls = [], []
    for i, block in enumerate(blocks):
        at = f"{where}.content[{i}]"
        if block["type"] == "thinking":
            thoughts.append(_text(block, "thinking", at))
        elif block["type"] == "tool_use":
            calls.append(_call(block, at))
            names[block["id"]] = block["name"]
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return [message]


def _call(block: dict[str, Any], where: str) -> dict[str, Any]:
    name, given = _text(block, "name", where), block.get("input", {})
    if not isinstance(given, dict):
        raise bad_request(f"{where}.input must be an object", "messages")
    call_id = _text(block, "id", where)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": given}}


def _text(holder: dict[str, Any], name: str, where: str) -> str:
    value = holder.get(name)
    if not isinstance(value, str):
        raise bad_request(f"{where}.{name} must be a string")
    return value
