"""An answer as a list of content blocks, for APIs whose answers are lists of reasoning, texts and calls.

events   Reasoning Reasoning   Content Content   ToolCall Arguments Arguments
blocks   [reasoning        ]   [text         ]   [call                      ]
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from quire.serve.answer.parser import (
    Arguments,
    Content,
    ParserEvent,
    Reasoning,
    TextParser,
    ToolCall,
    merge_events,
    parse_output,
)
from quire.types import CompletionOutput


@dataclass(slots=True)
class ContentBlock:
    """One block of an answer."""

    index: int
    kind: Literal["reasoning", "text", "call"]
    call_id: str = ""
    name: str = ""  # of the called function
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Return the reasoning, the text, or the call's arguments (JSON) so far."""
        return "".join(self.pieces)

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments of a call as an object; an empty one if max_tokens cut their JSON off."""
        try:
            arguments = json.loads(self.text)
        except (ValueError, RecursionError):
            return {}
        return arguments if isinstance(arguments, dict) else {}


@dataclass(frozen=True, slots=True)
class BlockStart:
    """The change that opens a block."""

    block: ContentBlock


@dataclass(frozen=True, slots=True)
class BlockDelta:
    """The change that appends text to a block."""

    block: ContentBlock
    text: str


@dataclass(frozen=True, slots=True)
class BlockEnd:
    """The change that closes a block."""

    block: ContentBlock


BlockChange: TypeAlias = BlockStart | BlockDelta | BlockEnd


class ContentBlocks:
    """The blocks of one choice. Owns its parser; only the last block may still grow."""

    def __init__(self, parser: TextParser, reasoning: bool = True) -> None:
        """Create an empty list; `reasoning` says whether blocks of reasoning are included."""
        self.all: list[ContentBlock] = []
        self._parser, self._reasoning = parser, reasoning
        self._open: ContentBlock | None = None

    @property
    def has_calls(self) -> bool:
        return any(block.kind == "call" for block in self.all)

    def add(self, output: CompletionOutput) -> list[BlockChange]:
        """Add a piece of the answer, or all of it; return the changes to the blocks."""
        changes: list[BlockChange] = []
        for event in merge_events(parse_output(self._parser, output)):
            if self._reasoning or not isinstance(event, Reasoning):
                self._apply(event, changes)
        if output.finish_reason is not None:
            self._close_block(changes)
        return changes

    def _apply(self, event: ParserEvent, changes: list[BlockChange]) -> None:
        if isinstance(event, ToolCall):
            self._open_block(ContentBlock(len(self.all), "call", event.id, event.name), changes)
            return
        if isinstance(event, (Content, Reasoning)):
            kind: Literal["reasoning", "text"] = "text" if isinstance(event, Content) else "reasoning"
            if self._open is None or self._open.kind != kind:
                self._open_block(ContentBlock(len(self.all), kind), changes)
        assert self._open is not None and (self._open.kind == "call") == isinstance(event, Arguments)
        self._open.pieces.append(event.text)
        changes.append(BlockDelta(self._open, event.text))

    def _open_block(self, block: ContentBlock, changes: list[BlockChange]) -> None:
        self._close_block(changes)
        self._open = block
        self.all.append(block)
        changes.append(BlockStart(block))

    def _close_block(self, changes: list[BlockChange]) -> None:
        if self._open is not None:
            changes.append(BlockEnd(self._open))
            self._open = None
