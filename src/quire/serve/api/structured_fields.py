"""The fields for structured output, as one StructuredOutputsParams.

OpenAI has `response_format`, to which TGI adds forms with a `value`. vLLM has `structured_outputs` and, from older
versions, `guided_json` and similar fields. SGLang and llama.cpp have fields at the top level.
"""

from __future__ import annotations

from typing import Any

from quire.serve.api.protocol.fields import SamplingFields
from quire.serve.api.structural_tag import structural_tag_grammar
from quire.serve.http.errors import bad_request
from quire.types import StructuredOutputsParams

_KINDS = ("json", "regex", "choice", "grammar", "json_object")
_OPTIONS: dict[str, tuple[type, str]] = {
    "disable_any_whitespace": (bool, "true or false"),
    "disable_additional_properties": (bool, "true or false"),
    "whitespace_pattern": (str, "a regular expression"),
}
_HARMLESS = ("disable_fallback", "_backend", "_backend_was_auto")  # of vLLM: there is nothing to fall back to
_FIELDS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
}
_TYPES: dict[str, tuple[type, ...]] = {
    "json": (dict, str),
    "regex": (str,),
    "choice": (list,),
    "grammar": (str,),
    "json_object": (bool,),
}
# Types of response_format, and the fields that may hold their constraint.
_FORMATS: dict[str, tuple[str, tuple[str, ...]]] = {
    "regex": ("regex", ("regex", "pattern", "value")),
    "grammar": ("grammar", ("grammar", "value")),
    "ebnf": ("grammar", ("ebnf", "grammar", "value")),
    "choice": ("choice", ("choice", "value")),
}


def structured_outputs(request: SamplingFields) -> StructuredOutputsParams | None:
    """Return the constraint on the text, or None.

    Raises:
        ApiError: 400 for an unknown kind, a value of the wrong type, or more than one constraint.
    """
    constraints: list[tuple[str, StructuredOutputsParams]] = []
    if request.response_format is not None:
        constraint = _response_format(request.response_format, _common_options(request))
        if constraint is not None:
            constraints.append(("response_format", constraint))
    if request.structured_outputs is not None:
        constraint = _structured(request.structured_outputs, _common_options(request))
        constraints.append(("structured_outputs", constraint))
    for name, kind in _FIELDS.items():
        value = getattr(request, name)
        if value not in (None, ""):
            constraints.append((name, _checked(name, {kind: value}, _common_options(request))))
    if request.structural_tag is not None:
        grammar = structural_tag_grammar(request.structural_tag, "structural_tag")
        constraints.append(("structural_tag", _checked("structural_tag", {"grammar": grammar}, {})))
    if len(constraints) > 1:
        names = " and ".join(name for name, _ in constraints)
        raise bad_request(f"only one field for structured output can be set, got {names}", constraints[1][0])
    return constraints[0][1] if constraints else None


def _common_options(request: SamplingFields) -> dict[str, Any]:
    """Return the options that older versions of vLLM take at the top level."""
    pattern = request.guided_whitespace_pattern
    return {} if pattern is None else {"whitespace_pattern": pattern}


def _response_format(given: dict[str, Any], options: dict[str, Any]) -> StructuredOutputsParams | None:
    kind = given.get("type")
    field = "response_format"
    if kind == "text":
        return None
    if kind in ("json_object", "json", "json_schema"):
        schema = _schema_of(given)
        if schema is None and kind == "json_object":
            return StructuredOutputsParams(json_object=True, **options)
        if not isinstance(schema, (dict, str)):
            raise bad_request("response_format needs a JSON schema, in json_schema.schema or schema", field)
        return _checked(field, {"json": schema}, options)
    if kind == "structural_tag":
        return _checked(field, {"grammar": structural_tag_grammar(given, field)}, options)
    if isinstance(kind, str) and kind in _FORMATS:
        target, names = _FORMATS[kind]
        value = next((given[name] for name in names if given.get(name) is not None), None)
        return _checked(field, {target: value}, options)
    raise bad_request(
        "response_format.type must be text, json_object, json_schema, regex, choice, grammar or structural_tag, got "
        f"{str(kind)[:64]!r}",
        field,
    )


def _schema_of(given: dict[str, Any]) -> Any:
    """Return the schema in a format, wherever it is; {} for a JSON format that names none, None for no schema."""
    wrapped = given.get("json_schema", given.get("value"))
    if isinstance(wrapped, dict) and ("schema" in wrapped or ("json_schema" in given and "name" in wrapped)):
        schema = wrapped.get("schema")
        return {} if schema is None or schema is True else schema  # as with OpenAI, any value
    if "json_schema" in given and isinstance(wrapped, dict) and not wrapped:
        return {}
    schema = wrapped if wrapped is not None else given.get("schema")
    return {} if schema is True else schema


def _structured(given: dict[str, Any], common: dict[str, Any]) -> StructuredOutputsParams:
    kinds, options = {}, dict(common)
    for name, value in given.items():
        if value is None or name in _HARMLESS:
            continue
        if name in _OPTIONS:
            options[name] = value
        elif name == "structural_tag":
            kinds["grammar"] = structural_tag_grammar(value, "structured_outputs")
        elif name in _KINDS:
            kinds |= {} if value is False else {name: value}
        elif value is not False:
            raise bad_request(
                f"structured_outputs.{name[:64]} is not available in Quire", "structured_outputs"
            )
    return _checked("structured_outputs", kinds, options)


def _checked(field: str, kinds: dict[str, Any], options: dict[str, Any]) -> StructuredOutputsParams:
    for kind, value in kinds.items():
        fits = isinstance(value, _TYPES[kind])
        if kind == "choice":
            fits = fits and bool(value) and all(isinstance(text, str) for text in value)
        if not fits:
            expected = {"choice": "a list of at least one string", "json": "a JSON schema"}.get(
                kind, "a string"
            )
            raise bad_request(f"{field}: {kind} must be {expected}", field)
    for name, value in options.items():
        if not isinstance(value, _OPTIONS[name][0]):
            raise bad_request(f"{field}: {name} must be {_OPTIONS[name][1]}", field)
    return StructuredOutputsParams(**kinds, **options)
