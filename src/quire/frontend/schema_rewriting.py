"""Keywords that the grammar library does not know, written with those that it enforces.

Each rewriting keeps the set of valid values, or narrows it. A keyword that cannot be rewritten stays, and the caller
refuses it.
"""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

from quire.frontend.schema_logic import SchemaLogic, type_of

_TRIVIAL: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "not": (False,),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "propertyNames": (True, {}, {"type": "string"}),
}
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_MAX_DISTINCT = 8  # values of a set, which takes 2 ** 8 lists
_MAX_PERMUTED = 4  # values of a set whose lists are written in any order
_MAX_ONE_OF = 200  # options of `oneOf` that are compared pairwise
_MAX_WRITTEN = 16  # options of `oneOf` that exclude others explicitly
LARGEST_BOUND = 2**63 - 1024  # the largest number that is exact in float64 and int64
_EXACT_INTEGERS = 2**53
_CLASS = r"(\[[^\]\\^](?:[^\]\\]|\\.)*\])"
# (?!^[-+.]*$) at the start, as in Pydantic's pattern for Decimal: some character must be another one.
_NOT_ONLY = re.compile(rf"\^?\(\?!\^?{_CLASS}([*+])\$\)")
_AHEAD = re.compile(r"\^\(\?=((?:[^()\\\[\]|]|\\.|\[(?:[^\]\\]|\\.)*\])*)\)")


def rewritten(schema: dict[str, Any], logic: SchemaLogic) -> dict[str, Any]:
    """Return the schema with as few keywords as possible that the library does not enforce.

    Args:
        schema: the schema. It is not changed.
        logic: compares and negates parts of the document.
    """
    result = {k: v for k, v in schema.items() if k not in _TRIVIAL or not _among(v, _TRIVIAL[k])}
    _whole_numbers(result)
    _exclusive_flags(result)
    _large_bounds(result)
    _property_names(result)
    _dependencies(result)
    _conditional(result, logic)
    _negation(result, logic)
    _one_of(result, logic)
    _unique_items(result)
    _least_properties(result)
    _look_ahead(result)
    return _nullable(result)


def _among(value: Any, values: tuple[Any, ...]) -> bool:
    return any(type(value) is type(other) and value == other for other in values)


def _also(schema: dict[str, Any], *more: Any) -> None:
    given = schema.get("allOf")
    schema["allOf"] = [*(given if isinstance(given, list) else ()), *more]


def _whole_numbers(schema: dict[str, Any]) -> None:
    """Write counts such as 2.0 as integers."""
    for keyword in _COUNTS:
        value = schema.get(keyword)
        if isinstance(value, float) and value.is_integer():
            schema[keyword] = int(value)


def _exclusive_flags(schema: dict[str, Any]) -> None:
    """Rewrite draft 4's boolean `exclusiveMinimum` and `exclusiveMaximum`."""
    for flag, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(schema.get(flag), bool) and schema.pop(flag) and bound in schema:
            schema[flag] = schema.pop(bound)


def _large_bounds(schema: dict[str, Any]) -> None:
    """Narrow bounds beyond 2**53 to the next number that the library computes with exactly."""
    for keyword in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        value: Any = schema.get(keyword)
        if type_of(value) != "number" or not math.isfinite(value) or abs(value) <= _EXACT_INTEGERS:
            continue
        lower = keyword.endswith("inimum")
        if (value > LARGEST_BOUND) if lower else (value < -LARGEST_BOUND):
            continue  # nothing is left; the caller refuses it
        exact = float(max(min(value, LARGEST_BOUND), -LARGEST_BOUND))
        if lower and exact < value:
            exact = math.nextafter(exact, math.inf)
        elif not lower and exact > value:
            exact = math.nextafter(exact, -math.inf)
        schema[keyword] = int(exact)


