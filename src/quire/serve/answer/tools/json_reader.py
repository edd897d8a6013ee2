"""Reads JSON that comes in pieces, and passes it on as it was written.

What is passed on is valid JSON: as the model wrote it, but for raw control characters in strings, which
models like to write in code and JSON forbids. These become escapes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import TypeAlias

from quire.serve.answer.incremental import SPACE, Incremental, Steps

Sink: TypeAlias = Callable[[str], object]  # takes what was read, piece by piece

MAX_DEPTH = 64
_SPACES = re.compile(f"[{SPACE}]+")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_WORD = re.compile(r"[-+.0-9A-Za-z]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_LITERALS = ("true", "false", "null")


class MalformedJson(Exception):
    """The text is not what it began as."""


class UnfinishedJson(MalformedJson):
    """The text ended too early; so far it was right."""


def discard(piece: str) -> None:
    """The sink for what nobody wants."""


def is_object(text: str) -> bool:
    """Whether `text` is a JSON object, by the standard: without NaN and Infinity."""

    def refuse(name: str) -> object:
        raise ValueError(name)

    try:
        return isinstance(json.loads(text, parse_constant=refuse), dict)
    except (ValueError, RecursionError):
        return False


class JsonReader(Incremental):
    """Each method consumes one part of a JSON text; the steps raise Malformed if it is something else, or ends."""

    def _spaces(self, sink: Sink = discard) -> Steps[None]:
        if found := (yield from self._while(_SPACES)):
            sink(found)

    def _character(self, choices: str, sink: Sink = discard) -> Steps[str]:
        """One of `choices`."""
        found = yield from self._peek()
        if not found:
            raise UnfinishedJson
        if found not in choices:
            raise MalformedJson
        sink(self._advance(self._at + 1))
        return found

    def _value(self, sink: Sink, depth: int = 0) -> Steps[None]:
        first = yield from self._peek()
        if depth > MAX_DEPTH:
            raise MalformedJson
        if first == "{":
            yield from self._object(sink, depth)
        elif first == "[":
            yield from self._list(sink, depth)
        elif first == '"':
            yield from self._string(sink)
        else:
            word = yield from self._while(_WORD)
            if (yield from self._peek()) == "":
                raise UnfinishedJson
            if word not in _LITERALS and not _NUMBER.fullmatch(word):
                raise MalformedJson
            sink(word)

    def _object(self, sink: Sink, depth: int = 0) -> Steps[None]:
        yield from self._character("{", sink)
        yield from self._spaces(sink)
        if (yield from self._peek()) == "}":
            sink(self._advance(self._at + 1))
            return
        after = ","
        while after == ",":
            yield from self._key(sink)
            yield from self._value(sink, depth + 1)
            after = yield from self._after_item("}", sink)

    def _key(self, sink: Sink) -> Steps[None]:
        """A key with its colon, and the white space around both."""
        yield from self._spaces(sink)
        yield from self._string(sink)
        yield from self._spaces(sink)
        yield from self._character(":", sink)
        yield from self._spaces(sink)

    def _list(self, sink: Sink, depth: int) -> Steps[None]:
        yield from self._character("[", sink)
        yield from self._spaces(sink)
        if (yield from self._peek()) == "]":
            sink(self._advance(self._at + 1))
            return
        after = ","
        while after == ",":
            yield from self._spaces(sink)
            yield from self._value(sink, depth + 1)
            after = yield from self._after_item("]", sink)

    def _after_item(self, end: str, sink: Sink) -> Steps[str]:
        """A comma, or the end of a list or object."""
        yield from self._spaces(sink)
        return (yield from self._character("," + end, sink))

    def _string(self, sink: Sink) -> Steps[None]:
        yield from self._character('"', sink)
        while (first := (yield from self._peek())) != '"':
            if match := _PLAIN.match(self._text, self._at):
                sink(self._advance(match.end()))
            elif first == "\\":
                sink((yield from self._escape()))
            elif first:
                sink(json.dumps(self._advance(self._at + 1))[1:-1])
            else:
                raise UnfinishedJson
        sink(self._advance(self._at + 1))

    def _escape(self) -> Steps[str]:
        size = 2
        while len(self._text) - self._at < size and not self._ended:
            yield
        if self._text.startswith("u", self._at + 1):
            size = 6
        while len(self._text) - self._at < size and not self._ended:
            yield
        match = _ESCAPE.match(self._text, self._at)
        if match is None:
            raise UnfinishedJson if len(self._text) - self._at < size else MalformedJson
        return self._advance(match.end())

    def _read_string(self) -> Steps[str]:
        """The string that comes next, decoded. Half a surrogate pair is malformed: no answer could hold it."""
        pieces: list[str] = []
        yield from self._string(pieces.append)
        found = str(json.loads("".join(pieces)))
        try:
            found.encode()
        except UnicodeEncodeError:
            raise MalformedJson from None
        return found
