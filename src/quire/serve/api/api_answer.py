"""The answer to a request, whole or streamed: what the answers of all APIs have in common.

ApiAnswer
    ChunkedAnswer    OpenAI's chats and completions: a stream of chunks of one shape
    BlockAnswer      OpenAI's responses, Anthropic's messages, Ollama's answers: a stream about content blocks
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from quire.serve.answer.content_blocks import ContentBlocks
from quire.serve.answer.form import AnswerForm
from quire.serve.answer.generation import ChoiceDelta, Generation
from quire.serve.api.context import ServerContext, thread_of
from quire.serve.api.protocol.chat import ChatChunk, ChatRequest, ChunkChoice
from quire.serve.api.protocol.completions import CompletionChoice, CompletionResponse
from quire.serve.api.protocol.fields import StreamOptions, Usage
from quire.serve.http.stream import (
    MARK,
    UNNAMED,
    ChunkTemplate,
    StreamEvents,
    StreamFraming,
    complete_response,
    event,
    named_event,
    stream_response,
)
from quire.serve.observe.receipt import ReceiptMaker
from quire.types import CompletionOutput, SamplingParams

Choice = TypeVar("Choice", ChunkChoice, CompletionChoice)


@dataclass(slots=True)
class OpenRequest:
    """A request that the engine is generating for."""

    server: ServerContext
    model: str  # its name in the answer
    params: SamplingParams
    generation: Generation
    warnings: list[str]
    receipt: ReceiptMaker


@dataclass(slots=True)
class OpenChat(OpenRequest):
    """A conversation that the engine continues. `chat` is the same request whichever API it came by."""

    chat: ChatRequest
    form: AnswerForm

    def reasoning_tokens(self) -> int | None:
        """Count the reasoning tokens of all choices. None if reasoning is not parsed."""
        count = self.form.count_reasoning
        if count is None:
            return None
        return sum(count(answer.token_ids) for state in self.generation.states for answer in state.answers)


class ApiAnswer(ABC):
    """The answer to one request in the form of its API: a body, or the events of a stream."""

    def __init__(self, opened: OpenRequest) -> None:
        self._model, self._params, self._generation = opened.model, opened.params, opened.generation
        self._warnings, self._receipt = opened.warnings, opened.receipt
        self._slow_reader_timeout_s = opened.server.settings.slow_reader_timeout

    async def send(self, request: Request, streamed: bool) -> Response:
        """Return the HTTP response, once its first event is ready or, unless `streamed`, the whole answer.

        Raises:
            ApiError: if the generation ends with an error before that.
        """
        generation = self._generation
        if streamed:
            timeout_s, framing = self._slow_reader_timeout_s, self.framing(request)
            events = StreamEvents(self.entries, self.chunks, self._last, framing)
            return await stream_response(request, generation, events, thread_of(request), timeout_s)
        response = await complete_response(request, generation, self.response, thread_of(request))
        self.on_complete()
        return response

    def framing(self, request: Request) -> StreamFraming:
        """Return how a stream of this API writes an error, and its end."""
        return UNNAMED

    def on_complete(self) -> None:  # noqa: B027 (optional)
        """Handle the complete answer before the client learns that it is complete."""

    def _last(self) -> list[bytes]:
        self.on_complete()
        return self.last()

    @abstractmethod
    def response(self) -> Any:
        """Return the body of the whole answer. It may be called in a thread."""

    def entries(self, deltas: list[ChoiceDelta]) -> int:
        """Return the number of tokens and log-probabilities in the events for `deltas`; 0 without the latter."""
        each = self._params.logprobs
        return 0 if each is None else (1 + each) * sum(len(delta.output.token_ids) for delta in deltas)

    @abstractmethod
    def chunks(self, deltas: list[ChoiceDelta]) -> list[bytes]:
        """Return the events for new pieces of the answer."""

    @abstractmethod
    def last(self) -> list[bytes]:
        """Return the events that follow the last piece."""


class ChunkedAnswer(ApiAnswer, Generic[Choice]):
    """An answer whose stream consists of chunks, each with a piece of one choice. Owns the chunks' templates."""

    def __init__(self, opened: OpenRequest, answer_id: str, options: StreamOptions | None) -> None:
        super().__init__(opened)
        self._id, self._created = answer_id, int(time.time())
        self._include_usage = bool(options and options.include_usage)
        self._continuous_usage = bool(options and options.include_usage and options.continuous_usage_stats)
        self._unfinished = sum(len(state.answers) for state in opened.generation.states)  # choices
        self._templates: dict[int, ChunkTemplate] = {}  # by index of the choice
        self._is_first = True  # no chunk has been made

    @abstractmethod
    def _usage(self, final: bool = True) -> Usage:
        """Return the usage so far. Counting reasoning tokens takes time, so only the `final` usage includes them."""

    def _usage_beside(self, choice: Choice) -> Usage:
        """Return the usage in the chunk with a piece of a choice."""
        return self._usage(final=False)

    @abstractmethod
    def _new_chunk(self, choices: Sequence[Choice]) -> ChatChunk | CompletionResponse:
        """Return a chunk with these choices."""

    @abstractmethod
    def _text_choice(self, index: int, text: str) -> Choice:
        """Return a piece of a choice that is text and nothing else."""

    def _event(self, choice: Choice) -> bytes:
        """Return the event of a piece of a choice. The last one of a stream without usage carries the receipt."""
        chunk = self._chunk([choice])
        if self._continuous_usage:
            chunk.usage = self._usage_beside(choice)
        if choice.finish_reason is not None and not self._include_usage:
            self._unfinished -= 1
            if not self._unfinished:
                chunk.receipt = self._receipt()
        return event(chunk)

    def _text_event(self, index: int, text: str) -> bytes:
        """Return the event of a piece of text from a template. It cannot be the first event of a stream."""
        template = self._templates.get(index)
        if template is None:
            chunk = self._chunk([self._text_choice(index, MARK)])
            template = self._templates[index] = ChunkTemplate(chunk)
        return template.render(text)

    def _chunk(self, choices: Sequence[Choice]) -> ChatChunk | CompletionResponse:
        chunk = self._new_chunk(choices)
        if self._include_usage:
            chunk.usage = None
        if self._is_first:
            self._is_first = False
            chunk.warnings = self._warnings or UNSET
        return chunk

    def last(self) -> list[bytes]:
        if not self._include_usage:
            return []
        chunk = self._chunk([])
        chunk.usage, chunk.receipt = self._usage(), self._receipt()
        return [event(chunk)]


