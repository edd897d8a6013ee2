"""The answer to a chat as OpenAI's Responses API tells it: items, whole or in the events of a stream.

    created, in_progress, per item (output_item.added, its parts and deltas, output_item.done), completed

of a message and of a thought    content_part.added, ...delta ..., ...done, content_part.done
of a call                        function_call_arguments.delta ..., function_call_arguments.done
"""

from __future__ import annotations

import time
import uuid
from typing import Any

import msgspec
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
from quire.serve.api.logprobs import chat_logprobs
from quire.serve.api.protocol.chat import TokenLogprob
from quire.serve.api.protocol.responses import ResponseObject, ResponsesRequest, ResponsesUsage
from quire.serve.http.errors import ApiError
from quire.serve.http.stream import named_event
from quire.types import CompletionOutput

ResponsesEvent = dict[str, Any]
Item = dict[str, Any]
_PREFIXES = {"text": "msg", "thought": "rs", "call": "fc"}
_NAMES = {"text": "response.output_text", "thought": "response.reasoning_text"}


class ResponseAnswer:
    """Owns the items of one answer, and counts the events of its stream."""

    def __init__(self, turn: Turn, wanted: ResponsesRequest, store: bool) -> None:
        """`store`: it will be kept."""
        self._turn = turn
        self._blocks = ContentBlocks(turn.form.make_parser(), turn.chat.include_reasoning is not False)
        self._items: list[Item] = []
        self._held: list[TokenLogprob] = []  # of tokens whose text is not out yet
        self._logprobs: list[TokenLogprob] = []  # of the last text
        self._sequence = 0
        self.object = _begun(turn, wanted, store)

    def response(self) -> ResponseObject:
        """The whole, once all has come."""
        self._add(self._turn.generation.states[0].output().outputs[0])
        return self.object

    def _add(self, output: CompletionOutput) -> list[ResponsesEvent]:
        """Take in a piece of the answer, or all of it."""
        if self._turn.chat.logprobs and output.logprobs is not None:
            chat, tokenizer = self._turn.chat, self._turn.server.engine.tokenizer
            as_ids = bool(chat.return_tokens_as_token_ids)
            top = chat.top_logprobs or 0
            found = chat_logprobs(output.token_ids, output.logprobs, top, tokenizer, as_ids)
            self._held += found.content or []
        changes = self._blocks.add(output)
        cut = output.finish_reason == "length"
        events = []
        for change in changes:
            events += self._change(change, "incomplete" if cut and change is changes[-1] else "completed")
        if output.finish_reason is not None:
            self._finish(cut)
        return events

    def _finish(self, cut: bool) -> None:
        found = self.object
        found.status = "incomplete" if cut else "completed"
        found.incomplete_details = {"reason": "max_output_tokens"} if cut else None
        found.completed_at = None if cut else int(time.time())
        found.output = self._items
        found.usage = self._usage()
        found.receipt = self._turn.receipt()

    def _usage(self) -> ResponsesUsage:
        generation, count = self._turn.generation, self._turn.form.thought_tokens
        thinking = 0 if count is None else count(generation.states[0].answers[0].token_ids)
        return ResponsesUsage(
            input_tokens=generation.prompt_tokens,
            input_tokens_details={"cached_tokens": generation.cached_tokens, "cache_write_tokens": 0},
            output_tokens=generation.completion_tokens,
            output_tokens_details={"reasoning_tokens": thinking},
            total_tokens=generation.prompt_tokens + generation.completion_tokens,
        )

    # ------------------------------------------------------------------------------------- items

    def _change(self, change: BlockChange, status: str) -> list[ResponsesEvent]:
        block = change.block
        if isinstance(change, BlockStarted):
            self._items.append(_item(block))
            return self._begin(block)
        if isinstance(change, BlockDelta):
            return [self._grow(block, change.text)]
        assert isinstance(change, BlockEnded)
        return self._end(block, status)

    def _begin(self, block: ContentBlock) -> list[ResponsesEvent]:
        events = [
            self._event("response.output_item.added", output_index=block.index, item=dict(self._items[-1]))
        ]
        if block.kind != "call":
            events.append(self._of(block, "response.content_part.added", part=_part(block, "", [])))
        return events

    def _grow(self, block: ContentBlock, text: str) -> ResponsesEvent:
        if block.kind == "call":
            return self._of(block, "response.function_call_arguments.delta", delta=text)
        if block.kind == "thought":
            return self._of(block, "response.reasoning_text.delta", delta=text)
        new, self._held = self._held, []
        self._logprobs += new
        return self._of(block, "response.output_text.delta", delta=text, logprobs=new)

    def _end(self, block: ContentBlock, status: str) -> list[ResponsesEvent]:
        item, text = self._items[block.index], block.text
        item["status"] = status
        if block.kind == "call":
            item["arguments"] = text
            names = {"name": block.name, "arguments": text}
            events = [self._of(block, "response.function_call_arguments.done", **names)]
        else:
            part = _part(block, text, [*self._logprobs, *self._held])
            self._logprobs, self._held = [], []
            item["content"] = [part]
            more = {"logprobs": part["logprobs"]} if block.kind == "text" else {}
            events = [
                self._of(block, f"{_NAMES[block.kind]}.done", text=text, **more),
                self._of(block, "response.content_part.done", part=part),
            ]
        return [*events, self._event("response.output_item.done", output_index=block.index, item=item)]

    # ------------------------------------------------------------------------------------ stream

    def _event(self, kind: str, **fields: Any) -> ResponsesEvent:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence - 1, **fields}

    def _of(self, block: ContentBlock, kind: str, **fields: Any) -> ResponsesEvent:
        """An event about the inside of an item."""
        item_id = self._items[block.index]["id"]
        if block.kind != "call":
            fields["content_index"] = 0
        return self._event(kind, item_id=item_id, output_index=block.index, **fields)

    def chunks(self, deltas: list[Delta]) -> list[bytes]:
        events: list[ResponsesEvent] = []
        if not self._sequence:
            events = [self._told("response.created"), self._told("response.in_progress")]
        for _, output in deltas:
            events += self._add(output)
        return list(map(named_event, events))

    def last(self) -> list[bytes]:
        return [named_event(self._told(f"response.{self.object.status}"))]

    def _told(self, kind: str) -> ResponsesEvent:
        """An event about the whole, as it is now."""
        return self._event(kind, response=msgspec.structs.replace(self.object))

    def failed(self, error: ApiError) -> bytes:
        """How a stream ends that cannot go on."""
        self.object.status = "failed"
        self.object.error = {"code": "server_error", "message": error.message}
        events = [
            self._event("error", code=error.code, message=error.message, param=error.param),
            self._told("response.failed"),
        ]
        return b"".join(map(named_event, events))


