"""Convert `StructuredOutputsParams` to the `GrammarSpec` that is sent to the engine.

All checks that do not need the grammar library are made here, so that an invalid request is refused before it is sent.
The engine's helper process (grammar/) makes the final check.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from quire.frontend.gbnf import gbnf_to_lark, is_gbnf
from quire.frontend.json_schema import STRUCTURED_OUTPUTS, SchemaOptions, prepared_schema, read_json
from quire.frontend.patterns import with_ecma_classes
from quire.types import GrammarSpec, RequestError, StructuredOutputsParams

MAX_BYTES = 1 << 20  # of a spec
_ANY_OBJECT = '{"type":"object"}'
_EMBEDDED = re.compile(r"%json\b\s*")

# How the library may write JSON. \u escapes are excluded because they can disguise a key: {"\u0061": ...} would pass
# as an additional property beside the declared "a". White space is at most one space, because a small model that is
# allowed more writes it until the context is full.
_ESCAPES = 'nrbtf\\"'
_ONE_SPACE = r"\x20"
# White space only: the escapes and characters of JSON's white space, in groups and classes, with repetitions.
_WHITE_SPACE = re.compile(r"(?:\\[nrts ]|\\x(?:20|09|0[aAdD])|[ \t\r\n()\[\]|*+?]|\{\d*,?\d*\}|\(\?:)*")
_MAX_WHITE_SPACE = 256  # characters of whitespace_pattern


def grammar_spec(params: StructuredOutputsParams) -> GrammarSpec:
    """Build the spec of a constraint.

    Raises:
        RequestError: if the constraint is malformed, too large, or cannot be enforced. The message names the field or
            the schema keyword.
    """
    writer = SchemaWriter(params)
    if params.json is not None:
        spec = GrammarSpec("json", writer.text(params.json))
    elif params.json_object:
        spec = GrammarSpec("json", writer.text(_ANY_OBJECT))
    elif params.regex is not None:
        spec = GrammarSpec("regex", with_ecma_classes(_string("regex", params.regex)))
    elif params.choice is not None:
        spec = GrammarSpec("choice", _choice(params.choice))
    else:
        spec = GrammarSpec("grammar", _grammar(_string("grammar", params.grammar), writer))
    return replace(spec, warnings=tuple(dict.fromkeys(writer.warnings)))


class SchemaWriter:
    """Writes the schemas of one constraint for the grammar library.

    Args:
        params: the constraint, for the options of JSON.

    Attributes:
        warnings: what was ignored in the schemas so far.
    """

    def __init__(self, params: StructuredOutputsParams) -> None:
        self._options = SchemaOptions(params.disable_additional_properties is not False)
        self._library_options: dict[str, Any] = {"json_allowed_escapes": _ESCAPES}
        if params.disable_any_whitespace:
            self._library_options["whitespace_flexible"] = False
        else:
            self._library_options["whitespace_pattern"] = _white_space(params.whitespace_pattern)
        self.warnings: list[str] = []

    def text(self, schema: dict[str, Any] | str) -> str:
        """Check a JSON schema (an object or its text) and return it as text, with the library's options added."""
        try:
            text = schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False)
            _check_size("json", text)
            parsed = read_json(text)
            prepared = prepared_schema(parsed, self._options)
            self.warnings += prepared.warnings
            return json.dumps({**prepared.schema, "x-guidance": self._library_options}, separators=(",", ":"))
        except RecursionError:
            raise RequestError("json schema is nested too deeply", param=STRUCTURED_OUTPUTS) from None
        except (ValueError, TypeError) as error:
            if isinstance(error, RequestError):
                raise
            raise RequestError(f"json schema is not valid JSON: {error}", param=STRUCTURED_OUTPUTS) from None


def _white_space(pattern: Any) -> str:
    """Return the pattern for white space in JSON. Raise RequestError if it may match anything else."""
    if pattern is None:
        return _ONE_SPACE
    if not isinstance(pattern, str) or len(pattern) > _MAX_WHITE_SPACE or not _WHITE_SPACE.fullmatch(pattern):
        raise RequestError(
            "whitespace_pattern must be a regular expression for spaces, tabs and line breaks only, such as "
            f"'[ \\n]?', got {str(pattern)[:64]!r}",
            param=STRUCTURED_OUTPUTS,
        )
    return pattern.replace(r"\s", r"[ \t\r\n]")


def _choice(choice: Any) -> str:
    if not isinstance(choice, list) or not choice or not all(isinstance(c, str) for c in choice):
        raise RequestError("choice must be a list of at least one string", param=STRUCTURED_OUTPUTS)
    return _string("choice", json.dumps(choice, ensure_ascii=False))


def _grammar(text: str, writer: SchemaWriter) -> str:
    """Return the grammar in Lark, after checking each JSON schema embedded in it (`%json {...}`)."""
    if is_gbnf(text):
        return gbnf_to_lark(text)
    parts, end = [], 0
    while match := _EMBEDDED.search(text, end):
        try:
            schema, after = json.JSONDecoder().raw_decode(text, match.end())
        except (ValueError, RecursionError):
            raise RequestError(
                "grammar: %json must be followed by a JSON schema", param=STRUCTURED_OUTPUTS
            ) from None
        parts += [text[end : match.end()], writer.text(schema)]
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
