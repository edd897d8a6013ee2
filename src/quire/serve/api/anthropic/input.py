"""The conversion of Anthropic's requests into chats.

system                      the first message
text, thinking              content and reasoning of a message
tool_use, tool_result       calls of an assistant's message, and messages with role tool
last message: assistant     the answer continues its text
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.serve.api.protocol.chat import ChatRequest
from quire.serve.api.protocol.fields import shared_fields
from quire.serve.api.protocol.messages import CountTokensRequest
from quire.serve.api.responses.tools import summed_up
from quire.serve.http.errors import bad_request

_TURNS = ("user", "assistant")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_BLOCKS = {
    "system": ("text",),
    "user": ("text", "document", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "tool_result": ("text", "document", "tool_reference"),
}
# Blocks about tools that Anthropic runs itself, which a client sends again with the conversation.
_SERVER_BLOCKS = (
    "server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "code_execution_tool_result",
    "bash_code_execution_tool_result", "text_editor_code_execution_tool_result", "tool_search_tool_result",
    "mcp_tool_use", "mcp_tool_result", "container_upload", "compaction",
)  # fmt: skip
ChatMessageDict = dict[str, Any]


def chat_of(request: CountTokensRequest) -> tuple[ChatRequest, list[str]]:
    """Convert a request into a chat.

    Returns:
        The chat, and a warning for each field without effect.

    Raises:
        ApiError: 400 for fields and blocks that Quire does not support.
    """
    for name in ("container", "mcp_servers"):
        if getattr(request, name):
            raise bad_request(f"{name} is not available in Quire", name)
    if request.n not in (None, 1):
        raise bad_request(f"n must be 1 on this route, got {request.n}: use /v1/chat/completions", "n")
    if request.stop is not None:
        raise bad_request("stop is called stop_sequences on this route", "stop")
    messages = _messages(request)
    chat = ChatRequest(messages=messages, **shared_fields(request))
    chat.stop = request.stop_sequences
    last = messages[-1]
    if last["role"] == "assistant" and not last.get("tool_calls") and last["content"]:
        chat.continue_final_message = True
    unused = _tools(request, chat)
    config = request.output_config or {}
    output_format = request.output_format if config.get("format") is None else config["format"]
    if output_format is not None:
        if not isinstance(output_format, dict) or output_format.get("type") != "json_schema":
            raise bad_request("output_config.format must have type json_schema", "output_config")
        chat.response_format = output_format
    if config.get("effort") not in (None, ""):
        chat.reasoning_effort = _text(config, "effort", "output_config")
    warnings = ["context_management has no effect in Quire"] if request.context_management else []
    return chat, [*warnings, *unused, *_left_out(request), *_thinking(request, chat)]


def _thinking(request: CountTokensRequest, chat: ChatRequest) -> list[str]:
    """Set the chat template's variable that switches reasoning on or off; return warnings."""
    thinking = request.thinking
    if thinking is None:
        return []
    kind = thinking.get("type")
    if kind not in ("enabled", "adaptive", "between_tools", "disabled"):
        raise bad_request("thinking.type must be enabled, adaptive or disabled", "thinking")
    chat.chat_template_kwargs = {"enable_thinking": kind != "disabled", **(chat.chat_template_kwargs or {})}
    chat.include_reasoning = kind != "disabled" and thinking.get("display") != "omitted"
    return ["thinking.budget_tokens has no effect in Quire"] if "budget_tokens" in thinking else []


# ----------------------------------------------------------------------------------------- tools


def _tools(request: CountTokensRequest, chat: ChatRequest) -> list[str]:
    """Set the chat's tools and their choice. Return a warning for each tool that Anthropic defines: it is left out."""
    unused = []
    functions = []
    for i, tool in enumerate(request.tools or ()):
        if tool.get("type") in (None, "custom"):
            functions.append(_tool(tool, f"tools[{i}]"))
        else:
            shown = str(tool["type"])[:64]
            unused.append(
                f"tools[{i}] of type {shown!r} is not used: Quire calls tools with an input_schema only"
            )
    chat.tools = functions or None  # an empty list means no tools
    choice = request.tool_choice
    if choice is None:
        return summed_up(unused)
    kind = choice.get("type")
    if kind == "tool":
        name = _text(choice, "name", "tool_choice")
        chat.tool_choice = {"type": "function", "function": {"name": name}}
    elif isinstance(kind, str) and kind in _CHOICES:
        chat.tool_choice = _CHOICES[kind]
    else:
        raise bad_request("tool_choice.type must be auto, any, tool or none", "tool_choice")
    if chat.tool_choice == "auto" and not functions:
        chat.tool_choice = None
    if choice.get("disable_parallel_tool_use"):
        chat.parallel_tool_calls = False
    return summed_up(unused)


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(tool.get("input_schema"), dict):
        raise bad_request(f"{where}.input_schema must be a JSON schema", "tools")
    function = {"name": tool.get("name"), "description": tool.get("description") or ""}
    function["parameters"] = tool["input_schema"]
    if tool.get("strict") is not None:
        function["strict"] = tool["strict"]
    return {"type": "function", "function": function}


