"""Disjointness and negation of JSON schemas, as far as they can be computed.

Both are conservative: `disjoint` returns True only if no value satisfies both schemas, and `negated` returns
None if the complement cannot be written as a schema that the grammar library enforces.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

Resolver: TypeAlias = Callable[[str], Any]  # returns the schema that a `$ref` names, or None

_TYPES = ("null", "boolean", "number", "string", "array", "object")
_MAX_DEPTH = 8  # of schemas within schemas that are looked at
_MAX_OPTIONS = 64  # of a negation
_OPPOSITES = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
}
_NOT_NEGATED = {
    "additionalProperties", "patternProperties", "propertyNames", "minProperties", "maxProperties", "items",
    "prefixItems", "additionalItems", "contains", "minContains", "maxContains", "uniqueItems", "multipleOf", "pattern",
    "format", "oneOf", "if", "then", "else", "dependencies", "dependentRequired", "dependentSchemas",
    "unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef", "nullable",
}  # fmt: skip


def type_of(value: Any) -> str:
    """Return the JSON type of a value; integers are numbers."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


class SchemaLogic:
    """The two functions for the schemas of one document, with a bound on their work.

    Args:
        resolve: returns the schema that a `$ref` names, or None.
        work: number of schemas and values that may be looked at. Beyond it nothing is disjoint or negated.
    """

    def __init__(self, resolve: Resolver, work: int = 50_000) -> None:
        self._resolve, self._work = resolve, work

    def _spend(self, work: int = 1) -> bool:
        """Account for work. Return False if there is none left."""
        self._work -= work
        return self._work >= 0

    # ------------------------------------------------------------------------------ disjointness

    def disjoint(self, a: Any, b: Any, depth: int = 0) -> bool:
        """Return True if provably no value satisfies both schemas."""
        if a is False or b is False:
            return True
        if depth > _MAX_DEPTH or not isinstance(a, dict) or not isinstance(b, dict):
            return False
        parts, others = self._conjuncts(a), self._conjuncts(b)
        if not self._spend(len(parts) * len(others)):
            return False
        if any(self._plainly_disjoint(x, y, depth) for x in parts for y in others):
            return True
        return any(self._options_disjoint(x, b, depth) for x in parts) or any(
            self._options_disjoint(y, a, depth) for y in others
        )

    def _conjuncts(self, schema: Any, depth: int = 0) -> list[dict[str, Any]]:
        """Return the schema and those that it includes by `allOf` and `$ref`."""
        if not isinstance(schema, dict) or depth > _MAX_DEPTH or not self._spend():
            return []
        found = [schema]
        if isinstance(ref := schema.get("$ref"), str):
            found += self._conjuncts(self._resolve(ref), depth + 1)
        for part in _list_of(schema.get("allOf")):
            found += self._conjuncts(part, depth + 1)
        return found

    def _options_disjoint(self, a: dict[str, Any], b: Any, depth: int) -> bool:
        for keyword in ("anyOf", "oneOf"):
            options = _list_of(a.get(keyword))
            if options and all(self.disjoint(option, b, depth + 1) for option in options):
                return True
        return False

    def _plainly_disjoint(self, a: dict[str, Any], b: dict[str, Any], depth: int) -> bool:
        common = _types(a) & _types(b)
        if not common:
            return True
        values, others = _values(a), _values(b)
        if values is not None and others is not None:
            return self._spend(len(values) + len(others)) and not (
                {_key(v) for v in values} & {_key(v) for v in others}
            )
        if values is not None or others is not None:
            listed, rule = (values or [], b) if values is not None else (others or [], a)
            kinds = _types(rule)
            return self._spend(len(listed)) and not any(type_of(value) in kinds for value in listed)
        if common == {"object"}:
            names = {n for s in (a, b) for n in _list_of(s.get("required")) if isinstance(n, str)}
            return any(self.disjoint(_member(a, n), _member(b, n), depth + 1) for n in names)
        return common == {"number"} and (_below(a, b) or _below(b, a))

    # ---------------------------------------------------------------------------------- negation

    def negated(self, schema: Any, depth: int = 0) -> Any:
        """Return a schema that exactly the other values satisfy, or None if there is no such schema in reach."""
        if isinstance(schema, bool):
            return not schema
        if not isinstance(schema, dict) or depth > _MAX_DEPTH or not self._spend():
            return None
        options: list[Any] = []
        for keyword, value in schema.items():
            more = self._negated_keyword(keyword, value, depth)
            if more is None or len(options) + len(more) > _MAX_OPTIONS:
                return None
            options += more
        if not options:
            return False
        return options[0] if len(options) == 1 else {"anyOf": options}

    def _negated_keyword(self, keyword: str, value: Any, depth: int) -> list[Any] | None:
        """Return the alternatives of values that break a keyword; [] if none does, None if they cannot be written."""
        if keyword == "type":
            return _negated_type(value)
        if keyword in ("const", "enum"):
            values = [value] if keyword == "const" else _list_of(value)
            return _all_but(values) if values and self._spend(len(values)) else None
        if keyword == "required" and isinstance(value, list):
            return [{"type": "object", "properties": {name: False}} for name in value]
        if keyword == "properties" and isinstance(value, dict):
            return self._negated_properties(value, depth)
        if keyword in _OPPOSITES:
            return _negated_bound(keyword, value)
        if keyword in ("allOf", "anyOf") and isinstance(value, list):
            return self._negated_list(keyword, value, depth)
        if keyword == "not":
            return [value]
        if keyword == "$ref":
            target = self._resolve(value) if isinstance(value, str) else None
            found = None if target is None else self.negated(target, depth + 1)
            return None if found is None else [found]
        if value is True and keyword == "additionalProperties":
            return []
        return None if keyword in _NOT_NEGATED else []

    def _negated_properties(self, by_name: dict[str, Any], depth: int) -> list[Any] | None:
        options = []
        for name, schema in by_name.items():
            other = self.negated(schema, depth + 1)
            if other is None:
                return None
            if other is not False:
                options.append({"type": "object", "properties": {name: other}, "required": [name]})
        return options

    def _negated_list(self, keyword: str, schemas: list[Any], depth: int) -> list[Any] | None:
        others = [self.negated(schema, depth + 1) for schema in schemas]
        if any(other is None for other in others):
            return None
        if keyword == "anyOf":
            return [] if False in others else [{"allOf": others}]
        return [other for other in others if other is not False]


