"""The answer to a chat in the form of OpenAI's Responses API: items, or the events of a stream (events.py)."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping

import msgspec
from msgspec import UNSET
from starlette.requests import Request

from quire.serve.answer.content_blocks import BlockChange, BlockDelta, BlockEnd, BlockStart, ContentBlock
from quire.serve.api.api_answer import BlockAnswer, OpenChat
from quire.serve.api.logprobs import chat_logprobs
from quire.serve.api.protocol.chat import TokenLogprob
from quire.serve.api.protocol.responses import ResponseObject, ResponsesRequest, ResponsesUsage
from quire.serve.api.responses.events import Item, ResponseEvents, ResponsesEvent
from quire.serve.api.responses.input import conversation_id
from quire.serve.api.responses.tools import namespaced_names
from quire.serve.http.errors import ApiError
from quire.serve.http.stream import StreamFraming, named_event
from quire.types import CompletionOutput

_PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}
_NO_FUNCTION = {"description": None, "strict": None, "parameters": None}


class ResponseAnswer(BlockAnswer):
    """The answer to one request of the Responses API. Owns its items and numbers the events of its stream."""

    def __init__(
        self,
        opened: OpenChat,
        request: ResponsesRequest,
        keep: Callable[[ResponseObject], None],
        stored: bool,
    ) -> None:
        """Create the answer to `request`.

        Args:
            opened: the conversation that the engine continues.
            request: the request, whose fields the response repeats.
            keep: called with the complete response.
            stored: whether `keep` stores the response.
        """
        super().__init__(opened)
        self._keep = keep
        self._events = ResponseEvents()
        self._namespaced = namespaced_names(request.tools)
        self._held: list[TokenLogprob] = []  # of tokens whose text has not been emitted
        self._logprobs: list[TokenLogprob] = []  # of the open text block
        self._response = _empty_response(opened, request, stored)

    def response(self) -> ResponseObject:
        self._add_all()
        return self._response

    def on_complete(self) -> None:
        # The client may continue from this response as soon as it sees the end, so it is stored before that.
        self._keep(self._response)

    def _add(self, output: CompletionOutput) -> list[ResponsesEvent]:
        chat = self._opened.chat
        if chat.logprobs and output.logprobs is not None:
            tokenizer = self._opened.server.engine.tokenizer
            as_ids = bool(chat.return_tokens_as_token_ids)
            top = chat.top_logprobs or 0
            with_end = bool(chat.include_stop_str_in_output)
            logprobs = chat_logprobs(output, top, tokenizer, as_ids, with_end)
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
        response.output = self._events.items
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
            return self._events.start(_item(block, self._namespaced))
        new, self._held = (self._held, []) if block.kind == "text" else ([], self._held)
        self._logprobs += new
        if isinstance(change, BlockDelta):
            return [self._events.grow(change.text, new)]
        assert isinstance(change, BlockEnd)
        logprobs, self._logprobs, self._held = self._logprobs, [], []
        return self._events.end(block.text, logprobs, status)

    # ------------------------------------------------------------------------------------ stream

    def _opening(self) -> list[ResponsesEvent]:
        return [self._snapshot("response.created"), self._snapshot("response.in_progress")]

    def _closing(self) -> list[ResponsesEvent]:
        return [self._snapshot(f"response.{self._response.status}")]

    def _snapshot(self, kind: str) -> ResponsesEvent:
        """Return an event with the whole response in its present state."""
        return self._events.event(kind, response=msgspec.structs.replace(self._response))

    def framing(self, request: Request) -> StreamFraming:
        return StreamFraming(self._failed)

    def _failed(self, error: ApiError) -> bytes:
        """Return the events that end a stream with an error."""
        self._response.status = "failed"
        self._response.error = {"code": "server_error", "message": error.message}
        events = [
            self._events.event("error", code=error.code, message=error.message, param=error.param),
            self._snapshot("response.failed"),
        ]
        return b"".join(map(named_event, events))


def _item(block: ContentBlock, namespaced: Mapping[str, tuple[str, str]]) -> Item:
    """Return the item of a block that has just started."""
    item = {"type": "message", "id": f"{_PREFIXES[block.kind]}_{uuid.uuid4().hex}", "status": "in_progress"}
    match block.kind:
        case "text":
            return {**item, "role": "assistant", "content": []}
        case "reasoning":
            return {**item, "type": "reasoning", "summary": [], "content": []}
        case "call":
            call = {"call_id": block.call_id, "name": block.name, "arguments": ""}
            if block.name in namespaced:
                call["namespace"], call["name"] = namespaced[block.name]
            return {**item, "type": "function_call", **call}


def _empty_response(opened: OpenChat, request: ResponsesRequest, stored: bool) -> ResponseObject:
    """Return a response without output, which repeats the fields of its request."""
    conversation = conversation_id(request)
    tools = [
        {**_NO_FUNCTION, **tool} if tool.get("type") == "function" else tool for tool in request.tools or ()
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
        conversation=None if conversation is None else {"id": conversation},
        prompt_cache_key=request.prompt_cache_key,
        reasoning={"effort": opened.chat.reasoning_effort, "summary": None},
        safety_identifier=request.safety_identifier,
        store=stored,
        temperature=opened.params.temperature,
        text={"format": {"type": "text"}, **(request.text or {})},
        tool_choice=request.tool_choice or "auto",
        tools=tools,
        top_logprobs=request.top_logprobs or 0,
        top_p=opened.params.top_p,
        user=request.user if request.user is not None else UNSET,
        metadata=request.metadata or {},
        warnings=opened.warnings or UNSET,
    )
