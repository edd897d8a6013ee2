"""The base of parsers whose text arrives in pieces. A parser is one generator that reads straight ahead.

`_run` looks at `_text[_at:]`, consumes with `_advance`, emits events, and yields when it needs more text. It returns at
the end of the text. A parser decides by the text alone and never by where a piece ended, so pieces of any size give the
same events, except for where the texts of events are cut.

    feed("Hi <too") -> Content("Hi")         " <too" waits: it may be the start of a tag
    feed("l_box>")  -> Content(" <tool_box>")
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import TypeAlias, TypeVar

from quire.serve.answer.parser import ParserEvent

T = TypeVar("T")
ParserSteps: TypeAlias = Generator[None, None, T]  # yields whenever it needs more text

SPACE = " \t\r\n"


class IncrementalParser:
    """A parser that waits for text. Owns the text not consumed yet and the events not returned yet."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0  # characters of `_text` consumed
        self._ended = False
        self._events: list[ParserEvent] = []
        self._consumed: list[str] | None = None  # pieces consumed during an attempt; None outside one
        self._running = self._run()

    def _run(self) -> ParserSteps[None]:
        """Parse the text. Subclasses implement this."""
        raise NotImplementedError

    def feed(self, text: str) -> list[ParserEvent]:
        self._text = self._text[self._at :] + text
        self._at = 0
        return self._resume()

    def finish(self) -> list[ParserEvent]:
        self._ended = True
        return self._resume()

    def _resume(self) -> list[ParserEvent]:
        next(self._running, None)
        events, self._events = self._events, []
        return events

    # --------------------------------------------------------------------------------- reading

    def _advance(self, end: int) -> str:
        """Consume up to index `end` of `_text` and return the consumed text."""
        piece = self._text[self._at : end]
        self._at = end
        if self._consumed is not None and piece:
            self._consumed.append(piece)
        return piece

    def _peek(self) -> ParserSteps[str]:
        """Return the next character without consuming it; "" at the end."""
        while self._at == len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._at]

    def _sees(self, word: str) -> ParserSteps[bool]:
        """Return whether `word` comes next, without consuming it."""
        while len(self._text) - self._at < len(word) and not self._ended:
            if not word.startswith(self._text[self._at :]):
                return False
            yield
        return self._text.startswith(word, self._at)

    def _while(self, pattern: re.Pattern[str]) -> ParserSteps[str]:
        """Consume the characters that match `pattern`, which stands for one or more of a class; return them."""
        pieces = []
        while (yield from self._peek()):
            match = pattern.match(self._text, self._at)
            if match is None:
                break
            pieces.append(self._advance(match.end()))
        return "".join(pieces)

    def _until(self, *words: str) -> ParserSteps[str | None]:
        """Consume text that certainly precedes all of `words` and the white space before the first one.

        Returns:
            The consumed text, as soon as there is some. None once one of `words`, possibly after white space, or the
            end of the text comes next.
        """
        while True:
            found = [at for word in words if (at := self._text.find(word, self._at)) >= 0]
            if found:
                end = min(found)
            else:
                end = len(self._text) - max(overlap(self._text, word) for word in words)
            if not found and self._ended:
                keep = len(self._text)
            else:
                keep = self._at + len(self._text[self._at : end].rstrip(SPACE))
            if keep > self._at:
                return self._advance(keep)
            if found or self._ended:
                return None
            yield

    def _skip(self, word: str) -> ParserSteps[bool]:
        """Consume `word`, or as much of it as there is before the end of the text. Return False for other text."""
        seen = yield from self._sees(word)
        rest = self._text[self._at :]
        if not seen and not (rest and word.startswith(rest)):
            return False
        self._advance(self._at + min(len(word), len(rest)))
        return True

    def _rest(self) -> ParserSteps[str | None]:
        """Consume all text that has arrived, waiting for some; return None at the end."""
        return self._advance(len(self._text)) if (yield from self._peek()) else None


def overlap(text: str, word: str) -> int:
    """Return the length of the longest proper prefix of `word` that `text` ends with."""
    for size in range(min(len(word) - 1, len(text)), 0, -1):
        if text.endswith(word[:size]):
            return size
    return 0
