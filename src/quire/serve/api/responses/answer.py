"""The answer to a chat in the form of OpenAI's Responses API: items, or the events of a stream.

created, in_progress, per item (output_item.added, its parts and deltas, output_item.done), completed

message, reasoning   content_part.added, ...delta ..., ...done, content_part.done
function_call        function_call_arguments.delta ..., function_call_arguments.done
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request

from quire.serve.answer.content_blocks import BlockChange, BlockDelta, BlockEnd, BlockStart, ContentBlock
from quire.serve.api.api_answer import BlockAnswer, OpenChat
from quire.serve.api.logprobs import chat_logprobs
from quire.serve.api.protocol.chat import TokenLogprob
from quire.serve.api.protocol.responses import ResponseObject, ResponsesRequest, ResponsesUsage
from quire.serve.http.errors import ApiError
from quire.serve.http.stream import StreamFraming, named_event
from quire.types import CompletionOutput

ResponsesEvent = dict[str, Any]
Item = dict[str, Any]
_PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}
_NAMES = {"text": "response.output_text", "reasoning": "response.reasoning_text"}


class ResponseAnswer(BlockAnswer):
    """The answer to one request of the Responses API. Owns its items and numbers the events of its stream."""

    def __init__(
        self, opened: OpenChat, request: ResponsesRequest, store: Callable[[ResponseObject], None] | None
    ) -> None:
        """`store` keeps the complete response; None: it is not kept."""
        super().__init__(opened)
        self._store = store
        self._items: list[Item] = []
        self._held: list[TokenLogprob] = []  # of tokens whose text has not been emitted
        self._logprobs: list[TokenLogprob] = []  # of the open text block
        self._sequence = 0
        self._response = _empty_response(opened, request, store is not None)

    def response(self) -> ResponseObject:
        self._add_all()
        return self._response

    def on_complete(self) -> None:
        # The client may continue from this response as soon as it sees the end, so it is stored before that.
        if self._store is not None:
            self._store(self._response)

    def _add(self, output: CompletionOutput) -> list[ResponsesEvent]:
        chat = self._opened.chat
        if chat.logprobs and output.logprobs is not None:
            tokenizer = self._opened.server.engine.tokenizer
            as_ids = bool(chat.return_tokens_as_token_ids)
            top = chat.top_logprobs or 0
            logprobs = chat_logprobs(output.token_ids, output.logprobs, top, tokenizer, as_ids)
            self._held += logprobs.content or []
        changes = self._blocks.add(output)
        cut = output.finish_reason == "length"
        events = []
        for change in changes:
            events += self._change(change, "incomplete" if cut and change is changes[-1] else "completed")
        if output.finish_reason is not None:
            self._finish(cut)
        return events

    def _finish(self, cut: bool) -> None:
        response = self._response
        response.status = "incomplete" if cut else "completed"
        response.incomplete_details = {"reason": "max_output_tokens"} if cut else None
        response.completed_at = None if cut else int(time.time())
        response.output = self._items
        response.usage = self._usage()
        response.receipt = self._receipt()

    def _usage(self) -> ResponsesUsage:
        generation = self._generation
        return ResponsesUsage(
            input_tokens=generation.prompt_tokens,
            input_tokens_details={"cached_tokens": generation.cached_tokens, "cache_write_tokens": 0},
            output_tokens=generation.completion_tokens,
            output_tokens_details={"reasoning_tokens": self._opened.reasoning_tokens() or 0},
            total_tokens=generation.prompt_tokens + generation.completion_tokens,
        )

    # ------------------------------------------------------------------------------------- items

    def _change(self, change: BlockChange, status: str) -> list[ResponsesEvent]:
        block = change.block
        if isinstance(change, BlockStart):
            self._items.append(_item(block))
            return self._start(block)
        if isinstance(change, BlockDelta):
            return [self._grow(block, change.text)]
        assert isinstance(change, BlockEnd)
        return self._end(block, status)

    def _start(self, block: ContentBlock) -> list[ResponsesEvent]:
        events = [
            self._event("response.output_item.added", output_index=block.index, item=dict(self._items[-1]))
        ]
        if block.kind != "call":
            events.append(self._item_event(block, "response.content_part.added", part=_part(block, "", [])))
        return events

    def _grow(self, block: ContentBlock, text: str) -> ResponsesEvent:
        if block.kind == "call":
            return self._item_event(block, "response.function_call_arguments.delta", delta=text)
        if block.kind == "reasoning":
            return self._item_event(block, "response.reasoning_text.delta", delta=text)
        new, self._held = self._held, []
        self._logprobs += new
        return self._item_event(block, "response.output_text.delta", delta=text, logprobs=new)

    def _end(self, block: ContentBlock, status: str) -> list[ResponsesEvent]:
        item, text = self._items[block.index], block.text
        item["status"] = status
        if block.kind == "call":
            item["arguments"] = text
            names = {"name": block.name, "arguments": text}
            events = [self._item_event(block, "response.function_call_arguments.done", **names)]
        else:
            part = _part(block, text, [*self._logprobs, *self._held])
            self._logprobs, self._held = [], []
            item["content"] = [part]
            more = {"logprobs": part["logprobs"]} if block.kind == "text" else {}
            events = [
                self._item_event(block, f"{_NAMES[block.kind]}.done", text=text, **more),
                self._item_event(block, "response.content_part.done", part=part),
            ]
        return [*events, self._event("response.output_item.done", output_index=block.index, item=item)]

    # ------------------------------------------------------------------------------------ stream

    def _event(self, kind: str, **fields: Any) -> ResponsesEvent:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence - 1, **fields}

    def _item_event(self, block: ContentBlock, kind: str, **fields: Any) -> ResponsesEvent:
        """Return an event about the content of a block's item."""
        item_id = self._items[block.index]["id"]
        if block.kind != "call":
            fields["content_index"] = 0
        return self._event(kind, item_id=item_id, output_index=block.index, **fields)

    def _opening(self) -> list[ResponsesEvent]:
        return [self._snapshot("response.created"), self._snapshot("response.in_progress")]

    def _closing(self) -> list[ResponsesEvent]:
        return [self._snapshot(f"response.{self._response.status}")]

    def _snapshot(self, kind: str) -> ResponsesEvent:
        """Return an event with the whole response in its present state."""
        return self._event(kind, response=msgspec.structs.replace(self._response))

    def framing(self, request: Request) -> StreamFraming:
        return StreamFraming(self._failed)

    def _failed(self, error: ApiError) -> bytes:
        """Return the events that end a stream with an error."""
        self._response.status = "failed"
        self._response.error = {"code": "server_error", "message": error.message}
        events = [
            self._event("error", code=error.code, message=error.message, param=error.param),
            self._snapshot("response.failed"),
        ]
        return b"".join(map(named_event, events))


