"""Parameters of functions in formats that write each argument by itself, strings without quotes.

The text of an argument is JSON or a bare string, which only the function's schema can tell: `<parameter=zip>` holds
`01234`, which is a string or a number. This module finds the types of a parameter, turns the text of an argument into
JSON, and writes the rules of arguments for grammars.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Schema: TypeAlias = Mapping[str, Any]

_MAX_REFERENCES = 16
_MAX_LITERAL = 100_000  # characters of a Python literal
_NOTES = frozenset(
    {"title", "description", "default", "examples", "deprecated"}
)  # keys that constrain nothing
_DEFINITIONS = ("$defs", "definitions")
STRING = frozenset({"string"})
STRING_OR_NULL = frozenset({"string", "null"})


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a function: its name, its schema with the definitions that it may refer to, and its types.

    `types` holds names of JSON types; it is None if the schema allows any type or does not say.
    """

    name: str
    schema: Schema
    required: bool
    types: frozenset[str] | None

    @property
    def words(self) -> list[str] | None:
        """Return the strings that are allowed if the schema lists them, otherwise None."""
        values = self.schema.get("enum", [self.schema["const"]] if "const" in self.schema else None)
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            return None
        return values

    @property
    def is_bare(self) -> bool:
        """Return whether every text is a valid argument, either as a string or as JSON."""
        if self.words is not None:
            return False
        if self.types is None:
            return not (set(self.schema) - _NOTES - set(_DEFINITIONS))
        return self.types in (STRING, STRING_OR_NULL)


def parameter(function: Schema, name: str) -> Parameter:
    """Return a parameter of a function whose arguments have the schema `function`."""
    properties = function.get("properties")
    found = properties.get(name) if isinstance(properties, Mapping) else None
    schema = found if isinstance(found, Mapping) else {}
    shared = {key: function[key] for key in _DEFINITIONS if key in function}
    required = function.get("required")
    return Parameter(
        name,
        {**schema, **shared},
        isinstance(required, list) and name in required,
        _types(schema, function, _MAX_REFERENCES),
    )


def parameters(function: Schema) -> list[Parameter]:
    """Return the parameters that a function declares, in their order."""
    properties = function.get("properties")
    return [parameter(function, name) for name in properties] if isinstance(properties, Mapping) else []


def any_parameters(function: Schema) -> tuple[int, int | None]:
    """Return the least and the largest number of arguments of a function that declares no parameters."""
    if function.get("additionalProperties") is False:
        return 0, 0
    least, most = function.get("minProperties"), function.get("maxProperties")
    return least if isinstance(least, int) else 0, most if isinstance(most, int) else None


def _types(schema: Any, root: Schema, references: int) -> frozenset[str] | None:
    if not isinstance(schema, Mapping) or references == 0:
        return None
    if "$ref" in schema:
        return _types(_resolved(schema["$ref"], root), root, references - 1)
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset({kind})
    if isinstance(kind, list):
        return frozenset(name for name in kind if isinstance(name, str))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return frozenset(_type_of(value) for value in values)
    for key in ("anyOf", "oneOf"):
        if isinstance(branches := schema.get(key), list):
            found = [_types(branch, root, references - 1) for branch in branches]
            return None if None in found else frozenset().union(*(types or () for types in found))
    if isinstance(parts := schema.get("allOf"), list):
        known = [types for part in parts if (types := _types(part, root, references - 1)) is not None]
        return frozenset.intersection(*known) if known else None
    if "properties" in schema:
        return frozenset({"object"})
    return frozenset({"array"}) if "items" in schema else None


def _resolved(reference: Any, root: Schema) -> Any:
    """Return the schema that a reference such as `#/$defs/City` names, or None."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    found: Any = root
    for step in reference[2:].split("/"):
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def _type_of(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    return {float: "number", str: "string", list: "array", dict: "object"}.get(type(value), "null")


def _fits(value: object, types: frozenset[str]) -> bool:
    kind = _type_of(value)
    whole = isinstance(value, float) and value.is_integer()
    return kind in types or ("number" in types and kind == "integer") or ("integer" in types and whole)


def _refuse(name: str) -> object:
    raise ValueError(name)


def json_of(text: str, types: frozenset[str] | None) -> str:
    """Return the argument that a model wrote as `text`, as JSON.

    The text is taken as JSON if that has one of the types, or if a string has not; then as a Python literal, because
    templates write `True` and `None`; otherwise as a string.
    """
    bare = text.strip()
    if types == STRING:
        return json.dumps(text, ensure_ascii=False)
    try:
        value = json.loads(bare, parse_constant=_refuse)
        if types is None or "string" not in types or _fits(value, types):
            return bare
    except (ValueError, RecursionError):
        pass
    if types is not None and len(bare) <= _MAX_LITERAL:
        try:
            value = ast.literal_eval(bare)
            if not isinstance(value, str) and _fits(value, types):
                return json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            pass
    return json.dumps(text, ensure_ascii=False)


def separated(
    add: Callable[[str], None], prefix: str, items: Sequence[tuple[str, bool]], separator: str
) -> str:
    """Add Lark rules for items in their order, optional ones among them, and return an expression for the list.

    Args:
        add: adds a rule.
        prefix: the start of the names of the rules.
        items: the expression of each item, and whether it is required.
        separator: the expression between two items.
    """
    if not items:
        return ""
    for at, (item, required) in reversed(list(enumerate(items))):
        last = at + 1 == len(items)
        for kind, before in (("first", ""), ("more", f"{separator} ")):
            with_item = f"{before}{item}" if last else f"{before}{item} {prefix}_more_{at + 1}"
            without = '""' if last else f"{prefix}_{kind}_{at + 1}"
            add(f"{prefix}_{kind}_{at}: {with_item}" + ("" if required else f" | {without}"))
    return f"{prefix}_first_0"
