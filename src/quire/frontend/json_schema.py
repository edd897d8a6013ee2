"""The check that a JSON schema can be enforced exactly. A keyword that is not listed here is refused by name.

The grammar library ignores keywords that it does not know, as JSON Schema 2020-12 (core, 6.5) permits, so a misspelt
`minLenght` would silently allow everything. Each keyword listed here is either enforced by the library or does not
affect validity. Keywords that the library enforces only approximately are made exact, or refused. The check is pure
Python and linear in the size of the schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from quire.frontend.patterns import with_ecma_classes
from quire.types import RequestError

_MAX_NESTING = 50  # levels of schemas; the library's own JSON reader stops at 128 levels of objects and lists
STRUCTURED_OUTPUTS = "structured_outputs"  # the request field that errors name
_EXACT_INTEGERS = 2**53  # the library stores numbers as float64

_ENFORCED = {
    "type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "properties", "patternProperties",
    "additionalProperties", "required", "minProperties", "maxProperties", "items", "prefixItems",
    "additionalItems", "minItems", "maxItems", "minLength", "maxLength", "pattern", "format", "minimum",
    "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
}  # fmt: skip
_ANNOTATIONS = {
    "$schema", "$id", "id", "$anchor", "$comment", "$defs", "definitions", "title", "description", "default",
    "example", "examples", "readOnly", "writeOnly", "deprecated", "contentMediaType", "contentEncoding",
    "contentSchema", "discriminator", "externalDocs", "xml",
}  # fmt: skip
_OPTIONS = "x-guidance"  # the library's options; one of them drops keywords that it cannot enforce
_FORMATS = {
    "date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
    "float", "double",  # from OpenAPI: every number is valid
}  # fmt: skip

_SCHEMA = ("additionalProperties", "items", "additionalItems")
_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_HINTS = {
    "nullable": 'write "type": [..., "null"]',
    "$dynamicRef": "use $ref",
    "$recursiveRef": "use $ref",
    "dependencies": "use anyOf",
}

# The library checks only the shape of some formats. These patterns also exclude 29 February in common years and
# second 60, which the parsers of most languages refuse, and host names with encoded labels (IDNA).
_LEAP_YEAR = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_COMMON_DAY = r"[0-9]{4}-(?:(?:0[13-9]|1[0-2])-[0-9]{2}|02-(?:[01][0-9]|2[0-8]))"
_DATE = rf"(?:{_COMMON_DAY}|{_LEAP_YEAR}-02-29)"
_TIME = r"[0-9]{2}:[0-9]{2}:[0-5][0-9](?:[^0-9].*)?"
_LETTER = "[A-Za-z0-9-]"
_LABEL = rf"(?:{_LETTER}{{1,3}}|{_LETTER}{{2}}(?:[A-Za-z0-9]{_LETTER}|-[A-Za-z0-9]){_LETTER}*)"
_REFINED: dict[str, dict[str, Any]] = {
    "date": {"pattern": rf"^{_DATE}$"},
    "time": {"pattern": rf"^{_TIME}$"},
    "date-time": {"pattern": rf"^{_DATE}[Tt]{_TIME}$"},
    "hostname": {"pattern": rf"^{_LABEL}(?:\.{_LABEL})*$", "maxLength": 253},
}
# In JSON these characters need \u escapes, which Quire does not allow (structured_spec.py).
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
_ESCAPED_CONTROL = re.compile(
    r"\\(?:[av]|(?:x|u00|U000000)(?:0[0-7bef]|1[0-9a-f]|7f)|[xuU]\{0*(?:[0-7bef]|1[0-9a-f]|7f)\})",
    re.IGNORECASE,
)


def checked_schema(schema: Any) -> dict[str, Any]:
    """Return the schema in the form that the grammar library enforces exactly.

    The library itself refuses some more schemas later, when the engine compiles them (grammar/).

    Args:
        schema: the parsed JSON schema.

    Raises:
        RequestError: if the schema cannot be enforced. The message names the keyword and its JSON pointer.
    """
    if schema is False:
        raise _error("no value satisfies the schema false")
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise RequestError(
            f"json schema must be an object, got {type(schema).__name__}", param=STRUCTURED_OUTPUTS
        )
    return _checked(schema, "#", 0)


def _error(reason: str) -> RequestError:
    return RequestError(f"json schema: {reason}", param=STRUCTURED_OUTPUTS)


def _checked(schema: Any, at: str, depth: int) -> Any:
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        raise _error(f"{at} must be an object or a boolean, got {type(schema).__name__}")
    if depth > _MAX_NESTING:
        raise _error(f"{at[:60]}... is nested more than {_MAX_NESTING} schemas deep")
    for keyword in schema:
        _check_keyword(keyword, at)
    _check_values(schema, at)
    checked = dict(schema)
    for keyword, part in schema.items():
        if keyword in _NAMED:
            if not isinstance(part, dict):
                raise _error(f"{keyword} at {at} must be an object, got {type(part).__name__}")
            checked[keyword] = {
                k: _checked(v, f"{at}/{keyword}/{_pointer_escaped(k)}", depth + 1) for k, v in part.items()
            }
        elif keyword in _SCHEMAS and isinstance(part, list):
            checked[keyword] = [_checked(v, f"{at}/{keyword}/{i}", depth + 1) for i, v in enumerate(part)]
        elif keyword in _SCHEMA:
            checked[keyword] = _checked(part, f"{at}/{keyword}", depth + 1)
    if isinstance(pattern := schema.get("pattern"), str):
        checked["pattern"] = with_ecma_classes(pattern)
    if "patternProperties" in schema:
        checked["patternProperties"] = _with_ecma_keys(checked["patternProperties"])
    if (refined := _REFINED.get(str(schema.get("format")))) is not None:
        checked["allOf"] = [*checked.get("allOf", ()), refined]
    return checked


def _with_ecma_keys(by_pattern: dict[str, Any]) -> dict[str, Any]:
    """Replace the character classes in the keys, and keep keys distinct that become equal."""
    replaced: dict[str, Any] = {}
    for pattern, schema in by_pattern.items():
        pattern = with_ecma_classes(pattern)
        while pattern in replaced:
            pattern = f"(?:{pattern})"
        replaced[pattern] = schema
    return replaced


def _pointer_escaped(name: Any) -> str:
    """Escape a name for a JSON pointer (RFC 6901)."""
    return str(name).replace("~", "~0").replace("/", "~1")


def _check_keyword(keyword: Any, at: str) -> None:
    if not isinstance(keyword, str):
        raise _error(f"the keywords at {at} must be strings, got {keyword!r}")
    if keyword in _ENFORCED or keyword in _ANNOTATIONS:
        return
    if keyword.startswith("x-") and keyword != _OPTIONS:
        return
    hint = f"; {_HINTS[keyword]}" if keyword in _HINTS else ""
    raise _error(f"the keyword {keyword!r} at {at} cannot be enforced{hint}")


def _check_values(schema: dict[str, Any], at: str) -> None:
    """Raise RequestError for values that the library accepts but does not enforce exactly."""
    form = schema.get("format")
    if form is not None and (not isinstance(form, str) or form not in _FORMATS):
        known = ", ".join(sorted(_FORMATS))
        raise _error(f"the format {form!r} at {at} cannot be enforced; the formats that can be are {known}")
    if "additionalItems" in schema and not isinstance(schema.get("items"), list):
        raise _error(f"the keyword 'additionalItems' at {at} needs a list in 'items'")
    required = schema.get("required")
    named = len(set(map(str, required))) if isinstance(required, list) else 0
    least = schema.get("minProperties", 0)
    if isinstance(least, (int, float)) and least > named + 1:
        # An answer may repeat the key of an additional property, and a repeated key counts once.
        raise _error(
            f"the keyword 'minProperties' at {at} cannot be enforced beyond the number of 'required' properties "
            f"plus one ({named + 1}), got {least}"
        )
    for keyword in ("const", "enum", *_NUMBERS):
        for leaf in _leaves(schema.get(keyword)):
            if isinstance(leaf, int) and abs(leaf) > _EXACT_INTEGERS:
                raise _error(
                    f"the keyword {keyword!r} at {at} holds an integer beyond 2**53, which cannot be enforced"
                )
            if isinstance(leaf, str) and _CONTROL.search(leaf):
                raise _error(_CONTROLS.format(keyword, at))
    patterns = {
        "pattern": [schema.get("pattern")],
        "patternProperties": schema.get("patternProperties") or (),
    }
    for keyword, values in patterns.items():
        if any(isinstance(pattern, str) and _matches_control(pattern) for pattern in values):
            raise _error(_CONTROLS.format(keyword, at))


_CONTROLS = "the keyword {!r} at {} holds a control character, which cannot be enforced"


def _matches_control(pattern: str) -> bool:
    """Return whether a pattern names a control character outside ranges and negated classes, where it may stand."""
    classes: list[bool] = []  # open character classes: whether each is negated
    i = 0
    while i < len(pattern):
        escape = _ESCAPED_CONTROL.match(pattern, i)
        end = escape.end() if escape else i + (2 if pattern[i] == "\\" else 1)
        if escape or _CONTROL.match(pattern, i):
            in_range = pattern[i - 1 : i] == "-" or (
                pattern[end : end + 1] == "-" and pattern[end + 1 : end + 2] != "]"
            )
            if not classes or not (classes[-1] or in_range):
                return True
        elif pattern[i] == "[":
            classes.append(pattern[end : end + 1] == "^")
        elif pattern[i] == "]" and classes:
            classes.pop()
        i = end
    return False


def _leaves(value: Any) -> Iterator[Any]:
    """Yield every number, string and object key in a JSON value, but no booleans."""
    todo = [value]
    while todo:
        item = todo.pop()
        if isinstance(item, dict):
            todo += [*item, *item.values()]
        elif isinstance(item, (list, tuple)):
            todo += item
        elif not isinstance(item, bool):
            yield item


def read_json(text: str) -> Any:
    """Parse standard JSON, without NaN and Infinity. Raise ValueError if `text` is something else."""

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
