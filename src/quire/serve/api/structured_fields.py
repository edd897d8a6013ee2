"""The fields for structured output, as one StructuredOutputsParams.

OpenAI has `response_format`. vLLM has `structured_outputs` and, from older versions, `guided_json` and similar fields.
"""

from __future__ import annotations

from typing import Any

from quire.serve.api.protocol.fields import SamplingFields
from quire.serve.http.errors import bad_request
from quire.types import StructuredOutputsParams

_KINDS = ("json", "regex", "choice", "grammar", "json_object")
_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
_TYPES: dict[str, tuple[type, ...]] = {
    "json": (dict, str),
    "regex": (str,),
    "choice": (list,),
    "grammar": (str,),
    "json_object": (bool,),
}


def structured_outputs(request: SamplingFields) -> StructuredOutputsParams | None:
    """Return the constraint on the text, or None.

    Raises:
        ApiError: 400 for an unknown kind, a value of the wrong type, or more than one constraint.
    """
    constraints: list[tuple[str, StructuredOutputsParams]] = []
    if request.response_format is not None:
        constraint = _response_format(request.response_format)
        if constraint is not None:
            constraints.append(("response_format", constraint))
    if request.structured_outputs is not None:
        constraints.append(("structured_outputs", _structured(request.structured_outputs)))
    for name, kind in _GUIDED.items():
        value = getattr(request, name)
        if value is not None:
            constraints.append((name, _checked(name, {kind: value})))
    if len(constraints) > 1:
        names = " and ".join(name for name, _ in constraints)
        raise bad_request(f"only one field for structured output can be set, got {names}", constraints[1][0])
    return constraints[0][1] if constraints else None


def _response_format(given: dict[str, Any]) -> StructuredOutputsParams | None:
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind != "json_schema":
        raise bad_request(
            f"response_format.type must be text, json_object or json_schema, got {str(kind)[:64]!r}",
            "response_format",
        )
    wrapped = given.get("json_schema")
    schema = wrapped.get("schema") if isinstance(wrapped, dict) else given.get("schema")
    if schema is True or (schema is None and isinstance(wrapped, dict)):
        schema = {}  # as with OpenAI, a format without a schema takes any value
    if not isinstance(schema, dict):
        raise bad_request("response_format needs a JSON schema in json_schema.schema", "response_format")
    return StructuredOutputsParams(json=schema)


def _structured(given: dict[str, Any]) -> StructuredOutputsParams:
    for name, value in given.items():
        if name not in _KINDS and value not in (None, False):
            raise bad_request(
                f"structured_outputs.{name[:64]} is not available in Quire", "structured_outputs"
            )
    return _checked(
        "structured_outputs", {k: v for k, v in given.items() if k in _KINDS and v not in (None, False)}
    )


def _checked(field: str, kinds: dict[str, Any]) -> StructuredOutputsParams:
    for kind, value in kinds.items():
        fits = isinstance(value, _TYPES[kind])
        if kind == "choice":
            fits = fits and bool(value) and all(isinstance(text, str) for text in value)
        if not fits:
            expected = {"choice": "a list of at least one string", "json": "a JSON schema"}.get(
                kind, "a string"
            )
            raise bad_request(f"{field}: {kind} must be {expected}", field)
    return StructuredOutputsParams(**kinds)
