"""The preparation of a JSON schema for the grammar library, so that it is enforced exactly.

Keywords are enforced by the library, or rewritten into others that it enforces (schema_rewriting.py), or refused by
name. A keyword that JSON Schema does not have is an annotation (2020-12 core, 6.5): it is reported as a warning and removed,
because the library would read it as one of its options. The preparation is pure Python and linear in the size of the schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from quire.frontend.patterns import with_ecma_classes
from quire.frontend.schema_closing import ObjectCloser, resolve_pointer
from quire.frontend.schema_formats import FormatRule
from quire.frontend.schema_logic import SchemaLogic
from quire.frontend.schema_rewriting import LARGEST_BOUND, rewritten
from quire.types import RequestError

_MAX_NESTING = 50  # levels of schemas; the library's own JSON reader stops at 128 levels of objects and lists
STRUCTURED_OUTPUTS = "structured_outputs"  # the request field that errors name
_EXACT_INTEGERS = 2**53  # the library stores numbers as float64
_MAX_WARNINGS = 16
_MAX_SCHEMAS = 200_000  # after rewriting

_ENFORCED = {
    "type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "properties", "patternProperties",
    "additionalProperties", "required", "minProperties", "maxProperties", "items", "prefixItems",
    "additionalItems", "minItems", "maxItems", "minLength", "maxLength", "pattern", "format", "minimum",
    "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
}  # fmt: skip
_STRUCTURE = {"$schema", "$id", "id", "$anchor", "$defs", "definitions"}
_ANNOTATIONS = {
    "$comment", "title", "description", "default", "example", "examples", "readOnly", "writeOnly", "deprecated",
    "contentMediaType", "contentEncoding", "contentSchema", "discriminator", "externalDocs", "xml", "$vocabulary",
    "$recursiveAnchor", "$dynamicAnchor", "then", "else", "minContains", "maxContains",
}  # fmt: skip
_REFUSED = {
    "not", "if", "contains", "propertyNames", "dependencies", "dependentRequired", "dependentSchemas",
    "unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef",
}  # fmt: skip
_SCHEMA = ("additionalProperties", "items", "additionalItems")
_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_HINTS = {
    "$dynamicRef": "use $ref",
    "$recursiveRef": "use $ref",
    "dependencies": "use anyOf",
}
_PLAIN_REF = re.compile(r"#(?:/(?:\$defs|definitions)/[A-Za-z0-9_.-]+)?")
_DRAFTS = re.compile(r"https?://json-schema\.org/(draft-0[4-7]|draft/20(?:19-09|20-12))/schema#?")

# In JSON these characters need \u escapes, which Quire does not allow (structured_spec.py).
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
_ESCAPED_CONTROL = re.compile(
    r"\\(?:[av]|(?:x|u00|U000000)(?:0[0-7bef]|1[0-9a-f]|7f)|[xuU]\{0*(?:[0-7bef]|1[0-9a-f]|7f)\})",
    re.IGNORECASE,
)


@dataclass(slots=True, frozen=True)
class SchemaOptions:
    """How a schema is read.

    Attributes:
        close_objects: let an object with `properties` have no other keys unless it says so.
    """

    close_objects: bool = True


@dataclass(slots=True)
class PreparedSchema:
    """A schema in the form that the grammar library enforces exactly, and what was ignored in it."""

    schema: dict[str, Any]
    warnings: list[str] = field(default_factory=list)


def prepared_schema(schema: Any, options: SchemaOptions = SchemaOptions()) -> PreparedSchema:
    """Return the schema in the form that the grammar library enforces exactly.

    The library itself refuses some more schemas later, when the engine compiles them (grammar/).

    Args:
        schema: the parsed JSON schema.
        options: how to read it.

    Raises:
        RequestError: if the schema cannot be enforced. The message names the keyword and its JSON pointer.
    """
    if schema is False:
        raise _error("no value satisfies the schema false")
    if schema is True:
        return PreparedSchema({})
    if not isinstance(schema, dict):
        raise RequestError(
            f"json schema must be an object, got {type(schema).__name__}", param=STRUCTURED_OUTPUTS
        )
    return _Preparation(schema).run(options)


def _error(reason: str) -> RequestError:
    return RequestError(f"json schema: {reason}", param=STRUCTURED_OUTPUTS)


class _Preparation:
    """The preparation of one schema. Owns its warnings and the definitions that it adds."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._places: dict[str, tuple[str, int]] = {}  # by warning: its first place and the number of places
        self._count = 0
        self._moved: dict[str, str] = {}  # names of added definitions, by the reference that they replace
        self._to_move: list[str] = []
        self._logic = SchemaLogic(lambda ref: resolve_pointer(root, ref))
        # A nested $id changes what a reference means, which only the library resolves.
        self._has_bases = _has_bases(root)
        # Up to draft 7 (section 8.3), keywords beside `$ref` have no effect.
        self._old_refs = "json-schema.org/draft-0" in str(root.get("$schema"))

    def run(self, options: SchemaOptions) -> PreparedSchema:
        prepared = self._prepared(self._root, "#", 0)
        while self._to_move:
            ref = self._to_move.pop()
            target = resolve_pointer(self._root, ref)
            if target is None:
                raise _error(f"the reference {ref[:200]!r} leads nowhere")
            prepared.setdefault("$defs", {})[self._moved[ref]] = self._prepared(target, ref, 0)
        if options.close_objects and not self._has_bases:
            ObjectCloser(prepared).close()
        return PreparedSchema(prepared, self._warnings())

    def _warn(self, text: str, at: str) -> None:
        first, count = self._places.get(text, (at, 0))
        self._places[text] = first, count + 1

    def _warnings(self) -> list[str]:
        warnings = []
        for text, (at, count) in list(self._places.items())[:_MAX_WARNINGS]:
            more = f" and {count - 1} more places" if count > 1 else ""
            warnings.append(f"json schema: {text} at {at[:200]}{more} has no effect")
        if len(self._places) > _MAX_WARNINGS:
            warnings.append(f"json schema: {len(self._places) - _MAX_WARNINGS} more keywords have no effect")
        return warnings

    def _prepared(self, schema: Any, at: str, depth: int) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise _error(f"{at} must be an object or a boolean, got {type(schema).__name__}")
        if depth > _MAX_NESTING:
            raise _error(f"{at[:60]}... is nested more than {_MAX_NESTING} schemas deep")
        self._count += 1
        if self._count > _MAX_SCHEMAS:
            raise _error(
                f"it holds more than {_MAX_SCHEMAS} schemas when `not`, `if` and `oneOf` are written out"
            )
        _check_names(schema, at)
        if self._old_refs and isinstance(schema.get("$ref"), str):
            schema = {k: v for k, v in schema.items() if k == "$ref" or k in _STRUCTURE}
        schema = rewritten(schema, self._logic)
        self._loosen(schema, at)
        schema = self._kept(schema, at)
        self._adapt_values(schema, at)
        _check_values(schema, at)
        prepared = dict(schema)
        for keyword, part in schema.items():
            if keyword in _NAMED:
                prepared[keyword] = {
                    k: self._prepared(v, f"{at}/{keyword}/{_pointer_escaped(k)}", depth + 1)
                    for k, v in part.items()
                }
            elif keyword in _SCHEMAS and isinstance(part, list):
                prepared[keyword] = [
                    self._prepared(v, f"{at}/{keyword}/{i}", depth + 1) for i, v in enumerate(part)
                ]
            elif keyword in _SCHEMA:
                prepared[keyword] = self._prepared(part, f"{at}/{keyword}", depth + 1)
        if isinstance(pattern := schema.get("pattern"), str):
            prepared["pattern"] = with_ecma_classes(pattern)
        if "patternProperties" in schema:
            prepared["patternProperties"] = _with_ecma_keys(prepared["patternProperties"])
        return self._with_format(prepared, at)

    def _kept(self, schema: dict[str, Any], at: str) -> dict[str, Any]:
        """Return the keywords for the library. Raise RequestError for one that is neither enforced nor ignored."""
        kept = {}
        for keyword, value in schema.items():
            if keyword in _ENFORCED or keyword in _STRUCTURE:
                kept[keyword] = value
            elif keyword in _REFUSED:
                hint = f"; {_HINTS[keyword]}" if keyword in _HINTS else ""
                raise _error(f"the keyword {keyword!r} at {at} cannot be enforced{hint}")
            elif keyword not in _ANNOTATIONS and (not keyword.startswith("x-") or keyword == "x-guidance"):
                self._warn(f"the keyword {keyword[:64]!r}", at)
        return kept

    def _loosen(self, schema: dict[str, Any], at: str) -> None:
        """Leave out, with a warning, what could not be rewritten and few answers violate."""
        options = schema.get("oneOf")
        if isinstance(options, list) and len(options) > 1:
            del schema["oneOf"]
            if "anyOf" in schema:
                schema["allOf"] = [*_listed(schema.get("allOf")), {"anyOf": options}]
            else:
                schema["anyOf"] = options
            self._warn("that no two options of 'oneOf' hold", at)
        if schema.pop("uniqueItems", None) is not None:
            self._warn("the keyword 'uniqueItems' over these items", at)

    def _adapt_values(self, schema: dict[str, Any], at: str) -> None:
        """Change values of enforced keywords that have no meaning in the draft that the library implements."""
        if not isinstance(schema.get("items"), list) and schema.pop("additionalItems", None) is not None:
            self._warn("the keyword 'additionalItems' without a list in 'items'", at)
        if isinstance(schema.get("required"), bool):
            del schema["required"]
            self._warn("the keyword 'required' with a boolean", at)
        if (draft := schema.get("$schema")) is not None:
            known = _DRAFTS.fullmatch(draft) if isinstance(draft, str) else None
            if known is None or at != "#":
                del schema["$schema"]
            elif known[1].startswith("draft-"):
                schema["$schema"] = f"http://json-schema.org/{known[1]}/schema#"
        ref = schema.get("$ref")
        if isinstance(ref, str) and ref[:1] == "#" and not self._has_bases and not _PLAIN_REF.fullmatch(ref):
            schema["$ref"] = self._moved_ref(ref)

    def _moved_ref(self, ref: str) -> str:
        """Return a reference to a new definition for the schema at another place."""
        if ref not in self._moved:
            taken = self._root.get("$defs")
            name = f"moved-{len(self._moved)}"
            while isinstance(taken, dict) and name in taken:
                name += "-"
            self._moved[ref] = name
            self._to_move.append(ref)
        return f"#/$defs/{self._moved[ref]}"

    def _with_format(self, prepared: dict[str, Any], at: str) -> dict[str, Any]:
        form = prepared.pop("format", None)
        if form is None:
            return prepared
        rule = FormatRule(form)
        if not rule.known:
            self._warn(f"the format {str(form)[:64]!r}", at)
        if rule.library is not None:
            prepared["format"] = rule.library
        if rule.also is not None:
            prepared["allOf"] = [*prepared.get("allOf", ()), rule.also]
        return prepared


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _has_bases(root: dict[str, Any]) -> bool:
    """Return whether some schema within `root` has its own base or anchor."""
    todo: list[Any] = list(root.values())
    while todo:
        item = todo.pop()
        if isinstance(item, dict):
            if isinstance(item.get("$id"), str) or isinstance(item.get("$anchor"), str):
                return True
            todo += item.values()
        elif isinstance(item, list):
            todo += item
    return isinstance(root.get("$anchor"), str)


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


def _check_names(schema: dict[Any, Any], at: str) -> None:
    for keyword, part in schema.items():
        if not isinstance(keyword, str):
            raise _error(f"the keywords at {at} must be strings, got {keyword!r}")
        if keyword in _NAMED and not isinstance(part, dict):
            raise _error(f"{keyword} at {at} must be an object, got {type(part).__name__}")


def _check_values(schema: dict[str, Any], at: str) -> None:
    """Raise RequestError for values that the library accepts but does not enforce exactly."""
    required = schema.get("required")
    named = len(set(map(str, required))) if isinstance(required, list) else 0
    least = schema.get("minProperties", 0)
    if isinstance(least, (int, float)) and least > named + 1:
        # An answer may repeat the key of an additional property, and a repeated key counts once.
        raise _error(
            f"the keyword 'minProperties' at {at} cannot be enforced beyond the number of 'required' properties "
            f"plus one ({named + 1}), got {least}"
        )
    for keyword in ("const", "enum", "multipleOf", *_BOUNDS):
        for leaf in _leaves(schema.get(keyword)):
            most = LARGEST_BOUND if keyword in _BOUNDS else _EXACT_INTEGERS
            if isinstance(leaf, int) and abs(leaf) > most:
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