def _item(block: ContentBlock) -> Item:
    """An item that has just begun."""
    found = {"type": "message", "id": f"{_PREFIXES[block.kind]}_{uuid.uuid4().hex}", "status": "in_progress"}
    match block.kind:
        case "text":
            return {**found, "role": "assistant", "content": []}
        case "thought":
            return {**found, "type": "reasoning", "summary": [], "content": []}
        case "call":
            call = {"call_id": block.call_id, "name": block.name, "arguments": ""}
            return {**found, "type": "function_call", **call}


def _part(block: ContentBlock, text: str, logprobs: list[TokenLogprob]) -> dict[str, Any]:
    if block.kind == "thought":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _begun(turn: Turn, wanted: ResponsesRequest, store: bool) -> ResponseObject:
    """A response without output. What was asked for comes again in it."""
    functions = [
        {"description": None, "strict": None, "parameters": None, **tool} for tool in wanted.tools or ()
    ]
    return ResponseObject(
        id=f"resp_{wanted.request_id or uuid.uuid4().hex}",
        created_at=int(time.time()),
        status="in_progress",
        instructions=wanted.instructions,
        max_output_tokens=wanted.max_output_tokens,
        model=turn.model,
        output=[],
        parallel_tool_calls=wanted.parallel_tool_calls is not False,
        previous_response_id=wanted.previous_response_id,
        prompt_cache_key=wanted.prompt_cache_key,
        reasoning={"effort": turn.chat.reasoning_effort, "summary": None},
        safety_identifier=wanted.safety_identifier,
        store=store,
        temperature=turn.params.temperature,
        text={"format": {"type": "text"}, **(wanted.text or {})},
        tool_choice=wanted.tool_choice or "auto",
        tools=functions,
        top_logprobs=wanted.top_logprobs or 0,
        top_p=turn.params.top_p,
        user=wanted.user if wanted.user is not None else UNSET,
        metadata=wanted.metadata or {},
        warnings=turn.warnings or UNSET,
    )
