"""Which JSON schemas can be enforced: every keyword must be known here, or the schema is refused by its name.

The grammar library ignores keywords that it does not know, as the standard lets it (JSON Schema 2020-12,
core, 6.5), so a misspelt `minLenght` would silently allow everything. Here each keyword is one that the
library enforces, or one that says nothing about validity. What it enforces only nearly is made exact or
refused as well. Pure Python, linear in the size of the schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from quire.frontend.patterns import with_ecma_classes
from quire.types import RequestError

_MAX_NESTING = 50  # schemas in schemas; the library's own JSON reader stops at 128 objects and lists
_EXACT_INTEGERS = 2**53  # it keeps numbers as float64

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
_OPTIONS = "x-guidance"  # the library's own switches, among them one that drops what it cannot enforce
_FORMATS = {
    "date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
    "float", "double",  # of OpenAPI: any number is one
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

# The library checks some formats by the form of their parts. What this adds leaves out 29 February of common
# years and seconds of 60, which the parsers of most languages refuse, and host names with encoded labels (IDNA).
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
# Written as JSON, these need \u escapes, which Quire leaves out (structured.py).
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
_ESCAPED_CONTROL = re.compile(
    r"\\(?:[av]|(?:x|u00|U000000)(?:0[0-7bef]|1[0-9a-f]|7f)|[xuU]\{0*(?:[0-7bef]|1[0-9a-f]|7f)\})",
    re.IGNORECASE,
)


def checked_schema(schema: Any) -> dict[str, Any]:
    """The schema as the library is to see it. Raises RequestError, naming keyword and place, for one that
    cannot be enforced; what only the library can tell (see grammar/) comes later."""
    if schema is False:
        raise RequestError("json schema: no value satisfies false")
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise RequestError("json schema must be an object")
    return _checked(schema, "#", 0)


def _checked(schema: Any, at: str, depth: int) -> Any:
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        raise RequestError(f"json schema: {at} must be an object or a boolean")
    if depth > _MAX_NESTING:
        raise RequestError(f"json schema: {at[:60]}... is nested more than {_MAX_NESTING} schemas deep")
    for keyword in schema:
        _check_keyword(keyword, at)
    _check_values(schema, at)
    found = dict(schema)
    for keyword, part in schema.items():
        if keyword in _NAMED:
            if not isinstance(part, dict):
                raise RequestError(f"json schema: {keyword} at {at} must be an object")
            found[keyword] = {
                k: _checked(v, f"{at}/{keyword}/{_escaped(k)}", depth + 1) for k, v in part.items()
            }
        elif keyword in _SCHEMAS and isinstance(part, list):
            found[keyword] = [_checked(v, f"{at}/{keyword}/{i}", depth + 1) for i, v in enumerate(part)]
        elif keyword in _SCHEMA:
            found[keyword] = _checked(part, f"{at}/{keyword}", depth + 1)
    if isinstance(pattern := schema.get("pattern"), str):
        found["pattern"] = with_ecma_classes(pattern)
    if "patternProperties" in schema:
        found["patternProperties"] = _renamed(found["patternProperties"])
    if (refined := _REFINED.get(str(schema.get("format")))) is not None:
        found["allOf"] = [*found.get("allOf", ()), refined]
    return found


def _renamed(by_pattern: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pattern, schema in by_pattern.items():
        pattern = with_ecma_classes(pattern)
        while pattern in found:  # which was written in another way
            pattern = f"(?:{pattern})"
        found[pattern] = schema
    return found


def _escaped(name: Any) -> str:
    """A name in a JSON pointer (RFC 6901)."""
    return str(name).replace("~", "~0").replace("/", "~1")


def _check_keyword(keyword: Any, at: str) -> None:
    if not isinstance(keyword, str):
        raise RequestError(f"json schema: the keywords at {at} must be strings")
    if keyword in _ENFORCED or keyword in _ANNOTATIONS:
        return
    if keyword.startswith("x-") and keyword != _OPTIONS:
        return
    hint = f"; {_HINTS[keyword]}" if keyword in _HINTS else ""
    raise RequestError(f"json schema: the keyword {keyword!r} at {at} cannot be enforced{hint}")


def _check_values(schema: dict[str, Any], at: str) -> None:
    """What the library enforces only within limits of its own, without saying so."""
    form = schema.get("format")
    if form is not None and (not isinstance(form, str) or form not in _FORMATS):
        raise RequestError(f"json schema: the format {form!r} at {at} cannot be enforced")
    if "additionalItems" in schema and not isinstance(schema.get("items"), list):
        raise RequestError(f"json schema: the keyword 'additionalItems' at {at} needs a list in 'items'")
    required = schema.get("required")
    named = len(set(map(str, required))) if isinstance(required, list) else 0
    least = schema.get("minProperties", 0)
    if isinstance(least, (int, float)) and least > named + 1:
        # The keys of further properties may repeat, and a repeated key counts once.
        raise RequestError(
            f"json schema: the keyword 'minProperties' at {at} cannot be enforced beyond the number of "
            f"'required' properties plus one, {named + 1}"
        )
    for keyword in ("const", "enum", *_NUMBERS):
        for leaf in _leaves(schema.get(keyword)):
            if isinstance(leaf, int) and abs(leaf) > _EXACT_INTEGERS:
                raise RequestError(
                    f"json schema: the keyword {keyword!r} at {at} holds an integer beyond 2**53, which cannot be "
                    "enforced"
                )
            if isinstance(leaf, str) and _CONTROL.search(leaf):
                raise RequestError(_CONTROLS.format(keyword, at))
    patterns = {
        "pattern": [schema.get("pattern")],
        "patternProperties": schema.get("patternProperties") or (),
    }
    for keyword, found in patterns.items():
        if any(isinstance(pattern, str) and _matches_control(pattern) for pattern in found):
            raise RequestError(_CONTROLS.format(keyword, at))


_CONTROLS = "json schema: the keyword {!r} at {} holds a control character, which cannot be enforced"


def _matches_control(pattern: str) -> bool:
    """Whether a regular expression names a single control character; in ranges and negated classes it may."""
    classes: list[bool] = []  # open ones, whether they are negated
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
    """Every number, string and name in a JSON value, but not booleans."""
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
    """A JSON value from text, by the standard: no NaN, no Infinity. Raises ValueError."""

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
