"""What a model's text means: content, reasoning, calls of tools. The seam for parsers of tools and reasoning.

A parser is made per choice and fed the text as it comes; streams and whole answers go through the same one,
so they cannot differ. It may hold text back until it knows what it is, and must let everything out at
`finish`. Off is `PlainText`, for which all text is content.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

from quire.types import CompletionOutput


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """The beginning of a call; its arguments follow. `index` counts the calls of a choice from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A further piece of a call's arguments: the pieces put together are one JSON text."""

    index: int
    text: str


ParserEvent: TypeAlias = Content | Reasoning | ToolCall | Arguments


class TextParser(Protocol):
    def feed(self, text: str) -> list[ParserEvent]:
        """What `text`, the next piece of the answer, brought to light."""
        ...

    def finish(self) -> list[ParserEvent]:
        """No more text comes: let out what was held back."""
        ...


class PlainText:
    """All text is content."""

    def feed(self, text: str) -> list[ParserEvent]:
        return [Content(text)] if text else []

    def finish(self) -> list[ParserEvent]:
        return []


def read(parser: TextParser, output: CompletionOutput) -> list[ParserEvent]:
    """What a piece of an answer, or all of it, brought to light."""
    events = parser.feed(output.text) if output.text else []
    return events if output.finish_reason is None else [*events, *parser.finish()]


def merged(events: list[ParserEvent]) -> list[ParserEvent]:
    """The same events with neighbouring pieces of text joined."""
    found: list[ParserEvent] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, Content) and isinstance(last, Content):
            found[-1] = Content(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            found[-1] = Reasoning(last.text + event.text)
        elif isinstance(event, Arguments) and isinstance(last, Arguments) and last.index == event.index:
            found[-1] = Arguments(event.index, last.text + event.text)
        else:
            found.append(event)
    return found
