"""The tools of the Responses API as functions of a chat.

function           a function
namespace          its functions, named `namespace__function`; answers name namespace and function apart again
any other type     run by OpenAI or written in another language than JSON: left out, and a warning says so
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.serve.http.errors import bad_request

_SEPARATOR = "__"
_KEPT = ("name", "description", "strict")
_MAX_WARNINGS = 16  # a longer list of tools is summed up
ToolDict = dict[str, Any]


def flat_name(item: ToolDict) -> Any:
    """Return the name by which the model knows the function of a tool, call or choice that may have a namespace."""
    namespace, name = item.get("namespace"), item.get("name")
    if isinstance(namespace, str) and namespace and isinstance(name, str):
        return f"{namespace}{_SEPARATOR}{name}"
    return name


def namespaced_names(tools: Sequence[ToolDict] | None) -> dict[str, tuple[str, str]]:
    """Return namespace and name of the functions in namespaces, by the name that the model knows."""
    found = {}
    for tool in tools or ():
        inner = tool.get("tools") if tool.get("type") == "namespace" else None
        for function in inner if isinstance(inner, list) else ():
            if isinstance(function, dict):
                named = {"namespace": tool.get("name"), "name": function.get("name")}
                flat = flat_name(named)
                if isinstance(flat, str):
                    found[flat] = (str(named["namespace"]), str(named["name"]))
    return found


def chat_tools(tools: Sequence[ToolDict]) -> tuple[list[ToolDict], list[str]]:
    """Convert the tools of a request.

    Returns:
        The functions in the form of the chat API, and a warning for each tool that is left out.

    Raises:
        ApiError: 400 for a malformed namespace.
    """
    functions: list[ToolDict] = []
    left_out: list[str] = []
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        if tool.get("type") == "namespace":
            for j, inner in enumerate(_inner_tools(tool, where)):
                if inner.get("type") == "function":
                    functions.append(_function({**inner, "namespace": tool["name"]}))
                else:
                    left_out.append(_unused(inner, f"{where}.tools[{j}]"))
        elif tool.get("type") == "function":
            functions.append(_function(tool))
        else:
            left_out.append(_unused(tool, where))
    return functions, summed_up(left_out)


def _inner_tools(namespace: ToolDict, where: str) -> list[ToolDict]:
    inner = namespace.get("tools")
    if not isinstance(namespace.get("name"), str) or not namespace["name"]:
        raise bad_request(f"{where}.name must be a string: the name of the namespace", "tools")
    if not isinstance(inner, list) or not all(isinstance(tool, dict) for tool in inner):
        raise bad_request(f"{where}.tools must be a list of tools", "tools")
    return inner


def _function(tool: ToolDict) -> ToolDict:
    """Return a function in the form of the chat API."""
    function = {name: tool[name] for name in _KEPT if tool.get(name) is not None}
    if "name" in function:
        function["name"] = flat_name(tool)
    function["parameters"] = {} if tool.get("parameters") is None else tool["parameters"]
    return {"type": "function", "function": function}


def _unused(tool: ToolDict, where: str) -> str:
    kind, name = str(tool.get("type"))[:64], tool.get("name")
    named = f" {name[:64]!r}" if isinstance(name, str) else ""
    return f"{where}{named} of type {kind!r} is not used: Quire calls functions only"


def summed_up(warnings: list[str]) -> list[str]:
    """Return the first warnings of a list, and the number of the others."""
    more = len(warnings) - _MAX_WARNINGS
    return warnings if more <= 0 else [*warnings[:_MAX_WARNINGS], f"{more} more tools are not used"]


# ---------------------------------------------------------------------------------------- choice


def chat_tool_choice(choice: str | ToolDict | None) -> str | ToolDict | None:
    """Return `tool_choice` in the form of the chat API.

    Raises:
        ApiError: 400 for a choice of a tool that is left out.
    """
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "allowed_tools":
        return _named_function(choice)
    tools = choice.get("tools")
    if isinstance(tools, list):
        functions = [t for t in tools if not isinstance(t, dict) or t.get("type") == "function"]
        if tools and not functions:
            raise bad_request("tool_choice.tools must name at least one function", "tool_choice")
        tools = [_named_function(tool) if isinstance(tool, dict) else tool for tool in functions]
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}


def _named_function(choice: ToolDict) -> ToolDict:
    kind = choice.get("type")
    if isinstance(kind, str) and kind != "function":
        raise bad_request(
            f"tool_choice names a tool of type {kind[:64]!r}; Quire calls functions only", "tool_choice"
        )
    return {"type": kind, "function": {"name": flat_name(choice)}}
