"""`StructuredOutputsParams` to the `GrammarSpec` that travels to the engine, or a RequestError that says why not.

All checks that need no library are here, so that a bad request is answered before anything runs. The
engine's helper process (grammar/) has the last word.
"""

from __future__ import annotations

import json
import re
from typing import Any

from quire.frontend.json_schema import checked_schema, read_json
from quire.frontend.patterns import with_ecma_classes
from quire.types import GrammarSpec, RequestError, StructuredOutputsParams

MAX_BYTES = 128 << 10  # of a spec; larger ones take seconds to compile, or are refused by then
_ANY_OBJECT = '{"type":"object"}'
_EMBEDDED = re.compile(r"%json\b\s*")

# How the library is to write JSON. \u escapes are left out because a key may hide behind one: {"\u0061": ...}
# would pass for an additional property beside the declared "a". Between two parts there is one space at most,
# because a small model that may write white space writes it until the context is full.
_JSON_OPTIONS = {"json_allowed_escapes": 'nrbtf\\"', "whitespace_pattern": r"\x20"}


def grammar_spec(params: StructuredOutputsParams) -> GrammarSpec:
    """Raises RequestError, naming the field or the keyword, for what cannot be enforced."""
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
    """A JSON schema, checked, with the library's options, as text."""
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False)
        _check_size("json", text)
        found = read_json(text)
    except RecursionError:
        raise RequestError("json schema is nested too deeply") from None
    except (ValueError, TypeError) as error:
        raise RequestError(f"json schema is not valid JSON: {error}") from None
    return json.dumps({**checked_schema(found), "x-guidance": _JSON_OPTIONS}, separators=(",", ":"))


def _choice(choice: Any) -> str:
    if not isinstance(choice, list) or not choice or not all(isinstance(c, str) for c in choice):
        raise RequestError("choice must be a list of at least one string")
    return _string("choice", json.dumps(choice, ensure_ascii=False))


def _grammar(text: str) -> str:
    """The grammar with each schema that it embeds (`%json {...}`) checked."""
    parts, end = [], 0
    while match := _EMBEDDED.search(text, end):
        try:
            schema, after = json.JSONDecoder().raw_decode(text, match.end())
        except (ValueError, RecursionError):
            raise RequestError("grammar: %json must be followed by a JSON schema") from None
        parts += [text[end : match.end()], schema_text(schema)]
        end = after
    return "".join([*parts, text[end:]])


def _string(name: str, text: Any) -> str:
    if not isinstance(text, str):
        raise RequestError(f"{name} must be a string, got {type(text).__name__}")
    _check_size(name, text)
    if not text:
        raise RequestError(f"{name} must not be empty")
    return text


def _check_size(name: str, text: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise RequestError(f"{name} must be valid Unicode: it holds half of a surrogate pair") from None
    if size > MAX_BYTES:
        raise RequestError(
            f"{name} of structured_outputs has {size} bytes, but at most {MAX_BYTES} are compiled"
        )
