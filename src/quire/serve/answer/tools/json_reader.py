"""A reader of JSON that arrives in pieces. It passes the text on as the model wrote it.

The result is valid JSON. The only change is that raw control characters in strings become escapes: JSON forbids them,
but models often write them in code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import TypeAlias

from quire.serve.answer.incremental import SPACE, IncrementalParser, ParserSteps

Sink: TypeAlias = Callable[[str], object]  # takes the text in pieces as it is read

MAX_DEPTH = 64
_SPACES = re.compile(f"[{SPACE}]+")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_WORD = re.compile(r"[-+.0-9A-Za-z]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_LITERALS = ("true", "false", "null")


class MalformedJson(Exception):
    """The text started like JSON of the expected form, but is something else."""


class UnfinishedJson(MalformedJson):
    """The text ended before the JSON did; it was well-formed up to there."""


def discard(piece: str) -> None:
    """Ignore a piece: the sink for text that is not needed."""


def is_object(text: str) -> bool:
    """Return whether `text` is a JSON object by the standard, so without NaN and Infinity."""

    def refuse(name: str) -> object:
        raise ValueError(name)

    try:
        return isinstance(json.loads(text, parse_constant=refuse), dict)
    except (ValueError, RecursionError):
        return False


class JsonReader(IncrementalParser):
    """A parser with one method for each part of a JSON text.

    Each method consumes its part. It raises MalformedJson if the text is something else and UnfinishedJson if it ends.
    """

    def _spaces(self, sink: Sink = discard) -> ParserSteps[None]:
        if found := (yield from self._while(_SPACES)):
            sink(found)

    def _character(self, choices: str, sink: Sink = discard) -> ParserSteps[str]:
        """Consume and return one character of `choices`."""
        found = yield from self._peek()
        if not found:
            raise UnfinishedJson
        if found not in choices:
            raise MalformedJson
        sink(self._advance(self._at + 1))
        return found

    def _value(self, sink: Sink, depth: int = 0) -> ParserSteps[None]:
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

    def _object(self, sink: Sink, depth: int = 0) -> ParserSteps[None]:
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

    def _key(self, sink: Sink) -> ParserSteps[None]:
        """Consume a key with its colon and the white space around both."""
        yield from self._spaces(sink)
        yield from self._string(sink)
        yield from self._spaces(sink)
        yield from self._character(":", sink)
        yield from self._spaces(sink)

    def _list(self, sink: Sink, depth: int) -> ParserSteps[None]:
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

    def _after_item(self, end: str, sink: Sink) -> ParserSteps[str]:
        """Consume and return a comma or `end`, the end of a list or object."""
        yield from self._spaces(sink)
        return (yield from self._character("," + end, sink))

    def _string(self, sink: Sink) -> ParserSteps[None]:
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

    def _escape(self) -> ParserSteps[str]:
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

    def _read_string(self) -> ParserSteps[str]:
        """Consume a string and return it decoded. Half of a surrogate pair is malformed: UTF-8 cannot encode it."""
        pieces: list[str] = []
        yield from self._string(pieces.append)
        found = str(json.loads("".join(pieces)))
        try:
            found.encode()
        except UnicodeEncodeError:
            raise MalformedJson from None
        return found