def _item(block: ContentBlock) -> Item:
    """Return the item of a block that has just started."""
    item = {"type": "message", "id": f"{_PREFIXES[block.kind]}_{uuid.uuid4().hex}", "status": "in_progress"}
    match block.kind:
        case "text":
            return {**item, "role": "assistant", "content": []}
        case "reasoning":
            return {**item, "type": "reasoning", "summary": [], "content": []}
        case "call":
            call = {"call_id": block.call_id, "name": block.name, "arguments": ""}
            return {**item, "type": "function_call", **call}


def _part(block: ContentBlock, text: str, logprobs: list[TokenLogprob]) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _empty_response(opened: OpenChat, request: ResponsesRequest, store: bool) -> ResponseObject:
    """Return a response without output, which repeats the fields of its request."""
    functions = [
        {"description": None, "strict": None, "parameters": None, **tool} for tool in request.tools or ()
    ]
    return ResponseObject(
        id=f"resp_{request.request_id or uuid.uuid4().hex}",
        created_at=int(time.time()),
        status="in_progress",
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        model=opened.model,
        output=[],
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        prompt_cache_key=request.prompt_cache_key,
        reasoning={"effort": opened.chat.reasoning_effort, "summary": None},
        safety_identifier=request.safety_identifier,
        store=store,
        temperature=opened.params.temperature,
        text={"format": {"type": "text"}, **(request.text or {})},
        tool_choice=request.tool_choice or "auto",
        tools=functions,
        top_logprobs=request.top_logprobs or 0,
        top_p=opened.params.top_p,
        user=request.user if request.user is not None else UNSET,
        metadata=request.metadata or {},
        warnings=opened.warnings or UNSET,
    )
