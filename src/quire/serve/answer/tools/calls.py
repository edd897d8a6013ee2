"""Reads calls of tools, whatever stands around them: one JSON object per call, with a name and arguments.

A call is attempted from where it may begin. What turns out not to be one comes back as content, all of it.
Held calls come out when they are complete, so what came out can be relied on; calls that are not held come
out while they are written, for texts that a grammar keeps in shape.

    attempt -- text --> accept (a call is complete) -- text --> accept ... end
       |                                                 |
       +-- Malformed: all text since the last accept, or since the attempt, is content, but for what was told
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from quire.serve.answer.incremental import SPACE, Steps
from quire.serve.answer.parser import Arguments, Content, ParserEvent, ToolCall
from quire.serve.answer.tools.json_reader import JsonReader, MalformedJson, UnfinishedJson, discard, is_object

_ARGUMENTS = ("arguments", "parameters")
_BESIDE = ("type", "id")  # keys that some models write beside name and arguments


def call_id() -> str:
    return f"call_{uuid.uuid4().hex}"


@dataclass(frozen=True, slots=True)
class CallOptions:
    """How the calls of one answer are read."""

    names: frozenset[str]  # of the functions that there are
    hold: bool = True  # until a call is complete
    single: bool = False  # keep the first call only
    make_id: Callable[[], str] = call_id


@dataclass(slots=True)
class PartialCall:
    index: int | None = None  # once it has a name
    seen: set[str] = field(default_factory=set)  # its keys
    waiting: list[str] = field(default_factory=list)  # arguments that came before the name


class CallParser(JsonReader):
    """Base of the formats. Owns what was recorded of the call under way, and counts calls."""

    marked = True  # a call follows a mark that means nothing else, so its name need not be known

    def __init__(self, options: CallOptions) -> None:
        super().__init__()
        self._options = options
        self._held: list[ParserEvent] = []
        self._calls = 0  # begun

    # ------------------------------------------------------------------------------ text and calls

    def _content(self, text: str) -> None:
        if text:
            self._events.append(Content(text))

    def _text_until(self, mark: str) -> Steps[bool]:
        """Content up to `mark`, or to white space before it; False if the text ended without."""
        while (piece := (yield from self._until(mark))) is not None:
            self._content(piece)
        return (yield from self._peek()) != ""

    def _all_text(self) -> Steps[None]:
        while (piece := (yield from self._rest())) is not None:
            self._content(piece)

    def _attempt(self, reading: Steps[None]) -> Steps[bool]:
        """Read one or several calls; False, with the text as content, for something else.

        White space behind calls is left out, as is that before them, which `reading` consumes.
        """
        self._record, self._held = [], []
        try:
            yield from reading
        except MalformedJson:
            self._calls -= sum(isinstance(event, ToolCall) for event in self._held)  # nobody was told of them
            self._content("".join(self._record or ()))
            return False
        finally:
            self._record, self._held = None, []
        yield from self._spaces()
        return True

    def _accept(self) -> None:
        """The call is complete."""
        for event in self._held:
            self._out(event)
        self._record, self._held = [], []

    def _out(self, event: ParserEvent) -> None:
        if not (isinstance(event, (ToolCall, Arguments)) and self._options.single and event.index > 0):
            self._events.append(event)

    # --------------------------------------------------------------------------------- one call

    def _begin(self, name: str) -> int:
        """A call has a name: its index."""
        if not name or not (self.marked or name in self._options.names):
            raise MalformedJson
        index = self._calls
        self._calls += 1
        self._emit(ToolCall(index, self._options.make_id(), name))
        return index

    def _emit(self, event: ParserEvent) -> None:
        """All that was read of the call is told by its events so far."""
        if self._options.hold:
            self._held.append(event)
        else:
            self._record = []
            self._out(event)

    def _call(self) -> Steps[None]:
        """An object with a name and arguments, in any order. Without arguments, there are none."""
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
            self._take(call, "{}")

    def _member(self, call: PartialCall, key: str) -> Steps[None]:
        if key in call.seen:
            raise MalformedJson
        call.seen.add(key)
        if key == "name":
            call.index = self._begin((yield from self._read_string()))
            if call.waiting:
                self._take(call, "".join(call.waiting))
        elif key == "arguments":
            yield from self._arguments(call)
        elif self.marked or key in _BESIDE:
            yield from self._value(discard)
        else:
            raise MalformedJson

    def _take(self, call: PartialCall, piece: str) -> None:
        """A piece of the arguments."""
        if call.index is None:
            call.waiting.append(piece)
        else:
            self._emit(Arguments(call.index, piece))

    def _arguments(self, call: PartialCall) -> Steps[None]:
        """An object; also null, or a string that holds an object, as some models write it."""
        first = yield from self._peek()
        if first == "{":
            yield from self._object_of_arguments(call)
        elif first == '"':
            text = (yield from self._read_string()).strip(SPACE) or "{}"
            if not is_object(text):
                raise MalformedJson
            self._take(call, text)
        elif (yield from self._sees("null")):
            self._advance(self._at + len("null"))
            self._take(call, "{}")
        else:
            raise MalformedJson

    def _object_of_arguments(self, call: PartialCall) -> Steps[None]:
        try:
            yield from self._object(lambda piece: self._take(call, piece))
        except UnfinishedJson:
            if not self._options.hold and call.index is not None:  # it was told so far: tell all of it
                self._advance(len(self._text))
                self._take(call, "".join(self._record or ()))
            raise

    def _list_of_calls(self) -> Steps[None]:
        """`[call, call]`, each accepted when it is complete."""
        yield from self._character("[")
        after = ","
        while after == ",":
            yield from self._spaces()
            yield from self._call()
            self._accept()
            after = yield from self._after_item("]", discard)
