"""Schemas as they occur in the world: what is rewritten, what is ignored with a warning, and which objects are closed.

Texts are checked byte by byte through the masks of the compiled grammar, and against the `jsonschema` package.
"""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from quire.frontend.json_schema import SchemaOptions, prepared_schema
from quire.frontend.schema_logic import SchemaLogic, other_texts
from quire.frontend.structured_spec import grammar_spec
from quire.grammar.matching import BYTES, Vocabulary, build_matcher, grammar_text
from quire.types import RequestError, StructuredOutputsParams

VOCABULARY = Vocabulary(BYTES)


class Language:
    """The texts that a constraint allows."""

    def __init__(self, **given: Any) -> None:
        spec = grammar_spec(StructuredOutputsParams(**given))
        self._matcher = build_matcher(VOCABULARY, spec, grammar_text(spec))

    def holds(self, text: str) -> bool:
        matcher = self._matcher.deep_copy()
        return all(self._allows(matcher, b) and matcher.consume_token(b) for b in text.encode()) and (
            self._allows(matcher, VOCABULARY.end)
        )

    @staticmethod
    def _allows(matcher: Any, token: int) -> bool:
        return bool(matcher.compute_bitmask()[token // 8] >> token % 8 & 1)


VALUES: list[Any] = [
    None, True, False, 0, 1, 2, 5, -3, "", "a", "b", "ab", "abc", "é\n", "red", "green", "12", "1.5", "+.", "2020-02-30",
    [], ["a"], ["b"], ["a", "b"], ["b", "a"], ["a", "a"], [1], {}, {"a": 1}, {"a": "x"}, {"b": 1}, {"a": 1, "b": 2},
    {"a": 1, "c": 3}, {"a": 1, "b": 2, "c": 3}, {"kind": "cat", "a": 1}, {"kind": "dog", "b": 1}, {"kind": "dog"},
    {"kind": "cow", "a": 1}, {"ab": 1}, {"x1": 1},
]  # fmt: skip
A_OR_B = [{"required": ["a"]}, {"required": ["b"]}]
PROPERTIES = {"type": "object", "properties": {"kind": {}, "a": {}, "b": {}, "c": {}}}
REWRITTEN: dict[str, Any] = {
    "not const": {"not": {"const": "ab"}},
    "not enum": {"type": ["string", "null"], "not": {"enum": ["a", "ab", "", None]}},
    "not true": {"not": {"const": True}},
    "enum without": {"enum": ["a", 1, 2], "not": {"const": 1}},
    "not type": {"not": {"type": ["string", "object"]}},
    "not required": {"type": "object", "not": {"required": ["a"]}},
    "not both": {"type": "object", "not": {"required": ["a", "b"]}},
    "not any": {"not": {"anyOf": [{"type": "string"}, {"type": "object", "required": ["a"]}]}},
    "not bounds": {"type": ["integer", "string"], "not": {"minimum": 1, "maxLength": 2}},
    "not not": {"not": {"not": {"type": "string", "maxLength": 2}}},
    "not property": {"type": "object", "not": {"properties": {"kind": {"const": "cat"}}, "required": ["kind"]}},
    "one of required": {**PROPERTIES, "oneOf": A_OR_B},
    "one of types": {"oneOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}]},
    "one of overlapping": {"oneOf": [{"type": "string", "minLength": 2}, {"type": "string", "maxLength": 2}]},
    "one of kinds": {
        "oneOf": [
            {"type": "object", "properties": {"kind": {"const": "cat"}, "a": {}}, "required": ["kind", "a"]},
            {"type": "object", "properties": {"kind": {"enum": ["dog"]}, "b": {}}, "required": ["kind"]},
        ]
    },
    "one of refs": {
        "$defs": {"cat": {"type": "object", "properties": {"kind": {"const": "cat"}}, "required": ["kind"]}},
        "oneOf": [{"$ref": "#/$defs/cat"}, {"type": "object", "properties": {"kind": {"const": "dog"}}, "required": ["kind"]}],
    },
    "one of the same": {"oneOf": [{"type": "string", "enum": ["a"]}, {"type": "string", "enum": ["a", "b"]}]},
    "if": {**PROPERTIES, "if": {"properties": {"kind": {"const": "cat"}}, "required": ["kind"]}, "then": {"required": ["a"]}},
    "if else": {"type": ["string", "integer"], "if": {"type": "string"}, "then": {"minLength": 2}, "else": {"minimum": 1}},
    "if alone": {"if": {"pattern": "a"}},
    "dependent": {**PROPERTIES, "dependentRequired": {"a": ["b"]}},
    "dependencies": {**PROPERTIES, "dependencies": {"b": {"required": ["a"]}, "c": ["b"]}},
    "names by pattern": {"type": "object", "propertyNames": {"pattern": "^[a-z]$"}},
    "names by list": {"type": "object", "propertyNames": {"enum": ["a", "b"]}},
    "names by length": {"type": "object", "propertyNames": {"maxLength": 1}},
    "any names": {"type": "object", "propertyNames": {"type": "string"}},
    "set": {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True},
    "set with a least number": {"items": {"type": "string", "enum": ["a", "b"]}, "uniqueItems": True, "minItems": 1},
    "no set": {"type": "array", "uniqueItems": False, "items": {"type": "string"}},
    "one item": {"type": "array", "uniqueItems": True, "maxItems": 1},
    "least properties": {**PROPERTIES, "minProperties": 1, "additionalProperties": False},
    "look-ahead": {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"},
    "positive look-ahead": {"type": "string", "pattern": r"^(?=[a-c]{2})[a-z]*$"},
    "float counts": {"type": "string", "minLength": 2.0},
    "large bound": {"type": "integer", "maximum": 2**63 - 1, "minimum": -(2**63)},
    "reference elsewhere": {"x-parts": {"n/o": {"type": "string", "maxLength": 2}}, "$ref": "#/x-parts/n~1o"},
    "reference to a property": {"properties": {"kind": {}, "a": {"type": "integer"}, "b": {"$ref": "#/properties/a"}}},
}  # fmt: skip


@pytest.mark.parametrize("name", REWRITTEN)
def test_rewritten_keywords_keep_the_valid_values(name: str) -> None:
    schema = REWRITTEN[name]
    language = Language(json=schema, disable_additional_properties=False)
    draft = jsonschema.Draft7Validator if "dependencies" in schema else jsonschema.Draft202012Validator
    validator = draft(schema)
    valid = [value for value in VALUES if validator.is_valid(value)]
    accepted = [
        value
        for value in VALUES
        if language.holds(json.dumps(value, ensure_ascii=False, separators=(",", ":")))
    ]
    assert accepted == valid and 0 < len(valid) < len(VALUES) + (name == "if alone")


def test_draft_4_flags() -> None:
    language = Language(
        json={"type": "integer", "minimum": 0, "exclusiveMinimum": True, "exclusiveMaximum": False}
    )
    assert language.holds("1") and not language.holds("0")


@pytest.mark.parametrize(
    ("schema", "inside", "outside"),
    [
        ({"type": "integer", "format": "int32"}, ["2147483647", "-2147483648"], ["2147483648"]),
        ({"type": "integer", "format": "uint8"}, ["0", "255"], ["-1", "256"]),
        ({"type": "integer", "format": "int64"}, ["9007199254740993"], ["9223372036854775808"]),
        ({"type": "string", "format": "regex"}, ['"^(a|b)+[a-z]$"', r'"\\d{2}"'], ['"(a"', '"*"', '"[b-a]"']),
        ({"type": "string", "format": "json-pointer"}, ['""', '"/a~0b/c"'], ['"a"', '"/~2"']),
        ({"type": "string", "format": "uri-reference"}, ['"../a?b#c"', '"http://a/b"'], ['"a b"', '"a:%"']),
        ({"type": "string", "nullable": True}, ["null", '"a"'], ["1"]),
        ({"$defs": {"S": {"type": "string"}}, "$ref": "#/$defs/S", "nullable": True}, ["null", '"a"'], ["1"]),
        ({"type": "string", "enum": ["a"], "nullable": True}, ["null", '"a"'], ['"b"']),
        ({"type": "string", "nullable": False}, ['"a"'], ["null"]),
    ],
)  # fmt: skip
def test_openapi(schema: Any, inside: list[str], outside: list[str]) -> None:
    language = Language(json=schema)
    assert all(map(language.holds, inside)) and not any(map(language.holds, outside))


@pytest.mark.parametrize(
    ("schema", "warning"),
    [
        ({"properties": {"a": {"minLenght": 3}}}, "the keyword 'minLenght' at #/properties/a has"),
        ({"anyOf": [{"strict": True}, {"strict": False}]}, "'strict' at #/anyOf/0 and 1 more places has"),
        ({"type": "string", "format": "password"}, "the format 'password' at # has"),
        ({"format": 3}, "the format '3' at # has"),
        ({"items": {}, "additionalItems": False}, "'additionalItems' without a list"),
        ({"type": "object", "required": True}, "'required' with a boolean"),
        ({"properties": {"a": {"x-guidance": {"lenient": True}}}}, "'x-guidance' at #/properties/a"),
    ],
)
def test_annotations_are_removed_with_a_warning(schema: Any, warning: str) -> None:
    spec = grammar_spec(StructuredOutputsParams(json=schema))
    (text,) = spec.warnings
    assert warning in text
    again = grammar_spec(StructuredOutputsParams(json={**schema, "title": "T", "x-a": 1, "examples": [1]}))
    assert again == spec


def test_many_warnings_are_counted() -> None:
    found = prepared_schema({f"keyword{i}": 1 for i in range(40)})
    assert len(found.warnings) == 17 and "24 more keywords" in found.warnings[-1]


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"pattern": "a"}},
        {"if": {"items": {"type": "null"}}, "then": {"minItems": 2}},
        {"contains": {"const": 1}},
        {"propertyNames": {"pattern": "a"}, "properties": {"b": {}}},
        {"unevaluatedProperties": False},
        {"$ref": "#/x-nothing/here"},
        {"type": "string", "pattern": "(?!a)b|(?=c)d"},
    ],
)
def test_what_cannot_be_rewritten_is_refused(schema: Any) -> None:
    with pytest.raises(RequestError):
        Language(json=schema)


