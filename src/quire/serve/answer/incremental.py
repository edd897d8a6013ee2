"""Parsers of text that comes in pieces, written as one coroutine that reads straight ahead.

`_run` looks at `_text[_at:]`, consumes with `_advance`, emits events, and yields when it needs more text; it
ends when the text has. A parser decides by text alone, never by where a piece ended, so pieces of any size
bring the same events, but for how their texts are cut.

    feed("Hi <too") -> Content("Hi")         " <too" waits: it may be the beginning of a tag
    feed("l_box>")  -> Content(" <tool_box>")
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import TypeAlias, TypeVar

from quire.serve.answer.parser import ParserEvent

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]  # yields whenever it needs more text

SPACE = " \t\r\n"


class Incremental:
    """Owns the text that is not consumed yet, and the events that are not handed out."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0  # of `_text`, consumed
        self._ended = False
        self._events: list[ParserEvent] = []
        self._record: list[str] | None = None  # what was consumed since somebody began to record
        self._running = self._run()

    def _run(self) -> Steps[None]:
        raise NotImplementedError

    def feed(self, text: str) -> list[ParserEvent]:
        self._text = self._text[self._at :] + text
        self._at = 0
        return self._go_on()

    def finish(self) -> list[ParserEvent]:
        self._ended = True
        return self._go_on()

    def _go_on(self) -> list[ParserEvent]:
        next(self._running, None)
        found, self._events = self._events, []
        return found

    # --------------------------------------------------------------------------------- reading

    def _advance(self, end: int) -> str:
        """Consume up to `end`, a place in `_text`."""
        piece = self._text[self._at : end]
        self._at = end
        if self._record is not None and piece:
            self._record.append(piece)
        return piece

    def _peek(self) -> Steps[str]:
        """The next character; "" at the end."""
        while self._at == len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._at]

    def _sees(self, word: str) -> Steps[bool]:
        """Whether `word` comes next. It is not consumed."""
        while len(self._text) - self._at < len(word) and not self._ended:
            if not word.startswith(self._text[self._at :]):
                return False
            yield
        return self._text.startswith(word, self._at)

    def _while(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Consume as long as characters fit `pattern`, one or more of a class."""
        found = []
        while (yield from self._peek()):
            match = pattern.match(self._text, self._at)
            if match is None:
                break
            found.append(self._advance(match.end()))
        return "".join(found)

    def _until(self, word: str) -> Steps[str | None]:
        """Consume what certainly comes before `word`, and before the white space before `word`.

        Returns the consumed text as soon as there is some, or None once `word` (after white space) or the end
        comes next.
        """
        while True:
            at = self._text.find(word, self._at)
            end = at if at >= 0 else len(self._text) - overlap(self._text, word)
            if at < 0 and self._ended:
                end = keep = len(self._text)
            else:
                keep = self._at + len(self._text[self._at : end].rstrip(SPACE))
            if keep > self._at:
                return self._advance(keep)
            if at >= 0 or self._ended:
                return None
            yield

    def _rest(self) -> Steps[str | None]:
        """Consume whatever is there, as soon as there is some; None at the end."""
        return self._advance(len(self._text)) if (yield from self._peek()) else None


def overlap(text: str, word: str) -> int:
    """Length of the longest beginning of `word`, but not all of it, with which `text` ends."""
    for size in range(min(len(word) - 1, len(text)), 0, -1):
        if text.endswith(word[:size]):
            return size
    return 0
