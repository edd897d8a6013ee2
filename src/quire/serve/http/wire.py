"""JSON decoding and encoding: bodies become Structs, and unknown fields become warnings or errors.

Every invalid body that a client can send ends here as a 4xx error that names the field. body.py receives the bodies.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
import msgspec.inspect
from starlette.responses import Response
from starlette.types import Scope

from quire.serve.http.errors import ApiError, bad_request

T = TypeVar("T", bound=msgspec.Struct)

encode = msgspec.json.Encoder().encode
_PATH = re.compile(r"(.*?) - at `\$\.?(.*)`$", re.DOTALL)
_KINDS = {
    "object": "an object",
    "array": "a list",
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "null": "null",
}
_EXPECTED = re.compile(r"Expected `([^`]*)`, got `([^`]*)`")
_HALF_PAIR = re.compile("[\ud800-\udfff]")
# Largest invalid body that is searched for the reason, which takes longer than decoding.
_EXPLAINED_BYTES = 1 << 20
_WHOLE = "the body"
_MAX_DEPTH = 64
_MAX_WARNINGS = 16  # at most this many warnings about unknown fields
_SHOWN_CHARS = 64  # characters shown of an unknown field's name


def decode_object(body: bytes | bytearray) -> dict[str, Any]:
    """Decode a JSON object strictly.

    Raises:
        ApiError: 400 for invalid JSON, NaN, half surrogate pairs, numbers beyond a double, nesting deeper than 64, and
            JSON that is not an object.
    """
    try:
        found = msgspec.json.decode(body)
    except RecursionError:
        raise bad_request(f"the body is nested more than {_MAX_DEPTH} levels deep") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _unreadable(body, error) from None
    if not isinstance(found, dict):
        raise bad_request("the body must be a JSON object")
    if body.count(b"[") + body.count(b"{") > _MAX_DEPTH and _deeper(found, _MAX_DEPTH):
        raise bad_request(f"the body is nested more than {_MAX_DEPTH} levels deep")
    return found


def _unreadable(body: bytes | bytearray, error: Exception) -> ApiError:
    """Return the error for an invalid body. Half surrogate pairs get a message that names the field."""
    try:
        text = body.decode()
        where = _half_pair(json.loads(text), "") if len(body) <= _EXPLAINED_BYTES and r"\u" in text else None
    except UnicodeDecodeError as wrong:
        return bad_request(
            f"the body is not valid UTF-8: byte {body[wrong.start]:#x} at position {wrong.start}"
        )
    except (ValueError, RecursionError):
        where = None
    if where is None:
        return bad_request(f"the body is not valid JSON: {error}")
    where = where[:128]
    message = f"{where} is not valid Unicode: it holds half of a surrogate pair"
    return bad_request(message, re.split(r"[.\[]", where)[0] if where != _WHOLE else None)


def _half_pair(value: Any, path: str) -> str | None:
    """Return the path of the first string in `value` that contains half of a surrogate pair, or None."""
    if isinstance(value, str):
        return path if _HALF_PAIR.search(value) else None
    for key, item in value.items() if isinstance(value, dict) else ():
        if _HALF_PAIR.search(key):
            return path or _WHOLE
        if found := _half_pair(item, f"{path}.{key}" if path else key):
            return found
    for index, item in enumerate(value) if isinstance(value, list) else ():
        if found := _half_pair(item, f"{path}[{index}]"):
            return found
    return None


def _deeper(value: Any, limit: int) -> bool:
    """Return whether `value` is nested more than `limit` levels deep, without recursion on untrusted data."""
    level = [value]
    for _ in range(limit):
        level = [
            item
            for nested in level
            for item in (nested.values() if isinstance(nested, dict) else nested)
            if isinstance(item, (dict, list))
        ]
        if not level:
            return False
    return True


def parse(body: dict[str, Any], cls: type[T], strict: bool) -> tuple[T, list[str]]:
    """Convert `body` to a request of type `cls`.

    Args:
        body: the decoded JSON object; floats with whole values in integer fields are converted in place.
        cls: type of the request.
        strict: raise an error for unknown fields.

    Returns:
        The request, and a warning for each unknown field, at most 16.

    Raises:
        ApiError: 400 for a field of a wrong type, and with `strict` for an unknown field.
    """
    _write_integers(body, cls)
    for name, struct in _nested(cls).items():
        if isinstance(inner := body.get(name), dict):
            _write_integers(inner, struct)
    unknown = _unknown(body, cls)
    if unknown and strict:
        name = unknown[0][:_SHOWN_CHARS]
        raise bad_request(f"unknown field {name!r} (the server runs with --strict)", name.split(".")[0])
    try:
        found = msgspec.convert(body, cls)
    except msgspec.ValidationError as error:
        raise _explained(str(error)) from None
    return found, [f"unknown field {name[:_SHOWN_CHARS]!r} was ignored" for name in unknown]


def _write_integers(body: dict[str, Any], cls: type[msgspec.Struct]) -> None:
    """Convert floats with whole values in integer fields, in place.

    JSON has one number type, and some clients write 16 as 16.0.
    """
    for name in _integer_fields(cls) & body.keys():
        if isinstance(value := body[name], float) and value.is_integer() and abs(value) < 2**53:
            body[name] = int(value)


def _unknown(body: dict[str, Any], cls: type[msgspec.Struct]) -> list[str]:
    """Return the first 16 unknown fields of a request, including those of its options (`_nested`)."""
    known = field_names(cls)
    found = [name for name in body if name not in known]
    for field, struct in _nested(cls).items():
        inner = body.get(field)
        names = inner if isinstance(inner, dict) else {}
        found += [f"{field}.{name[:_SHOWN_CHARS]}" for name in names if name not in field_names(struct)]
    return found[:_MAX_WARNINGS]


def field_names(cls: type[msgspec.Struct]) -> frozenset[str]:
    """Return the names of a Struct's fields, as they appear in JSON."""
    return frozenset(cls.__struct_encode_fields__)


