"""The messages of gpt-oss (the harmony format): each has a header with a channel, and perhaps a recipient.

    <|channel|>analysis<|message|>I look it up.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.find <|constrain|>json<|message|>{"city": "Oakford"}<|call|>
    <|start|>assistant<|channel|>final<|message|>It is in Oakford.<|return|>

The channel `analysis` is reasoning, the others are content, and messages to `functions` are tool calls.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from quire.serve.answer.incremental import SPACE, IncrementalParser, ParserSteps
from quire.serve.answer.parser import ParserEvent, Reasoning, TextParser
from quire.serve.answer.reasoning import ReasoningMarks

_STARTS = ("<|start|>", "<|channel|>")
_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_SPACES = re.compile(f"[{SPACE}]+")


class HarmonyMarks(ReasoningMarks):
    """The marks of gpt-oss."""

    __slots__ = ()

    @property
    def marks(self) -> tuple[str, ...]:
        return *_STARTS, _MESSAGE, "<|constrain|>", *_ENDS

    def make_parser(
        self,
        inside: bool,
        inner: TextParser,
        call_mark: str = "",
        make_probe: Callable[[], TextParser] | None = None,
    ) -> TextParser:
        return HarmonyReader(inside, inner)


HARMONY = HarmonyMarks(
    begin="<|channel|>analysis<|message|>",
    end="<|end|>",
    content_begin="<|channel|>final<|message|>",
    gap="<|start|>assistant",
)


class HarmonyReader(IncrementalParser):
    """The parser of messages. Content and calls go through another parser, `inner`, calls with a header."""

    def __init__(self, inside: bool, inner: TextParser) -> None:
        """Create a parser; `inside` says that the prompt ends with the header of an `analysis` message."""
        super().__init__()
        self._inside, self._inner = inside, inner

    def _run(self) -> ParserSteps[None]:
        if self._inside:
            yield from self._body(self._think)
        while (yield from self._peek()):
            if (yield from self._starts_message()):
                yield from self._message()
            elif (piece := (yield from self._until(*_STARTS))) is not None:  # text without a header
                self._pass_on(piece)
            else:
                self._pass_on((yield from self._while(_SPACES)))

    def _starts_message(self) -> ParserSteps[bool]:
        for start in _STARTS:
            if (yield from self._sees(start)):
                return True
        return False

    def _message(self) -> ParserSteps[None]:
        header = []
        while (piece := (yield from self._until(_MESSAGE))) is not None:
            header.append(piece)
        yield from self._while(_SPACES)
        yield from self._skip(_MESSAGE)
        text = "".join(header)
        channel, recipient = _CHANNEL.search(text), _RECIPIENT.search(text)
        if recipient is not None and recipient[1].startswith("functions."):
            self._pass_on(f"<|channel|>commentary to={recipient[1]} <|constrain|>json{_MESSAGE}")
            yield from self._body(self._pass_on)
            self._pass_on("<|call|>")
        elif recipient is not None or (channel is not None and channel[1] == "analysis"):
            yield from self._body(self._think)
        else:
            yield from self._body(self._pass_on)

    def _body(self, take: Callable[[str], None]) -> ParserSteps[None]:
        """Pass the text of a message to `take` and consume the mark that ends it."""
        while (piece := (yield from self._until(*_ENDS, *_STARTS))) is not None:
            take(piece)
        yield from self._while(_SPACES)
        for end in _ENDS:
            if (yield from self._skip(end)):
                return

    def _think(self, text: str) -> None:
        self._events.append(Reasoning(text))

    def _pass_on(self, text: str) -> None:
        self._events += self._inner.feed(text) if text else []

    def finish(self) -> list[ParserEvent]:
        events = super().finish()
        return events + self._inner.finish()