class BlockAnswer(ApiAnswer):
    """An answer with one choice, as content blocks. Its stream consists of events about them, by default named ones."""

    def __init__(self, opened: OpenChat) -> None:
        super().__init__(opened)
        self._opened = opened
        self._blocks = ContentBlocks(opened.form.make_parser(), opened.chat.include_reasoning is not False)
        self._is_first = True  # no event has been made

    @abstractmethod
    def _opening(self) -> list[Any]:
        """Return the events that begin a stream."""

    @abstractmethod
    def _add(self, output: CompletionOutput) -> list[Any]:
        """Add a piece of the answer, or all of it; return the events for it."""

    @abstractmethod
    def _closing(self) -> list[Any]:
        """Return the events that end a stream."""

    def _encode(self, body: Any) -> bytes:
        """Encode an event."""
        return named_event(body)

    def _add_all(self) -> CompletionOutput:
        """Add the whole answer and return it."""
        output = self._generation.states[0].output().outputs[0]
        self._add(output)
        return output

    def chunks(self, deltas: list[ChoiceDelta]) -> list[bytes]:
        events = self._opening() if self._is_first else []
        self._is_first = False
        for _, output in deltas:
            events += self._add(output)
        return list(map(self._encode, events))

    def last(self) -> list[bytes]:
        return list(map(self._encode, self._closing()))
