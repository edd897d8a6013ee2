"""Convert `StructuredOutputsParams` to the `GrammarSpec` that is sent to the engine.

All checks that do not need the grammar library are made here, so that an invalid request is refused before it is sent.
The engine's helper process (grammar/) makes the final check.
"""

from __future__ import annotations

import json
import re
from typing import Any

from quire.frontend.json_schema import STRUCTURED_OUTPUTS, checked_schema, read_json
from quire.frontend.patterns import with_ecma_classes
from quire.types import GrammarSpec, RequestError, StructuredOutputsParams

MAX_BYTES = 128 << 10  # of a spec; larger ones take seconds to compile, or the library refuses them
_ANY_OBJECT = '{"type":"object"}'
_EMBEDDED = re.compile(r"%json\b\s*")

# How the library may write JSON. \u escapes are excluded because they can disguise a key: {"\u0061": ...} would pass
# as an additional property beside the declared "a". White space is at most one space, because a small model that is
# allowed more writes it until the context is full.
_JSON_OPTIONS = {"json_allowed_escapes": 'nrbtf\\"', "whitespace_pattern": r"\x20"}


def grammar_spec(params: StructuredOutputsParams) -> GrammarSpec:
    """Build the spec of a constraint.

    Raises:
        RequestError: if the constraint is malformed, too large, or cannot be enforced. The message names the field or
            the schema keyword.
    """
    if params.json is not None:
        spec = GrammarSpec("json", schema_text(params.json))
    elif params.json_object:
        spec = GrammarSpec("json", schema_text(_ANY_OBJECT))
    elif params.regex is not None:
        spec = GrammarSpec("regex", with_ecma_classes(_string("regex", params.regex)))
    elif params.choice is not None:
        spec = GrammarSpec("choice", _choice(params.choice))
    else:
        spec = GrammarSpec("grammar", _grammar(_string("grammar", params.grammar)))
    return spec


def schema_text(schema: dict[str, Any] | str) -> str:
    """Check a JSON schema (an object or its text) and return it as text, with the library's options added."""
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False)
        _check_size("json", text)
        parsed = read_json(text)
    except RecursionError:
        raise RequestError("json schema is nested too deeply", param=STRUCTURED_OUTPUTS) from None
    except (ValueError, TypeError) as error:
        raise RequestError(f"json schema is not valid JSON: {error}", param=STRUCTURED_OUTPUTS) from None
    return json.dumps({**checked_schema(parsed), "x-guidance": _JSON_OPTIONS}, separators=(",", ":"))


def _choice(choice: Any) -> str:
    if not isinstance(choice, list) or not choice or not all(isinstance(c, str) for c in choice):
        raise RequestError("choice must be a list of at least one string", param=STRUCTURED_OUTPUTS)
    return _string("choice", json.dumps(choice, ensure_ascii=False))


def _grammar(text: str) -> str:
    """Return the grammar after checking each JSON schema embedded in it (`%json {...}`)."""
    parts, end = [], 0
    while match := _EMBEDDED.search(text, end):
        try:
            schema, after = json.JSONDecoder().raw_decode(text, match.end())
        except (ValueError, RecursionError):
            raise RequestError(
                "grammar: %json must be followed by a JSON schema", param=STRUCTURED_OUTPUTS
            ) from None
        parts += [text[end : match.end()], schema_text(schema)]
        end = after
    return "".join([*parts, text[end:]])


def _string(name: str, text: Any) -> str:
    if not isinstance(text, str):
        raise RequestError(f"{name} must be a string, got {type(text).__name__}", param=STRUCTURED_OUTPUTS)
    _check_size(name, text)
    if not text:
        raise RequestError(f"{name} must not be empty", param=STRUCTURED_OUTPUTS)
    return text


def _check_size(name: str, text: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise RequestError(
            f"{name} must be valid Unicode: it holds half of a surrogate pair", param=STRUCTURED_OUTPUTS
        ) from None
    if size > MAX_BYTES:
        raise RequestError(
            f"{name} of structured_outputs must have at most {MAX_BYTES} bytes, got {size}",
            param=STRUCTURED_OUTPUTS,
        )
