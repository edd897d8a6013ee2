"""The interface of parsers, which split a model's text into content, reasoning and tool calls.

Each choice has its own parser, fed with text as it is generated. Streams and whole answers use the same parsers, so
they cannot differ. A parser may hold text back until it can classify it, and must emit the rest at `finish`.
`PlainText` is the parser of models and requests without reasoning and tools.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

from quire.types import CompletionOutput


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """The start of a tool call; its arguments follow. `index` counts the calls of a choice from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of a call's arguments. Concatenating the pieces of a call gives one JSON text."""

    index: int
    text: str


ParserEvent: TypeAlias = Content | Reasoning | ToolCall | Arguments


class TextParser(Protocol):
    """A parser of one choice."""

    def feed(self, text: str) -> list[ParserEvent]:
        """Parse the next piece of text and return the events that it completes."""
        ...

    def finish(self) -> list[ParserEvent]:
        """Return the events for the text that was held back. No text follows."""
        ...


class PlainText:
    """The parser for which all text is content."""

    def feed(self, text: str) -> list[ParserEvent]:
        return [Content(text)] if text else []

    def finish(self) -> list[ParserEvent]:
        return []


def parse_output(parser: TextParser, output: CompletionOutput) -> list[ParserEvent]:
    """Feed a piece of an answer, or all of it, to the parser; return its events."""
    events = parser.feed(output.text) if output.text else []
    return events if output.finish_reason is None else [*events, *parser.finish()]


def merge_events(events: list[ParserEvent]) -> list[ParserEvent]:
    """Join neighbouring events of the same kind."""
    joined: list[ParserEvent] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, Content) and isinstance(last, Content):
            joined[-1] = Content(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            joined[-1] = Reasoning(last.text + event.text)
        elif isinstance(event, Arguments) and isinstance(last, Arguments) and last.index == event.index:
            joined[-1] = Arguments(event.index, last.text + event.text)
        else:
            joined.append(event)
    return joined