@lru_cache
def _nested(cls: type[msgspec.Struct]) -> dict[str, type[msgspec.Struct]]:
    """Return the fields of a request that hold one object of named fields, such as stream_options, with their types."""
    structs = {}
    for field in _fields(cls):
        kinds = field.type.types if isinstance(field.type, msgspec.inspect.UnionType) else (field.type,)
        for kind in kinds:
            if isinstance(kind, msgspec.inspect.StructType):
                structs[field.name] = kind.cls
    return structs


def _fields(cls: type[msgspec.Struct]) -> tuple[msgspec.inspect.Field, ...]:
    found = msgspec.inspect.type_info(cls)
    assert isinstance(found, msgspec.inspect.StructType)
    return found.fields


@lru_cache
def _integer_fields(cls: type[msgspec.Struct]) -> frozenset[str]:
    plain = (msgspec.inspect.IntType, msgspec.inspect.NoneType)
    names = []
    for field in _fields(cls):
        kinds = field.type.types if isinstance(field.type, msgspec.inspect.UnionType) else (field.type,)
        if all(isinstance(kind, plain) for kind in kinds):
            names.append(field.name)
    return frozenset(names)


def _explained(text: str) -> ApiError:
    """Convert the text of a msgspec error to an error about a field."""
    if match := _PATH.fullmatch(text):
        text, path = match[1], match[2]
    else:
        path = ""
    if missing := re.fullmatch(r"Object missing required field `([^`]*)`", text):
        path = f"{path}.{missing[1]}" if path else missing[1]
        return bad_request(f"{path} is missing", path.split(".")[0].split("[")[0])
    if found := _EXPECTED.fullmatch(text):
        wanted = " or ".join(_KINDS.get(kind, kind) for kind in found[1].split(" | ") if kind != "null")
        text = f"must be {wanted}, got {_KINDS.get(found[2], found[2])}"
    else:
        text = f"is not valid: {text}"
    return bad_request(f"{path or 'the body'} {text}", path.split(".")[0].split("[")[0] or None)


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a response with `body`, which msgspec can encode, as JSON."""
    return Response(encode(body), status, headers, media_type="application/json")


def error_response(error: ApiError, scope: Scope) -> Response:
    """Return the response for `error` in the form of the client's API.

    That is Ollama's for paths below /api. It is Anthropic's for paths below /v1/messages and for clients that send the
    header anthropic-version.
    """
    if scope["path"].startswith("/api/"):
        return json_response(error.ollama_body(), error.status, error.headers)
    known = any(name == b"anthropic-version" for name, _ in scope["headers"])
    anthropic = known or scope["path"].startswith("/v1/messages")
    body = error.anthropic_body(scope["request_id"]) if anthropic else error.body()
    return json_response(body, error.status, error.headers)
