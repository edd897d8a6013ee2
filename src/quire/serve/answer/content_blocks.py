"""An answer as blocks, one after the other: for APIs whose answers are lists of thoughts, texts and calls.

events   Reasoning Reasoning   Content Content   ToolCall Arguments Arguments
blocks   [thought          ]   [text         ]   [call                      ]
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from quire.serve.answer.parser import (
    Arguments,
    Content,
    ParserEvent,
    Reasoning,
    TextParser,
    ToolCall,
    merged,
    read,
)
from quire.types import CompletionOutput


@dataclass(slots=True)
class ContentBlock:
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
class BlockStarted:
    block: ContentBlock


@dataclass(frozen=True, slots=True)
class BlockDelta:
    block: ContentBlock
    text: str


@dataclass(frozen=True, slots=True)
class BlockEnded:
    block: ContentBlock


BlockChange: TypeAlias = BlockStarted | BlockDelta | BlockEnded


class ContentBlocks:
    """Owns the parser of one answer, and its blocks; the last of them may still grow."""

    def __init__(self, parser: TextParser, thoughts: bool = True) -> None:
        """`thoughts` False: leave them out."""
        self.all: list[ContentBlock] = []
        self._parser, self._thoughts = parser, thoughts
        self._open: ContentBlock | None = None

    @property
    def called(self) -> bool:
        return any(block.kind == "call" for block in self.all)

    def add(self, output: CompletionOutput) -> list[BlockChange]:
        """What a piece of the answer, or all of it, changes; put together, pieces change as much as all at once."""
        changes: list[BlockChange] = []
        for event in merged(read(self._parser, output)):
            if self._thoughts or not isinstance(event, Reasoning):
                self._apply(event, changes)
        if output.finish_reason is not None:
            self._end(changes)
        return changes

    def _apply(self, event: ParserEvent, changes: list[BlockChange]) -> None:
        if isinstance(event, ToolCall):
            self._begin(ContentBlock(len(self.all), "call", event.id, event.name), changes)
            return
        if isinstance(event, (Content, Reasoning)):
            kind: Literal["thought", "text"] = "text" if isinstance(event, Content) else "thought"
            if self._open is None or self._open.kind != kind:
                self._begin(ContentBlock(len(self.all), kind), changes)
        assert self._open is not None and (self._open.kind == "call") == isinstance(event, Arguments)
        self._open.pieces.append(event.text)
        changes.append(BlockDelta(self._open, event.text))

    def _begin(self, block: ContentBlock, changes: list[BlockChange]) -> None:
        self._end(changes)
        self._open = block
        self.all.append(block)
        changes.append(BlockStarted(block))

    def _end(self, changes: list[BlockChange]) -> None:
        if self._open is not None:
            changes.append(BlockEnded(self._open))
            self._open = None
