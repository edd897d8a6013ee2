"""StructuredOutputsParams become a GrammarSpec, or are refused with a message that names field and keyword."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.frontend.json_schema import prepared_schema
from quire.frontend.processor import InputProcessor
from quire.frontend.structured_spec import MAX_BYTES, grammar_spec
from quire.frontend.tokenizer.tokenizer import NoTokenizer, load_tokenizer
from quire.types import RequestError, SamplingParams, StructuredOutputsParams


def spec_of(**given: Any):
    return grammar_spec(StructuredOutputsParams(**given))


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"not": {"items": {}}}, "the keyword 'not' at # cannot"),
        ({"items": {"anyOf": [{}, {"contains": {}}]}}, "the keyword 'contains' at #/items/anyOf/1"),
        ({"$defs": {"a/b": {"if": {"pattern": "a"}, "then": False}}}, "the keyword 'if' at #/$defs/a~1b"),
        ({"minProperties": 2}, "'minProperties' at # cannot be enforced beyond"),
        ({"minProperties": 3, "required": ["a"]}, "'minProperties'"),
        ({"const": 2**53 + 1}, "'const' at # holds an integer beyond 2**53"),
        ({"enum": [[{"a": -(2**60)}]]}, "'enum' at # holds an integer"),
        ({"minimum": 2**63}, "'minimum' at # holds an integer"),
        ({"const": "a\0b"}, "'const' at # holds a control character"),
        ({"enum": [{"\x7f": 1}]}, "'enum' at # holds a control character"),
        ({"pattern": "^a\\x01$"}, "'pattern' at # holds a control character"),
        ({"pattern": "[\\u0001]"}, "'pattern' at #"),
        ({"patternProperties": {"\\x{1f}": {}}}, "'patternProperties' at #"),
        ({"properties": []}, "properties at # must be an object"),
        ({"items": 3}, "#/items must be an object or a boolean"),
        ([], "must be an object"),
        (False, "no value satisfies the schema false"),
    ],
)
def test_what_cannot_be_enforced_is_named(schema: Any, reason: str) -> None:
    with pytest.raises(RequestError) as error:
        spec_of(json=json.dumps(schema))
    assert reason in str(error.value) and error.value.param == "structured_outputs"


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": "object", "additionalProperties": True},
        {"const": {"not": 2**53}},
        {"pattern": "^[^\\x00-\\x1f]*$"},
        {"pattern": "[\\x00-\\x1f]\\\\x01"},
        {"minProperties": 2, "required": ["a"]},
        {"items": [{}], "additionalItems": False},
        {
            "properties": {"not": {"type": "string"}},
            "patternProperties": {"^if": {}},
            "additionalProperties": {},
        },
    ],
)
def test_what_may_pass(schema: Any) -> None:
    spec = spec_of(json=json.dumps(schema))
    assert spec == spec_of(json=json.dumps(schema)) and hash(spec) == hash(spec_of(json=json.dumps(schema)))
    if isinstance(schema, dict):
        assert schema.items() <= json.loads(spec.text).items()
        assert spec == spec_of(json=schema)


def test_formats_are_refined_beside_what_is_there() -> None:
    found = prepared_schema({"format": "date", "allOf": [{"minLength": 1}]}).schema
    assert found["allOf"][0] == {"minLength": 1} and "02-29" in found["allOf"][1]["pattern"]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"json": "{"}, "not valid JSON"),
        ({"json": '{"minimum": NaN}'}, "NaN is not JSON"),
        ({"json": {"minimum": float("nan")}}, "not valid JSON"),
        ({"json": {"a": {1, 2}}}, "not valid JSON"),
        ({"json": '{"const":' + "9" * 5000 + "}"}, "not valid JSON"),
        ({"json": '{"items":' * 5000 + "{}" + "}" * 5000}, "nested"),
        ({"json": '{"items":' * 60 + "{}" + "}" * 60}, "nested more than 50 schemas deep"),
        ({"json": {"description": "x" * MAX_BYTES}}, f"at most {MAX_BYTES} bytes"),
        ({"regex": ""}, "regex must not be empty"),
        ({"regex": 3}, "regex must be a string"),
        ({"regex": "\ud800"}, "half of a surrogate pair"),
        ({"choice": []}, "choice must be a list"),
        ({"choice": "ab"}, "choice must be a list"),
        ({"choice": ["a", 1]}, "choice must be a list"),
        ({"choice": ["\ud800"]}, "half of a surrogate pair"),
        ({"grammar": "start: %json {"}, "%json must be followed"),
        ({"grammar": 'start: %json {"not": {"items": {}}}'}, "the keyword 'not' at # cannot"),
        ({"grammar": "x" * (MAX_BYTES + 1)}, "grammar of structured_outputs must have"),
    ],
)
def test_malformed_specs(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError) as error:
        spec_of(**given)
    assert reason in str(error.value) and error.value.param == "structured_outputs"


def test_schemas_in_grammars_get_the_same_options() -> None:
    text = spec_of(grammar='start: "<" a ">"\na: %json {"type": "integer"}\n').text
    assert text.startswith('start: "<" a ">"\na: %json {"type":"integer","x-guidance":')
    assert text.endswith("}\n")


def test_recursive_objects_in_python() -> None:
    schema: dict[str, Any] = {}
    schema["items"] = schema
    with pytest.raises(RequestError):
        spec_of(json=schema)


# --------------------------------------------------------------------------------------- processor


def test_requests_carry_the_spec_and_always_stop_at_an_end(tiny_tokenizer) -> None:
    processor = InputProcessor(tiny_tokenizer, 260, 100, [257])
    params = SamplingParams(n=2, ignore_eos=True, structured_outputs=StructuredOutputsParams(regex="a+"))
    first, second = processor.process("r", "x", params)
    assert first.grammar is second.grammar and first.grammar.kind == "regex"
    assert first.stop_ids == [257] and first.params.structured_outputs is None
    assert processor.process("r", "x", SamplingParams())[0].grammar is None


def test_refusals_that_depend_on_the_model(tiny_tokenizer) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+"))
    with pytest.raises(RequestError, match="tokenizer"):
        InputProcessor(NoTokenizer(), 260, 100, [257]).process("r", [1], params)
    with pytest.raises(RequestError, match="stop_token_ids"):
        InputProcessor(tiny_tokenizer, 260, 100, []).process("r", "x", params)


@pytest.fixture(scope="module")
def tiny_tokenizer(tmp_path_factory: pytest.TempPathFactory):
    from tiny import write_tiny

    return load_tokenizer(write_tiny(tmp_path_factory.mktemp("tiny")))