def _property_names(schema: dict[str, Any]) -> None:
    """Rewrite names by pattern or list if the schema has no `properties` beside them."""
    names = schema.get("propertyNames")
    if not isinstance(names, dict) or schema.get("properties") or schema.get("patternProperties"):
        return
    names = {
        k: v for k, v in names.items() if k not in ("type", "description", "title", "$comment", "examples")
    }
    rest = schema.get("additionalProperties", True)
    if set(names) == {"pattern"} and isinstance(names["pattern"], str):
        schema["patternProperties"] = {names["pattern"]: rest}
    elif set(names) <= {"minLength", "maxLength"} and all(isinstance(v, int) for v in names.values()):
        pattern = f"^(?:.|\\n){{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
        schema["patternProperties"] = {pattern: rest}
    elif set(names) == {"enum"} and isinstance(names["enum"], list):
        texts = [name for name in names["enum"] if isinstance(name, str)]
        schema["properties"] = dict.fromkeys(texts, rest)
    else:
        return
    if schema["propertyNames"].get("type", "string") == "string":
        del schema["propertyNames"]
        schema["additionalProperties"] = False


def _dependencies(schema: dict[str, Any]) -> None:
    for keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
        by_name = schema.get(keyword)
        if not isinstance(by_name, dict) or not all(
            isinstance(v, (list, dict, bool)) for v in by_name.values()
        ):
            continue
        del schema[keyword]
        for name, needed in by_name.items():
            then = {"required": needed} if isinstance(needed, list) else needed
            _also(schema, {"anyOf": [{"properties": {name: False}}, {"allOf": [{"required": [name]}, then]}]})


def _conditional(schema: dict[str, Any], logic: SchemaLogic) -> None:
    """Rewrite `if` as a choice between the condition with `then` and its negation with `else`."""
    if "if" not in schema:
        return
    condition, then, other = schema["if"], schema.get("then", True), schema.get("else", True)
    unless = logic.negated(condition)
    if unless is None and (then is not True or other is not True):
        return
    for keyword in ("if", "then", "else"):
        schema.pop(keyword, None)
    if then is True and other is True:
        return
    _also(schema, {"anyOf": [_both(condition, then), _both(unless, other)]})


def _both(a: Any, b: Any) -> Any:
    if a is True or b is True:
        return b if a is True else a
    return {"allOf": [a, b]}


def _negation(schema: dict[str, Any], logic: SchemaLogic) -> None:
    if "not" not in schema:
        return
    listed = schema.get("enum")
    other = logic.negated(schema["not"])
    if other is not None:
        del schema["not"]
        if other is not True:
            _also(schema, other)
    elif (
        isinstance(listed, list)
        and isinstance(schema["not"], dict)
        and set(schema["not"]) <= {"enum", "const"}
    ):
        excluded = schema.pop("not")
        values = [*(excluded.get("enum") or ()), *([excluded["const"]] if "const" in excluded else [])]
        if len(excluded) == 1:
            schema["enum"] = [value for value in listed if not any(_same(value, other) for other in values)]
        else:
            schema["not"] = excluded


def _one_of(schema: dict[str, Any], logic: SchemaLogic) -> None:
    """Rewrite `oneOf` as `anyOf`, with negations for options that may hold together."""
    options = schema.get("oneOf")
    if not isinstance(options, list) or not 0 < len(options) <= _MAX_ONE_OF:
        return
    overlaps: dict[int, set[int]] = {i: set() for i in range(len(options))}
    for i, j in itertools.combinations(range(len(options)), 2):
        if not logic.disjoint(options[i], options[j]):
            overlaps[i].add(j)
            overlaps[j].add(i)
    written = []
    for i, option in enumerate(options):
        if len(overlaps[i]) > _MAX_WRITTEN:
            return
        excluded = [logic.negated(options[j]) for j in sorted(overlaps[i])]
        if any(other is None for other in excluded):
            return
        if False not in excluded:
            written.append({"allOf": [option, *excluded]} if excluded else option)
    del schema["oneOf"]
    choice = {"anyOf": written} if written else False
    if "anyOf" in schema or not written:
        _also(schema, choice)
    else:
        schema["anyOf"] = written


