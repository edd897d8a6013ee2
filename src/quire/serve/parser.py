"""What a model's text means: content, reasoning, calls of tools. The seam for parsers of tools and reasoning.

A parser is made per choice and fed the text as it comes; streams and whole answers go through the same one,
so they cannot differ. It may hold text back until it knows what it is, and must let everything out at
`finish`. Off is `PlainText`, for which all text is content.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias


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


Event: TypeAlias = Content | Reasoning | ToolCall | Arguments


class TextParser(Protocol):
    def feed(self, text: str) -> list[Event]:
        """What `text`, the next piece of the answer, brought to light."""
        ...

    def finish(self) -> list[Event]:
        """No more text comes: let out what was held back."""
        ...


class PlainText:
    """All text is content."""

    def feed(self, text: str) -> list[Event]:
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        return []