# -------------------------------------------------------------------------------------- messages


def _messages(request: CountTokensRequest) -> list[ChatMessageDict]:
    messages: list[ChatMessageDict] = []
    if request.system:
        messages.append({"role": "system", "content": _texts(request.system, "system")})
    names: dict[str, str] = {}  # function names by call id
    for i, message in enumerate(request.messages):
        role, where = message.get("role"), f"messages[{i}]"
        if role not in ("user", "assistant", "system"):
            raise bad_request(f"{where}.role must be user or assistant, got {str(role)[:64]!r}", "messages")
        blocks = _blocks(message.get("content"), role, f"{where}.content")
        messages += _results(blocks, names, where) + _message(role, blocks, names, where)
    if not request.messages:
        raise bad_request("messages must hold at least one message", "messages")
    return _merge_turns(messages)


def _merge_turns(messages: list[ChatMessageDict]) -> list[ChatMessageDict]:
    """Merge neighbouring messages of the same role."""
    turns: list[list[ChatMessageDict]] = []
    for message in messages:
        last: ChatMessageDict = turns[-1][-1] if turns else {"role": None}
        if message["role"] == last["role"] != "tool" and "tool_calls" not in last:
            turns[-1].append(message)
        else:
            turns.append([message])
    return [_join(turn) for turn in turns]


def _join(turn: list[ChatMessageDict]) -> ChatMessageDict:
    message = {**turn[-1], "content": "\n".join(m["content"] for m in turn if m["content"])}
    thoughts = [m["reasoning_content"] for m in turn if "reasoning_content" in m]
    return {**message, "reasoning_content": "\n".join(thoughts)} if thoughts else message


def _blocks(content: Any, role: str, where: str) -> list[dict[str, Any]]:
    """Return the content of a message or a tool result as blocks. Raise ApiError 400 for types not allowed there."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    if not isinstance(content, list):
        raise bad_request(f"{where} must be a string or a list of blocks")
    for i, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind not in _BLOCKS[role] and not (role in _TURNS and _is_server_block(block)):
            raise bad_request(
                f"{where}[{i}] has type {str(kind)[:64]!r}; Quire takes {', '.join(_BLOCKS[role])} here"
            )
    return content


def _is_server_block(block: Any) -> bool:
    kind = block.get("type") if isinstance(block, dict) else None
    return kind in _SERVER_BLOCKS


def _left_out(request: CountTokensRequest) -> list[str]:
    """Return a warning for each type of block that is left out of the messages."""
    blocks = (m["content"] for m in request.messages if isinstance(m.get("content"), list))
    kinds = dict.fromkeys(b["type"] for content in blocks for b in content if _is_server_block(b))
    return [f"content blocks of type {kind!r} are left out" for kind in kinds]


def _texts(content: Any, role: str, where: str = "") -> str:
    """Return the texts of blocks joined into one: not every template accepts a list."""
    where = where or role
    return "\n".join(
        _block_text(block, f"{where}[{i}]") for i, block in enumerate(_blocks(content, role, where))
    )


def _block_text(block: dict[str, Any], where: str) -> str:
    if block["type"] == "text":
        return _text(block, "text", where)
    if (
        block["type"] == "tool_reference"
    ):  # the result of a search for tools; the prompt lists all of them anyway
        return _text(block, "tool_name", where)
    source = block.get("source")
    if not isinstance(source, dict) or source.get("type") != "text":
        raise bad_request(
            f"{where}.source must have type text: Quire supports no other documents", "messages"
        )
    return _text(source, "data", f"{where}.source")


def _results(blocks: Sequence[dict[str, Any]], names: dict[str, str], where: str) -> list[ChatMessageDict]:
    """Return the tool results among the blocks as messages. They precede the user's text in the same message."""
    results = []
    for i, block in enumerate(blocks):
        if block["type"] == "tool_result":
            at = f"{where}.content[{i}]"
            call = _text(block, "tool_use_id", at)
            given = block.get("content")
            content = _texts("" if given is None else given, "tool_result", f"{at}.content")
            results.append({"role": "tool", "tool_call_id": call, "content": content})
            if call in names:
                results[-1]["name"] = names[call]
    return results


def _message(
    role: str, blocks: list[dict[str, Any]], names: dict[str, str], where: str
) -> list[ChatMessageDict]:
    """Return the other blocks as one message, or nothing if all blocks are tool results."""
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