def _unique_items(schema: dict[str, Any]) -> None:
    """Rewrite a set of few values as the list of its texts. Larger sets are written in the order of the values."""
    most = schema.get("maxItems")
    if schema.get("uniqueItems") is not True:
        return
    if isinstance(most, int) and most <= 1:
        del schema["uniqueItems"]
        return
    items: Any = schema.get("items")
    values = (
        items.get("enum", [items["const"]] if "const" in items else None) if isinstance(items, dict) else None
    )
    if (
        not isinstance(values, list)
        or len(values) > 64
        or set(items) - {"enum", "const", "type", "title", "description"}
    ):
        return
    kinds = items.get("type")
    fits = {kinds} if isinstance(kinds, str) else set(kinds) if isinstance(kinds, list) else None
    values = [v for i, v in enumerate(values) if not any(_same(v, other) for other in values[:i])]
    if fits is not None:
        values = [v for v in values if type_of(v) in fits or ("integer" in fits and type(v) is int)]
    if len(values) > _MAX_DISTINCT or "prefixItems" in schema or any(type_of(v) == "object" for v in values):
        return
    arrange = itertools.permutations if len(values) <= _MAX_PERMUTED else itertools.combinations
    least, most = schema.get("minItems", 0), len(values) if most is None else most
    lists = [
        list(chosen) for n in range(len(values) + 1) if least <= n <= most for chosen in arrange(values, n)
    ]
    for keyword in ("uniqueItems", "items"):
        del schema[keyword]
    others = ["null", "boolean", "number", "string", "object"]
    _also(schema, {"anyOf": [{"enum": lists}, {"type": others}]} if lists else {"type": others})


def _same(a: Any, b: Any) -> bool:
    return a == b and type_of(a) == type_of(b)


def _least_properties(schema: dict[str, Any]) -> None:
    """Rewrite `minProperties`: 1 beside optional properties as a choice of the one that is present."""
    least, required, properties = (
        schema.get("minProperties"),
        schema.get("required"),
        schema.get("properties"),
    )
    if not isinstance(least, int) or isinstance(least, bool):
        return
    if least <= (len(set(map(str, required))) if isinstance(required, list) else 0):
        del schema["minProperties"]
    elif least == 1 and isinstance(properties, dict) and 0 < len(properties) <= 64:
        del schema["minProperties"]
        others = ["null", "boolean", "number", "string", "array"]
        _also(schema, {"anyOf": [*({"required": [name]} for name in properties), {"type": others}]})


def _look_ahead(schema: dict[str, Any]) -> None:
    """Rewrite a look-ahead at the start of a pattern as a second pattern."""
    pattern = schema.get("pattern")
    if not isinstance(pattern, str):
        return
    if (found := _NOT_ONLY.match(pattern)) is not None:
        also = f"[^{found[1][1:]}" if found[2] == "*" else f"^$|[^{found[1][1:]}"
    elif (found := _AHEAD.match(pattern)) is not None:
        also = f"^(?:{found[1]})"
    else:
        return
    rest = pattern[found.end() :]
    # An alternative at the outermost level is not preceded by the look-ahead.
    if not _has_alternatives(rest):
        _also(schema, {"pattern": also})
        schema["pattern"] = f"^{rest.removeprefix('^')}"


def _has_alternatives(pattern: str) -> bool:
    """Return whether a pattern has a `|` outside of groups and classes."""
    bare = re.sub(r"\\.|\[(?:[^\]\\]|\\.)*\]", "", pattern, flags=re.DOTALL)
    depth = 0
    for char in bare:
        depth += (char == "(") - (char == ")")
        if char == "|" and depth == 0:
            return True
    return False


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    """Rewrite OpenAPI's `nullable`."""
    flag = schema.get("nullable")
    if not isinstance(flag, bool):
        return schema
    del schema["nullable"]
    if not flag:
        return schema
    structure: dict[str, Any] = {
        k: schema.pop(k) for k in ("$schema", "$id", "id", "$anchor", "$defs", "definitions") if k in schema
    }
    return {**structure, "anyOf": [schema, {"type": "null"}]}
