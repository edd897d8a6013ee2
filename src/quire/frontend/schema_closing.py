"""Closing of objects: an object with `properties` gets no other keys, unless its schema says so.

JSON Schema leaves such objects open, and small models then append keys until the answer is cut off. Schemas that apply
to the same value (`allOf`, or `properties` beside `anyOf` or `$ref`) are closed together: the outermost one gets the
names of all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

_OWN = (
    "properties",
    "required",
    "patternProperties",
    "additionalProperties",
    "minProperties",
    "maxProperties",
)
_IN_PLACE = ("allOf", "anyOf", "oneOf")
_MAX_ROUNDS = 50
_MAX_REFERENCES = 300  # that are followed; objects that name more of them stay open
_MAX_NAMES = 100_000  # that are collected


@dataclass(slots=True)
class _Names:
    """The keys that schemas for the same value name."""

    names: dict[str, None] = field(default_factory=dict)  # an ordered set
    declared: bool = False  # some schema has `properties`
    open: bool = False  # some schema says itself which further keys it takes


class ObjectCloser:
    """Closes the objects of one schema, in place.

    Args:
        root: the whole schema. References are `#/$defs/...` or other JSON pointers into it.
    """

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._shared: set[str] = set()  # references whose target is closed where it is used
        self._cycles: dict[str, bool] = {}
        self._direct: dict[str, set[str]] = {}  # references in the schema that a reference names
        self._work = _MAX_NAMES

    def close(self) -> None:
        """Close all objects that do not mention `additionalProperties`."""
        for _ in range(_MAX_ROUNDS):
            before = len(self._shared)
            self._mark(self._root, "#" in self._shared)
            if len(self._shared) == before:
                self._close(self._root, "#" in self._shared)
                return

    def _mark(self, schema: Any, together: bool) -> None:
        """Collect references to schemas that apply together with others; `together` if this one does."""
        if not isinstance(schema, dict):
            return
        if _applied_together(schema) or together:
            together = True
            if "$ref" in schema:
                self._shared.add(schema["$ref"])
        for keyword, part in _in_place(schema):
            self._mark(part, together or keyword == "oneOf")
        for part, ref in _inner(schema):
            self._mark(part, ref in self._shared)

    def _close(self, schema: Any, together: bool) -> None:
        if not isinstance(schema, dict):
            return
        several = _applied_together(schema)
        for keyword, part in _in_place(schema):
            self._close(part, together or several or keyword == "oneOf")
        for part, ref in _inner(schema):
            self._close(part, ref in self._shared)
        if together or ("oneOf" in schema and not several):
            return
        if several or "properties" in schema or schema.get("$ref") in self._shared:
            self._close_here(schema)

    def _recursive(self, ref: str) -> bool:
        """Return whether the schema that `ref` names refers to itself. The library cannot combine those."""
        if ref not in self._cycles:
            todo, seen = [ref], set[str]()
            while todo and len(seen) <= _MAX_REFERENCES:
                more = self._references(todo.pop()) - seen
                seen |= more
                todo += more
            self._cycles[ref] = ref in seen or len(seen) > _MAX_REFERENCES
        return self._cycles[ref]

    def _references(self, ref: str) -> set[str]:
        if ref not in self._direct:
            self._direct[ref] = _references(resolve_pointer(self._root, ref))
        return self._direct[ref]

    def _close_here(self, schema: dict[str, Any]) -> None:
        found = _Names()
        self._collect(schema, found, set(), True)
        least = schema.get("minProperties", 0)
        if not found.declared or found.open or (isinstance(least, int) and least > len(found.names)):
            return
        if "$ref" in schema:  # older drafts ignore what is beside it
            schema["allOf"] = [*schema.get("allOf", ()), {"$ref": schema.pop("$ref")}]
        given = schema.get("properties", {})
        schema["properties"] = {**given, **{name: {} for name in found.names if name not in given}}
        schema["additionalProperties"] = False

    def _collect(self, schema: Any, found: _Names, seen: set[str], outermost: bool) -> None:
        """Add the keys that a schema names, and those of all schemas that apply to the same value."""
        if not isinstance(schema, dict) or found.open:
            return
        patterns = bool(schema.get("patternProperties"))
        properties, required = schema.get("properties"), schema.get("required")
        if isinstance(properties, dict):
            found.declared = True
            self._work -= len(properties)
            found.names |= dict.fromkeys(properties)
        if isinstance(required, list):
            missing = [name for name in required if isinstance(name, str) and name not in found.names]
            found.names |= dict.fromkeys(missing)
            found.open |= patterns and bool(missing)
        self._work -= 1
        found.open |= self._work < 0 or "additionalProperties" in schema or (patterns and not outermost)
        ref = schema.get("$ref")
        if isinstance(ref, str) and ref not in seen:
            seen.add(ref)
            target = resolve_pointer(self._root, ref)
            found.open |= target is None or self._recursive(ref)
            self._collect(target, found, seen, False)
        for _, part in _in_place(schema):
            self._collect(part, found, seen, False)


def _references(schema: Any) -> set[str]:
    """Return all references in a schema."""
    found: set[str] = set()
    todo = [schema]
    while todo:
        item = todo.pop()
        if isinstance(item, dict):
            found |= {item["$ref"]} if isinstance(item.get("$ref"), str) else set()
            todo += item.values()
        elif isinstance(item, list):
            todo += item
    return found


def _applied_together(schema: dict[str, Any]) -> bool:
    """Return whether several schemas constrain the keys of the same object."""
    parts = len(schema["allOf"]) if isinstance(schema.get("allOf"), list) else 0
    parts += ("anyOf" in schema) + ("oneOf" in schema) + ("$ref" in schema)
    return parts + any(keyword in schema for keyword in _OWN) > 1


def _in_place(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the schemas for the same value, with their keywords."""
    for keyword in _IN_PLACE:
        if isinstance(parts := schema.get(keyword), list):
            yield from ((keyword, part) for part in parts)


def _inner(schema: dict[str, Any]) -> Iterator[tuple[Any, str]]:
    """Yield the schemas for other values, with their references ("" for none)."""
    for keyword in ("properties", "patternProperties"):
        if isinstance(by_name := schema.get(keyword), dict):
            yield from ((part, "") for part in by_name.values())
    for keyword in ("$defs", "definitions"):
        if isinstance(by_name := schema.get(keyword), dict):
            yield from ((part, f"#/{keyword}/{name}") for name, part in by_name.items())
    for keyword in ("additionalProperties", "items", "additionalItems", "prefixItems"):
        part = schema.get(keyword)
        yield from ((each, "") for each in (part if isinstance(part, list) else [part]))


def resolve_pointer(root: Any, ref: str) -> Any:
    """Return the part of `root` that a local reference names (RFC 6901), or None."""
    from urllib.parse import unquote

    if ref != "#" and not ref.startswith("#/"):
        return None
    part = root
    for step in unquote(ref).split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(part, dict) and step in part:
            part = part[step]
        elif isinstance(part, list) and step.isdecimal() and int(step) < len(part):
            part = part[int(step)]
        else:
            return None
    return part
