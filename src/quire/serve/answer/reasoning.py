"""What a model thinks before it answers: `<think>...</think>` apart from the answer.

The thought comes first or not at all; tags further on are text. A chat template may write the opening tag into
the prompt, and then the answer begins inside the thought. White space around the thought is formatting and
left out. A thought without an end is thought to the end.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from quire.frontend.tokenizer.tokenizer import Tokenizer
from quire.serve.answer.incremental import SPACE, Incremental, Steps
from quire.serve.answer.parser import ParserEvent, Reasoning, TextParser

_SPACES = re.compile(f"[{SPACE}]+")


@dataclass(frozen=True, slots=True)
class Thought:
    """How a model marks its thoughts."""

    begin: str
    end: str

    def opened_by(self, prompt: str) -> bool:
        """Whether the answer to `prompt` begins inside a thought."""
        return prompt.rstrip(SPACE).endswith(self.begin)

    def closed_by(self, prompt: str) -> bool:
        """Whether the prompt holds the thought already, perhaps an empty one: none is to come."""
        return prompt.rstrip(SPACE).endswith(self.end)


THINK = Thought("<think>", "</think>")
REASONING_PARSERS: dict[str, Thought | None] = {"think": THINK, "none": None}
_ALIASES = {"qwen3": "think", "deepseek_r1": "think", "deepseek-r1": "think", "": "none"}


def known_reasoning_parser(name: str) -> bool:
    return name == "auto" or name in REASONING_PARSERS or name in _ALIASES


def choose_thought(name: str, template: str) -> Thought | None:
    """The thought's marks by the name of a parser; auto: by whether the chat template knows them."""
    if name == "auto":
        return THINK if THINK.end in template else None
    return REASONING_PARSERS[_ALIASES.get(name, name)]


def thought_tokens(thought: Thought, inside: bool, tokenizer: Tokenizer, ids: Sequence[int]) -> int:
    """How many tokens of an answer are its thought, the marks included; all of them without an end.

    Reads the text as ThoughtParser does, but as bytes: 0.1 ms for a thousand tokens.
    """
    pieces = [tokenizer.token_bytes(token) for token in ids]
    text, begin, end = b"".join(pieces), thought.begin.encode(), thought.end.encode()
    at = len(text) - len(text.lstrip(SPACE.encode()))
    if text.startswith(begin, at):
        at += len(begin)
    elif not inside:
        return 0
    at = text.find(end, at)
    if at < 0:
        return len(pieces)
    left = at + len(end)
    for count, piece in enumerate(pieces, 1):
        left -= len(piece)
        if left <= 0:
            return count
    return len(pieces)


class ThoughtParser(Incremental):
    """Thought as reasoning; what comes behind it goes through `inner`."""

    def __init__(self, thought: Thought, inside: bool, inner: TextParser) -> None:
        """`inside`: the prompt opened the thought."""
        super().__init__()
        self._thought, self._inside, self._inner = thought, inside, inner

    def _run(self) -> Steps[None]:
        spaces = yield from self._while(_SPACES)
        begins = yield from self._sees(self._thought.begin)
        if begins:
            self._advance(self._at + len(self._thought.begin))
        if begins or self._inside:
            yield from self._think()
            yield from self._while(_SPACES)
        elif spaces:
            self._events += self._inner.feed(spaces)
        while (piece := (yield from self._rest())) is not None:
            self._events += self._inner.feed(piece)

    def _think(self) -> Steps[None]:
        yield from self._while(_SPACES)
        while (piece := (yield from self._until(self._thought.end))) is not None:
            self._events.append(Reasoning(piece))
        yield from self._while(_SPACES)
        if (yield from self._sees(self._thought.end)):
            self._advance(self._at + len(self._thought.end))

    def finish(self) -> list[ParserEvent]:
        found = super().finish()
        return found + self._inner.finish()
