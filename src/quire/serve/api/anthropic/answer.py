"""The answer to a chat as Anthropic's API tells it: one message, whole or in the events of a stream.

message_start, per block (content_block_start, content_block_delta ..., content_block_stop), message_delta,
message_stop; a ping after the first block has begun
"""

from __future__ import annotations

import json
import uuid
from typing import Any

from msgspec import UNSET

from quire.serve.answer.content_blocks import (
    BlockChange,
    BlockDelta,
    BlockEnded,
    BlockStarted,
    ContentBlock,
    ContentBlocks,
)
from quire.serve.answer.generation import Delta
from quire.serve.api.chat import Turn
from quire.serve.api.protocol.messages import MessagesResponse, MessagesUsage
from quire.serve.http.stream import named_event
from quire.types import CompletionOutput

AnthropicEvent = dict[str, Any]


class MessageAnswer:
    """Owns the blocks of one answer."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._id = f"msg_{turn.chat.request_id or uuid.uuid4().hex}"
        self._blocks = ContentBlocks(turn.form.make_parser(), turn.chat.include_reasoning is not False)
        self._begun = False
        self._end: CompletionOutput | None = None  # the piece that said why the answer ended

    def response(self) -> MessagesResponse:
        output = self._turn.generation.states[0].output().outputs[0]
        self._blocks.add(output)
        found = self._message()
        found.content = [_whole(block) for block in self._blocks.all]
        found.stop_reason, found.stop_sequence = self._why(output)
        found.receipt = self._turn.receipt()
        return found

    def _message(self) -> MessagesResponse:
        """Without content."""
        turn = self._turn
        return MessagesResponse(
            id=self._id, model=turn.model, content=[], usage=self._usage(), warnings=turn.warnings or UNSET
        )

    def _usage(self) -> MessagesUsage:
        generation = self._turn.generation
        cached = generation.cached_tokens
        return MessagesUsage(
            input_tokens=generation.prompt_tokens - cached,
            cache_read_input_tokens=cached,
            output_tokens=generation.completion_tokens,
        )

    def _why(self, output: CompletionOutput) -> tuple[str, str | None]:
        """stop_reason and stop_sequence."""
        if output.finish_reason == "length":
            turn, generation = self._turn, self._turn.generation
            asked = turn.params.max_tokens
            if asked is None or generation.completion_tokens < asked:
                return "model_context_window_exceeded", None
            return "max_tokens", None
        if isinstance(output.stop_reason, str):
            return "stop_sequence", output.stop_reason
        return "tool_use" if self._blocks.called else "end_turn", None

    # ------------------------------------------------------------------------------------ stream

    def chunks(self, deltas: list[Delta]) -> list[bytes]:
        found: list[AnthropicEvent] = []
        if not self._begun:
            self._begun = True
            found.append({"type": "message_start", "message": self._message()})
        for _, output in deltas:
            for change in self._blocks.add(output):
                found += _events(change)
            if output.finish_reason is not None:
                self._end = output
        return list(map(named_event, found))

    def last(self) -> list[bytes]:
        assert self._end is not None
        reason, sequence = self._why(self._end)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        end: AnthropicEvent = {"type": "message_delta", "delta": delta, "usage": self._usage()}
        if (receipt := self._turn.receipt()) is not UNSET:
            end["receipt"] = receipt
        return [named_event(end), named_event({"type": "message_stop"})]


def _events(change: BlockChange) -> list[AnthropicEvent]:
    index = change.block.index
    match change:
        case BlockStarted(block):
            begun = {"type": "content_block_start", "index": index, "content_block": _shell(block)}
            return [begun] if index else [begun, {"type": "ping"}]
        case BlockDelta(block, text):
            return [{"type": "content_block_delta", "index": index, "delta": _delta(block, text)}]
        case BlockEnded(_):
            return [{"type": "content_block_stop", "index": index}]


def _shell(block: ContentBlock) -> AnthropicEvent:
    """A block without what it will hold."""
    match block.kind:
        case "text":
            return {"type": "text", "text": ""}
        case "thought":
            return {"type": "thinking", "thinking": "", "signature": ""}  # nobody checks signatures here
        case "call":
            return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}


def _delta(block: ContentBlock, text: str) -> AnthropicEvent:
    match block.kind:
        case "text":
            return {"type": "text_delta", "text": text}
        case "thought":
            return {"type": "thinking_delta", "thinking": text}
        case "call":
            return {"type": "input_json_delta", "partial_json": text}


def _whole(block: ContentBlock) -> AnthropicEvent:
    match block.kind:
        case "text":
            return {**_shell(block), "text": block.text}
        case "thought":
            return {**_shell(block), "thinking": block.text}
        case "call":
            return {**_shell(block), "input": _arguments(block.text)}


def _arguments(text: str) -> dict[str, Any]:
    """Empty for a call that max_tokens cut off: half of a JSON text has no value."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
