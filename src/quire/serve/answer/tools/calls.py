"""The base of the parsers of tool calls. A call is a JSON object with a name and arguments.

The parser attempts to read a call wherever one may start. If the text turns out to be something else, all of it becomes
content. Held calls are emitted when they are complete, so clients can rely on them. Calls that are not held are emitted
while they are generated, which is safe for text that a grammar enforces.

    attempt -- text --> accept (a call is complete) -- text --> accept ... end
       |                                                 |
       +-- MalformedJson: the text since the last accept, or since the attempt, is content unless it was emitted
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.serve.answer.incremental import SPACE, ParserSteps
from quire.serve.answer.parser import Arguments, Content, ParserEvent, ToolCall
from quire.serve.answer.tools.json_reader import JsonReader, MalformedJson, UnfinishedJson, discard, is_object

_ARGUMENTS = ("arguments", "parameters")
_BESIDE = ("type", "id")  # keys that some models write beside name and arguments


def call_id() -> str:
    return f"call_{uuid.uuid4().hex}"


@dataclass(frozen=True, slots=True)
class CallOptions:
    """Options for parsing the calls of one choice."""

    names: frozenset[str]  # of the functions that may be called
    hold: bool = True  # hold a call until it is complete
    single: bool = False  # keep only the first call
    make_id: Callable[[], str] = call_id
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of the arguments, by function


@dataclass(slots=True)
class PartialCall:
    """A call of which only the beginning has been read."""

    index: int | None = None  # None until its name has been read
    seen: set[str] = field(default_factory=set)  # keys
    waiting: list[str] = field(default_factory=list)  # arguments read before the name


class CallParser(JsonReader):
    """The base of the parsers of all formats. Owns the events of the call in progress and the number of calls."""

    marked = True  # a mark that means nothing else precedes each call, so calls may have unknown names
    name_key = "name"

    def __init__(self, options: CallOptions) -> None:
        super().__init__()
        self._options = options
        self._held: list[ParserEvent] = []
        self._calls = 0  # started
        self._partly_emitted = False  # the call in progress

    # ------------------------------------------------------------------------------ text and calls

    def _content(self, text: str) -> None:
        if text:
            self._events.append(Content(text))

    def _text_until(self, *marks: str) -> ParserSteps[bool]:
        """Emit text up to one of `marks` or the white space before it. Return False if the text ends first."""
        while (piece := (yield from self._until(*marks))) is not None:
            self._content(piece)
        return (yield from self._peek()) != ""

    def _all_text(self) -> ParserSteps[None]:
        while (piece := (yield from self._rest())) is not None:
            self._content(piece)

    def _attempt(self, reading: ParserSteps[None]) -> ParserSteps[bool]:
        """Run `reading`, which reads one or several calls. If it fails, emit the text as content and return False.

        White space after the calls is dropped here; `reading` drops the white space before them. The last characters
        of a call that is cut off are dropped if the call has been emitted.
        """
        self._consumed, self._held, self._partly_emitted = [], [], False
        try:
            yield from reading
        except MalformedJson:
            self._calls -= sum(isinstance(event, ToolCall) for event in self._held)  # never emitted
            if self._partly_emitted and self._ended:  # the call is cut off
                self._advance(len(self._text))
            else:
                self._content("".join(self._consumed or ()))
            return False
        finally:
            self._consumed, self._held = None, []
        yield from self._spaces()
        return True

    def _accept(self) -> None:
        """Emit the events held for a call that is complete."""
        for event in self._held:
            self._emit_unless_extra(event)
        self._consumed, self._held, self._partly_emitted = [], [], False

    def _emit_unless_extra(self, event: ParserEvent) -> None:
        """Emit an event, unless it belongs to a call after the only one allowed."""
        if not (isinstance(event, (ToolCall, Arguments)) and self._options.single and event.index > 0):
            self._events.append(event)

    # --------------------------------------------------------------------------------- one call

    def _start_call(self, name: str, written_id: str = "") -> int:
        """Emit the start of a call and return its index. Raise MalformedJson for a name that cannot be called.

        Args:
            name: the name of the function.
            written_id: the id that the model wrote; empty for a new one.
        """
        if not name or not (self.marked or name in self._options.names):
            raise MalformedJson
        index = self._calls
        self._calls += 1
        self._emit(ToolCall(index, written_id or self._options.make_id(), name))
        return index

    def _emit(self, event: ParserEvent) -> None:
        """Hold an event, or emit it. The events so far stand for all text that has been read of the call."""
        if self._options.hold:
            self._held.append(event)
        else:
            self._consumed, self._partly_emitted = [], True
            self._emit_unless_extra(event)

    def _call(self) -> ParserSteps[None]:
        """Read an object with a name and, before or after it, arguments; missing arguments are empty."""
        call = PartialCall()
        yield from self._character("{")
        after = ","
        while after == ",":
            yield from self._spaces()
            key = yield from self._read_string()
            yield from self._spaces()
            yield from self._character(":")
            yield from self._spaces()
            yield from self._member(call, "arguments" if key in _ARGUMENTS else key)
            after = yield from self._after_item("}", discard)
        if call.index is None:
            raise MalformedJson
        if "arguments" not in call.seen:
            self._add_arguments(call, "{}")

    def _member(self, call: PartialCall, key: str) -> ParserSteps[None]:
        if key in call.seen:
            raise MalformedJson
        call.seen.add(key)
        if key == self.name_key:
            call.index = self._start_call((yield from self._read_string()))
            if call.waiting:
                self._add_arguments(call, "".join(call.waiting))
        elif key == "arguments":
            yield from self._arguments(call)
        elif self.marked or key in _BESIDE:
            yield from self._value(discard)
        else:
            raise MalformedJson

    def _add_arguments(self, call: PartialCall, piece: str) -> None:
        """Emit a piece of the arguments, or keep it until the name has been read."""
        if call.index is None:
            call.waiting.append(piece)
        else:
            self._emit(Arguments(call.index, piece))

    def _arguments(self, call: PartialCall) -> ParserSteps[None]:
        """Read arguments: an object, null, or a string that holds an object, as some models write it."""
        first = yield from self._peek()
        if first == "{":
            yield from self._object_of_arguments(call)
        elif first == '"':
            text = (yield from self._read_string()).strip(SPACE) or "{}"
            if not is_object(text):
                raise MalformedJson
            self._add_arguments(call, text)
        elif (yield from self._sees("null")):
            self._advance(self._at + len("null"))
            self._add_arguments(call, "{}")
        else:
            raise MalformedJson

    def _object_of_arguments(self, call: PartialCall) -> ParserSteps[None]:
        try:
            yield from self._object(lambda piece: self._add_arguments(call, piece))
        except UnfinishedJson:
            if not self._options.hold and call.index is not None:  # its beginning was emitted: emit the rest
                self._advance(len(self._text))
                self._add_arguments(call, "".join(self._consumed or ()))
            raise

    def _mark(self, mark: str) -> ParserSteps[None]:
        """Consume the words of `mark`, with any white space before each. Raise MalformedJson for other text."""
        for word in mark.split():
            yield from self._spaces()
            if not (yield from self._sees(word)):
                raise UnfinishedJson if word.startswith(self._text[self._at :]) else MalformedJson
            self._advance(self._at + len(word))

    def _marks_if_present(self, mark: str) -> ParserSteps[None]:
        """Consume those words of `mark` that are there, with any white space before each."""
        for word in mark.split():
            yield from self._spaces()
            yield from self._skip(word)

    def _list_of_calls(self) -> ParserSteps[None]:
        """Read `[call, call]`, accepting each call when it is complete."""
        yield from self._character("[")
        after = ","
        while after == ",":
            yield from self._spaces()
            yield from self._call()
            self._accept()
            after = yield from self._after_item("]", discard)
