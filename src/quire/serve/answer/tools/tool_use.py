"""The tools of a request: `tools`, `tool_choice` and `parallel_tool_calls`, checked."""

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
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, Any]  # JSON schema of the arguments
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request and how the model is to use them."""

    tools: list[dict[str, Any]]  # as the prompt lists them
    functions: tuple[ToolFunction, ...]  # those that may be called
    choice: Literal["none", "auto", "required"]
    single: bool = False  # at most one call

    @property
    def forced(self) -> bool:
        return self.choice == "required"


NO_TOOLS = ToolUse([], (), "none")


def tool_use(chat: ChatRequest) -> ToolUse:
    """Return the tools of a chat.

    Raises:
        ApiError: 400 for malformed tools, too many of them, or a `tool_choice` that does not fit them.
    """
    tools, choice = chat.tools, chat.tool_choice
    if tools is not None and not tools:
        raise bad_request("tools must hold at least one tool; omit the field for none", "tools")
    if choice is not None and choice != "none" and not tools:
        raise bad_request("tool_choice needs tools", "tool_choice")
    if len(tools or ()) > _MAX_TOOLS:
        raise bad_request(f"tools must hold at most {_MAX_TOOLS} tools, got {len(tools or ())}", "tools")
    functions = tuple(_function(tool, f"tools[{index}]") for index, tool in enumerate(tools or ()))
    if not tools or choice == "none":
        return NO_TOOLS
    single = chat.parallel_tool_calls is False
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        mode, names = _allowed_tools(choice, functions)
        kept = [(tool, function) for tool, function in zip(tools, functions) if function.name in names]
        return ToolUse([tool for tool, _ in kept], tuple(function for _, function in kept), mode, single)
    if isinstance(choice, dict):
        named = _selected_name(choice, {function.name for function in functions})
        return ToolUse(tools, tuple(f for f in functions if f.name == named)[:1], "required", True)
    if choice not in (None, *_CHOICES):
        raise bad_request(
            "tool_choice must be none, auto, required, or an object that names a function", "tool_choice"
        )
    return ToolUse(tools, functions, "required" if choice == "required" else "auto", single)


def _function(tool: Mapping[str, Any], where: str) -> ToolFunction:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        raise bad_request(f"{where} must have type function and an object `function`", "tools")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME:
        raise bad_request(f"{where}.function.name must be a string of 1 to {_MAX_NAME} characters", "tools")
    if not isinstance(parameters, (dict, type(None))):
        raise bad_request(f"{where}.function.parameters must be a JSON schema", "tools")
    strict = function.get("strict")
    if not isinstance(strict, (bool, type(None))):
        raise bad_request(f"{where}.function.strict must be true or false", "tools")
    return ToolFunction(name, parameters or {}, bool(strict))


def _selected_name(choice: Mapping[str, Any], names: Set[str]) -> str:
    """Return the name of the function that `choice` selects. Raise ApiError 400 if it is not one of `names`."""
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        raise bad_request(_SHAPE, "tool_choice")
    if name not in names:
        raise bad_request(f"tool_choice names {name[:64]!r}, which is not one of the tools", "tool_choice")
    return name


def _allowed_tools(
    choice: Mapping[str, Any], functions: tuple[ToolFunction, ...]
) -> tuple[Literal["auto", "required"], Set[str]]:
    """Return the mode and the function names of OpenAI's `allowed_tools`."""
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
    return mode, {_selected_name(tool, names) for tool in tools}
