"""What a request asks for with `tools`, `tool_choice` and `parallel_tool_calls`, checked."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any, Literal

from quire.serve.api.protocol.chat import ChatRequest
from quire.serve.http.errors import bad_request

_MAX_NAME = 256
_MAX_TOOLS = 1024
_CHOICES = ("none", "auto", "required")
_SHAPE = 'tool_choice must be {"type": "function", "function": {"name": ...}} to name a function'


@dataclass(frozen=True, slots=True)
class ToolFunction:
    name: str
    parameters: Mapping[str, Any]  # JSON schema of the arguments
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolUse:
    """`tools` are what the model is told of; `functions` what it may, or with required must, call."""

    tools: list[dict[str, Any]]
    functions: tuple[ToolFunction, ...]
    choice: Literal["none", "auto", "required"]
    single: bool = False  # at most one call

    @property
    def forced(self) -> bool:
        return self.choice == "required"


NO_TOOLS = ToolUse([], (), "none")


def tool_use(chat: ChatRequest) -> ToolUse:
    """Raises ApiError 400 for tools, or a choice among them, that make no sense."""
    tools, choice = chat.tools, chat.tool_choice
    if tools is not None and not tools:
        raise bad_request("tools must hold at least one tool, or be left out", "tools")
    if choice is not None and choice != "none" and not tools:
        raise bad_request("tool_choice needs tools", "tool_choice")
    if len(tools or ()) > _MAX_TOOLS:
        raise bad_request(f"tools must hold at most {_MAX_TOOLS} tools", "tools")
    functions = tuple(_function(tool, f"tools[{index}]") for index, tool in enumerate(tools or ()))
    if not tools or choice == "none":
        return NO_TOOLS
    single = chat.parallel_tool_calls is False
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        mode, names = _allowed(choice, functions)
        kept = [(tool, function) for tool, function in zip(tools, functions) if function.name in names]
        return ToolUse([tool for tool, _ in kept], tuple(function for _, function in kept), mode, single)
    if isinstance(choice, dict):
        named = _named(choice, {function.name for function in functions})
        return ToolUse(tools, tuple(f for f in functions if f.name == named)[:1], "required", True)
    if choice not in (None, *_CHOICES):
        raise bad_request(
            "tool_choice must be none, auto, required, or an object that names a function", "tool_choice"
        )
    return ToolUse(tools, functions, "required" if choice == "required" else "auto", single)


def _function(tool: Mapping[str, Any], where: str) -> ToolFunction:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        raise bad_request(f"{where} must have type function, and a function", "tools")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME:
        raise bad_request(f"{where}.function.name must be a string of 1 to {_MAX_NAME} characters", "tools")
    if not isinstance(parameters, (dict, type(None))):
        raise bad_request(f"{where}.function.parameters must be a JSON schema", "tools")
    strict = function.get("strict")
    if not isinstance(strict, (bool, type(None))):
        raise bad_request(f"{where}.function.strict must be true or false", "tools")
    return ToolFunction(name, parameters or {}, bool(strict))


def _named(choice: Mapping[str, Any], names: Set[str]) -> str:
    """The function that `choice` names, one of `names`."""
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        raise bad_request(_SHAPE, "tool_choice")
    if name not in names:
        raise bad_request(f"tool_choice names {name[:64]!r}, which is not among the tools", "tool_choice")
    return name


def _allowed(
    choice: Mapping[str, Any], functions: tuple[ToolFunction, ...]
) -> tuple[Literal["auto", "required"], Set[str]]:
    """OpenAI's allowed_tools: a mode, and the names of the functions that may be called in it."""
    allowed = choice.get("allowed_tools")
    mode = allowed.get("mode") if isinstance(allowed, dict) else None
    tools = allowed.get("tools") if isinstance(allowed, dict) else None
    if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
        raise bad_request(
            "tool_choice.allowed_tools must have a mode, auto or required, and a list of tools", "tool_choice"
        )
    if not all(isinstance(tool, dict) for tool in tools):
        raise bad_request(_SHAPE, "tool_choice")
    names = {function.name for function in functions}
    return mode, {_named(tool, names) for tool in tools}