# ------------------------------------------------------------------------------------- closing

PERSON = {"type": "object", "properties": {"a": {"type": "integer"}}}
CLOSED: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "plain": (PERSON, [{}, {"a": 1}], [{"a": 1, "z": 1}]),
    "nested": ({"type": "array", "items": PERSON}, [[{"a": 1}]], [[{"z": 1}]]),
    "says so": ({**PERSON, "additionalProperties": True}, [{"a": 1, "z": 1}], []),
    "has types": ({**PERSON, "additionalProperties": {"type": "null"}}, [{"a": 1, "z": None}], [{"a": 1, "z": 1}]),
    "no properties": ({"type": "object"}, [{"z": 1}], []),
    "empty": ({"type": "object", "properties": {}}, [{}], [{"z": 1}]),
    "patterns": ({**PERSON, "patternProperties": {"^x": {}}}, [{"a": 1, "x": 1}], [{"z": 1}]),
    "required elsewhere": ({**PERSON, "required": ["b"]}, [{"a": 1, "b": 2}], [{"b": 2, "z": 1}]),
    "all of": (
        {"allOf": [PERSON, {"properties": {"b": {}}, "required": ["b"]}]},
        [{"a": 1, "b": 2}],
        [{"a": 1, "b": 2, "z": 1}],
    ),
    "any of": ({"anyOf": [PERSON, {"type": "null"}]}, [{"a": 1}, None], [{"z": 1}]),
    "beside": (
        {**PERSON, "anyOf": [{"properties": {"b": {}}, "required": ["b"]}, {"required": ["a"]}]},
        [{"a": 1}, {"a": 1, "b": 1}],
        [{"a": 1, "z": 1}, {}],
    ),
    "base by reference": (
        {"$defs": {"base": PERSON}, "allOf": [{"$ref": "#/$defs/base"}, {"properties": {"b": {}}}]},
        [{"a": 1, "b": 2}],
        [{"a": 1, "z": 1}],
    ),
    "shared base": (
        {
            "$defs": {"base": PERSON},
            "properties": {
                "one": {"$ref": "#/$defs/base"},
                "two": {"allOf": [{"$ref": "#/$defs/base"}, {"properties": {"b": {}}}]},
            },
        },
        [{"one": {"a": 1}, "two": {"a": 1, "b": 2}}],
        [{"one": {"z": 1}}, {"two": {"z": 1}}],
    ),
    "recursive": (
        {"$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}}, "$ref": "#/$defs/node"},
        [{"next": {"next": {}}}],
        [{"next": {"z": 1}}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CLOSED)
def test_objects_are_closed(name: str) -> None:
    schema, inside, outside = CLOSED[name]
    closed, opened = Language(json=schema), Language(json=schema, disable_additional_properties=False)
    for value in inside:
        assert closed.holds(json.dumps(value, separators=(",", ":")))
        jsonschema.validate(value, schema)
    for value in outside:
        text = json.dumps(value, separators=(",", ":"))
        assert not closed.holds(text)
        assert opened.holds(text) == jsonschema.Draft202012Validator(schema).is_valid(value)


def test_exclusive_options_are_judged_as_they_are_given() -> None:
    """Both options allow {"a": 1} unless they are closed, so `oneOf` must not be decided after closing."""
    options = [{"type": "object", "properties": {name: {"pattern": "x"}}} for name in "ab"]
    spec = grammar_spec(StructuredOutputsParams(json={"oneOf": options}))
    assert any("oneOf" in warning for warning in spec.warnings)


EITHER = [{"pattern": "a"}, {"pattern": "b"}]


@pytest.mark.parametrize(
    ("keyword", "schema", "refused"),
    [
        ("oneOf", {"type": "array", "items": {"type": "string", "oneOf": EITHER}}, '["c"]'),
        ("oneOf", {"type": "array", "items": {"type": "string", "oneOf": EITHER, "anyOf": [{"minLength": 2}]}}, '["a"]'),
        ("uniqueItems", {"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "[1]"),
    ],
)  # fmt: skip
def test_what_few_answers_violate_is_left_out_with_a_warning(keyword: str, schema: Any, refused: str) -> None:
    (warning,) = prepared_schema(schema).warnings
    assert keyword in warning
    language = Language(json=schema)
    assert language.holds('["ab","ab"]') and not language.holds(refused)


def test_keywords_beside_a_reference_have_an_effect_since_2019() -> None:
    for draft, accepted in (("draft-07/schema", True), ("draft/2020-12/schema", False)):
        schema = {"$ref": "#/definitions/a", "type": "string", "definitions": {"a": {"type": "integer"}}}
        try:
            language = Language(json={"$schema": f"https://json-schema.org/{draft}", **schema})
        except RequestError:
            language = None  # no value satisfies both
        assert (language is not None and language.holds("1")) == accepted


def test_schemas_in_grammars_are_closed() -> None:
    grammar = f"start: %json {json.dumps(PERSON)}"
    assert not Language(grammar=grammar).holds('{"z":1}')
    assert Language(grammar=grammar, disable_additional_properties=False).holds('{"z":1}')


# ------------------------------------------------------------------------------------ the logic


def test_work_is_bounded() -> None:
    nested: Any = {"type": "string"}
    for _ in range(7):
        nested = {"anyOf": [nested] * 30}
    logic = SchemaLogic(lambda ref: nested)
    assert logic.disjoint({"$ref": "#"}, {"type": "null"}) is False
    assert SchemaLogic(lambda ref: nested).negated(nested) is None
    many = {
        "$defs": {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{(i + 1) % 2000}"}, PERSON]} for i in range(2000)}
    }
    assert prepared_schema(many, SchemaOptions()).schema["$defs"].keys() == many["$defs"].keys()


def test_other_texts() -> None:
    language = Language(regex=other_texts(["", "ab", "a.c", "é"]))
    assert all(map(language.holds, ["a", "b", "abc", "axc", "a.", "\n", "éa"]))
    assert not any(map(language.holds, ["", "ab", "a.c", "é"]))


# ---------------------------------------------------------------------------------- white space


def test_white_space() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert Language(json=schema).holds('{ "a": 1 }') and not Language(json=schema).holds('{\n"a":1}')
    compact = Language(json=schema, disable_any_whitespace=True)
    assert compact.holds('{"a":1}') and not compact.holds('{"a": 1}')
    wide = Language(json=schema, whitespace_pattern=r"[\n ]*")
    assert wide.holds('{\n  "a":  1\n}') and not wide.holds('{\t"a":1}')
    assert Language(json=schema, whitespace_pattern=r"\s?").holds('{\t"a":1}')
    for pattern in ("x*", ".", r"\w", "[^a]", 3, " " * 300):
        with pytest.raises(RequestError, match="whitespace_pattern"):
            Language(json=schema, whitespace_pattern=pattern)
