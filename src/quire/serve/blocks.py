"""An answer as blocks, one after the other: for APIs whose answers are lists of thoughts, texts and calls.

events   Reasoning Reasoning   Content Content   ToolCall Arguments Arguments
blocks   [thought          ]   [text         ]   [call                      ]
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from quire.serve.parser import Arguments, Content, Event, Reasoning, TextParser, ToolCall, merged, read
from quire.types import CompletionOutput


@dataclass(slots=True)
class Block:
    index: int
    kind: Literal["thought", "text", "call"]
    call_id: str = ""
    name: str = ""  # of the function that is called
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The thought, the text, or the call's arguments (JSON), so far."""
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class Begun:
    block: Block


@dataclass(frozen=True, slots=True)
class Grown:
    block: Block
    text: str


@dataclass(frozen=True, slots=True)
class Ended:
    block: Block


Change: TypeAlias = Begun | Grown | Ended


class Blocks:
    """Owns the parser of one answer, and its blocks; the last of them may still grow."""

    def __init__(self, parser: TextParser, thoughts: bool = True) -> None:
        """`thoughts` False: leave them out."""
        self.all: list[Block] = []
        self._parser, self._thoughts = parser, thoughts
        self._open: Block | None = None

    @property
    def called(self) -> bool:
        return any(block.kind == "call" for block in self.all)

    def add(self, output: CompletionOutput) -> list[Change]:
        """What a piece of the answer, or all of it, changes; put together, pieces change as much as all at once."""
        changes: list[Change] = []
        for event in merged(read(self._parser, output)):
            if self._thoughts or not isinstance(event, Reasoning):
                self._apply(event, changes)
        if output.finish_reason is not None:
            self._end(changes)
        return changes

    def _apply(self, event: Event, changes: list[Change]) -> None:
        if isinstance(event, ToolCall):
            self._begin(Block(len(self.all), "call", event.id, event.name), changes)
            return
        if isinstance(event, (Content, Reasoning)):
            kind: Literal["thought", "text"] = "text" if isinstance(event, Content) else "thought"
            if self._open is None or self._open.kind != kind:
                self._begin(Block(len(self.all), kind), changes)
        assert self._open is not None and (self._open.kind == "call") == isinstance(event, Arguments)
        self._open.pieces.append(event.text)
        changes.append(Grown(self._open, event.text))

    def _begin(self, block: Block, changes: list[Change]) -> None:
        self._end(changes)
        self._open = block
        self.all.append(block)
        changes.append(Begun(block))

    def _end(self, changes: list[Change]) -> None:
        if self._open is not None:
            changes.append(Ended(self._open))
            self._open = None
