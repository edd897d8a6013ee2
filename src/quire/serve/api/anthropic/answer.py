"""The answer to a chat in the form of Anthropic's API: one message, or the events of a stream.

message_start, per block (content_block_start, content_block_delta ..., content_block_stop), message_delta,
message_stop; a ping follows the first content_block_start
"""

from __future__ import annotations

import uuid
from typing import Any

from msgspec import UNSET
from starlette.requests import Request

from quire.serve.answer.content_blocks import BlockChange, BlockDelta, BlockEnd, BlockStart, ContentBlock
from quire.serve.api.api_answer import BlockAnswer, OpenChat
from quire.serve.api.protocol.messages import MessagesResponse, MessagesUsage
from quire.serve.http.stream import StreamFraming, named_event
from quire.types import CompletionOutput

AnthropicEvent = dict[str, Any]


class MessageAnswer(BlockAnswer):
    """The answer to one request of Anthropic's API: one message."""

    def __init__(self, opened: OpenChat) -> None:
        super().__init__(opened)
        self._id = f"msg_{opened.chat.request_id or uuid.uuid4().hex}"
        self._end: CompletionOutput | None = None  # the piece with the finish reason

    def framing(self, request: Request) -> StreamFraming:
        request_id = request.scope["request_id"]
        return StreamFraming(lambda error: named_event(error.anthropic_body(request_id)))

    def response(self) -> MessagesResponse:
        output = self._add_all()
        body = self._empty_message()
        body.content = [_whole(block) for block in self._blocks.all]
        body.stop_reason, body.stop_sequence = self._stop_reason(output)
        body.receipt = self._receipt()
        return body

    def _empty_message(self) -> MessagesResponse:
        return MessagesResponse(
            id=self._id,
            model=self._model,
            content=[],
            usage=self._usage(),
            warnings=self._warnings or UNSET,
        )

    def _usage(self) -> MessagesUsage:
        generation = self._generation
        cached = generation.cached_tokens
        return MessagesUsage(
            input_tokens=generation.prompt_tokens - cached,
            cache_read_input_tokens=cached,
            output_tokens=generation.completion_tokens,
        )

    def _stop_reason(self, output: CompletionOutput) -> tuple[str, str | None]:
        """Return `stop_reason` and `stop_sequence`."""
        if output.finish_reason == "length":
            limit = self._opened.params.max_tokens
            if limit is None or self._generation.completion_tokens < limit:
                return "model_context_window_exceeded", None
            return "max_tokens", None
        if isinstance(output.stop_reason, str):
            return "stop_sequence", output.stop_reason
        return "tool_use" if self._blocks.has_calls else "end_turn", None

    # ------------------------------------------------------------------------------------ stream

    def _opening(self) -> list[AnthropicEvent]:
        return [{"type": "message_start", "message": self._empty_message()}]

    def _add(self, output: CompletionOutput) -> list[AnthropicEvent]:
        if output.finish_reason is not None:
            self._end = output
        return [event for change in self._blocks.add(output) for event in _events(change)]

    def _closing(self) -> list[AnthropicEvent]:
        assert self._end is not None
        reason, sequence = self._stop_reason(self._end)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        end: AnthropicEvent = {"type": "message_delta", "delta": delta, "usage": self._usage()}
        if (receipt := self._receipt()) is not UNSET:
            end["receipt"] = receipt
        return [end, {"type": "message_stop"}]


def _events(change: BlockChange) -> list[AnthropicEvent]:
    index = change.block.index
    match change:
        case BlockStart(block):
            start = {"type": "content_block_start", "index": index, "content_block": _empty_block(block)}
            return [start] if index else [start, {"type": "ping"}]
        case BlockDelta(block, text):
            return [{"type": "content_block_delta", "index": index, "delta": _delta(block, text)}]
        case BlockEnd(_):
            return [{"type": "content_block_stop", "index": index}]


def _empty_block(block: ContentBlock) -> dict[str, Any]:
    """Return a block without its content."""
    match block.kind:
        case "text":
            return {"type": "text", "text": ""}
        case "reasoning":
            return {"type": "thinking", "thinking": "", "signature": ""}  # Quire checks no signatures
        case "call":
            return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}


def _delta(block: ContentBlock, text: str) -> dict[str, Any]:
    match block.kind:
        case "text":
            return {"type": "text_delta", "text": text}
        case "reasoning":
            return {"type": "thinking_delta", "thinking": text}
        case "call":
            return {"type": "input_json_delta", "partial_json": text}


def _whole(block: ContentBlock) -> dict[str, Any]:
    match block.kind:
        case "text":
            return {**_empty_block(block), "text": block.text}
        case "reasoning":
            return {**_empty_block(block), "thinking": block.text}
        case "call":
            return {**_empty_block(block), "input": block.arguments}
