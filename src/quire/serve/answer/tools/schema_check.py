"""Checks of JSON schemas that a grammar is to enforce, with errors that name the place in the schema."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from quire.frontend.structured_spec import grammar_spec
from quire.serve.answer.tools.call_grammar import arguments_schema
from quire.serve.answer.tools.tool_use import ToolUse
from quire.serve.api.protocol.chat import ChatRequest
from quire.serve.http.errors import bad_request
from quire.types import RequestError, StructuredOutputsParams

_TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SINGLE = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_POINTER = re.compile(r"#/(\S+)")


def check_tool_schemas(chat: ChatRequest, use: ToolUse) -> None:
    """Check the schemas of the functions whose arguments are enforced.

    Raises:
        ApiError: 400 that names the function and the path in its schema.
    """
    places = {tool["function"]["name"]: i for i, tool in reversed(list(enumerate(chat.tools or ())))}
    for function in use.functions:
        if not (use.forced or function.strict):
            continue
        schema = arguments_schema(function, exact=True)
        where = f"tools[{places[function.name]}] {function.name[:64]!r}"
        wrong = wrong_type(schema)
        if wrong is None:
            try:
                grammar_spec(StructuredOutputsParams(json=schema))
            except RequestError as error:
                wrong = _POINTER.sub(_as_path, str(error).removeprefix("json schema: "))
        if wrong is not None:
            raise bad_request(f"{where}: {wrong}", "tools")


def wrong_type(schema: Any) -> str | None:
    """Return the path and the value of the first `type` that JSON Schema does not have, as a sentence, or None."""
    for path, kind in _types(schema):
        for name in kind if isinstance(kind, list) else [kind]:
            if name not in _TYPES:
                return f"{path} must be one of {', '.join(_TYPES)}, got {str(name)[:64]!r}"
    return None


def _types(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of each `type`, without recursion on untrusted data."""
    waiting: list[tuple[str, Any]] = [("", schema)]
    while waiting:
        at, part = waiting.pop()
        if not isinstance(part, Mapping):
            continue
        if "type" in part:
            yield f"{at}type", part["type"]
        for keyword in _NAMED:
            if isinstance(named := part.get(keyword), Mapping):
                waiting += [(f"{at}{keyword}.{name}.", inner) for name, inner in named.items()]
        for keyword in _LISTS:
            if isinstance(parts := part.get(keyword), list):
                waiting += [(f"{at}{keyword}[{i}].", inner) for i, inner in enumerate(parts)]
        waiting += [(f"{at}{keyword}.", part[keyword]) for keyword in _SINGLE if keyword in part]


def _as_path(pointer: re.Match[str]) -> str:
    """Return a JSON pointer as names with dots."""
    return pointer[1].replace("/", ".").replace("~1", "/").replace("~0", "~")