def _below(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Return whether all numbers of `a` are smaller than those of `b`."""
    most: Any
    least: Any
    most, least = a.get("maximum", a.get("exclusiveMaximum")), b.get("minimum", b.get("exclusiveMinimum"))
    if type_of(most) != "number" or type_of(least) != "number":
        return False
    return bool(most < least or (most == least and ("maximum" not in a or "minimum" not in b)))


def _member(schema: dict[str, Any], name: str) -> Any:
    """Return a schema that the property `name` must satisfy."""
    properties = schema.get("properties")
    if isinstance(properties, dict) and name in properties:
        return properties[name]
    return True if schema.get("patternProperties") else schema.get("additionalProperties", True)


def _types(schema: dict[str, Any]) -> set[str]:
    given = schema.get("type")
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return set(_TYPES)
    found = {"number" if name == "integer" else name for name in names}
    return (found if found <= set(_TYPES) else set(_TYPES)) | ({"null"} if schema.get("nullable") else set())


def _values(schema: dict[str, Any]) -> list[Any] | None:
    if schema.get("nullable"):
        return None
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _key(value: Any) -> str:
    """Return a text that is equal for equal JSON values; 1 and 1.0 are equal."""
    return json.dumps(_with_integers(value), sort_keys=True)


def _with_integers(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_with_integers(item) for item in value]
    if isinstance(value, dict):
        return {name: _with_integers(item) for name, item in value.items()}
    return value


def _list_of(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _negated_type(value: Any) -> list[Any] | None:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or "integer" in names or not set(names) <= set(_TYPES):
        return None
    rest = [name for name in _TYPES if name not in names]
    return [{"type": rest}] if rest else []


def _negated_bound(keyword: str, value: Any) -> list[Any] | None:
    kind, opposite, step = _OPPOSITES[keyword]
    if type_of(value) != "number":
        return None
    if step == -1 and value < 1:
        return []  # every length is at least 0
    return [{"type": kind, opposite: value + step}]


def _all_but(values: Sequence[Any]) -> list[Any] | None:
    """Return schemas for all values but these; None if they contain numbers, lists or objects."""
    excluded = {kind: [v for v in values if type_of(v) == kind] for kind in _TYPES}
    if excluded["number"] or excluded["array"] or excluded["object"]:
        return None
    options: list[Any] = [{"type": [kind for kind in _TYPES if not excluded[kind]]}]
    if excluded["string"]:
        options.append({"type": "string", "pattern": other_texts(excluded["string"])})
    if len(set(excluded["boolean"])) == 1:
        options.append({"const": not excluded["boolean"][0]})
    return options


def other_texts(texts: Iterable[str]) -> str:
    """Return a regular expression that matches exactly the texts that are not among `texts`."""
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}  # a text ends here
    return f"^{_outside(tree)}$"


def _outside(node: dict[str, Any]) -> str:
    chars = [char for char in node if char]
    options = [] if "" in node else [""]
    options.append(f"[^{''.join(map(_escaped, chars))}](?:.|\\n)*" if chars else "(?:.|\\n)+")
    options += [_escaped(char) + _outside(node[char]) for char in chars]
    return f"(?:{'|'.join(options)})"


def _escaped(char: str) -> str:
    return char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}"
