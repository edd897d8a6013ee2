"""The answer to a chat in the form of Ollama's API: one object, or one JSON line per piece.

A call is a piece of its own, sent when it is complete. The last line has no text, but reason, durations and counts.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from datetime import UTC, datetime
from typing import Any

from msgspec import UNSET
from starlette.requests import Request

from quire.serve.answer.content_blocks import BlockChange, BlockDelta, BlockEnd, ContentBlock
from quire.serve.api.api_answer import BlockAnswer, OpenChat
from quire.serve.api.logprobs import chat_logprobs
from quire.serve.api.protocol.chat import TokenLogprob
from quire.serve.api.protocol.ollama import (
    OllamaAnswerFields,
    OllamaChatResponse,
    OllamaFunctionCall,
    OllamaGenerateResponse,
    OllamaMessage,
    OllamaToolCall,
)
from quire.serve.http.stream import StreamFraming, json_line
from quire.types import CompletionOutput

NDJSON = "application/x-ndjson"
LINES = StreamFraming(lambda error: json_line(error.ollama_body()), media_type=NDJSON)


def now() -> str:
    """Return the present time as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


class OllamaAnswer(BlockAnswer):
    """The answer to one request of Ollama's API."""

    def __init__(self, opened: OpenChat, model: str, arrived_s: float) -> None:
        """Create the answer to a request that named the `model` so and arrived then, on the monotonic clock."""
        super().__init__(opened)
        self._name, self._arrived_s = model, arrived_s
        self._end: CompletionOutput | None = None  # the piece with the finish reason
        self._logprobs: list[TokenLogprob] = []  # of tokens that no line has had

    def framing(self, request: Request) -> StreamFraming:
        return LINES

    def _encode(self, body: Any) -> bytes:
        return json_line(body)

    @abstractmethod
    def _piece(self, text: str = "", thinking: str = "", calls: list[ContentBlock] | None = None) -> Any:
        """Return an answer, or a line of one, with this content."""

    def _fields(self) -> dict[str, Any]:
        """Return the fields that every line has."""
        fields: dict[str, Any] = {"model": self._name, "created_at": now()}
        if self._logprobs:
            fields["logprobs"], self._logprobs = self._logprobs, []
        return fields

    def _opening(self) -> list[OllamaAnswerFields]:
        return []

    def _take(self, output: CompletionOutput) -> list[BlockChange]:
        """Add a piece of the answer, or all of it; return the changes to the blocks."""
        chat = self._opened.chat
        if chat.logprobs and output.logprobs is not None:
            tokenizer, top = self._opened.server.engine.tokenizer, chat.top_logprobs or 0
            logprobs = chat_logprobs(output, top, tokenizer, as_ids=False, with_end=False)
            self._logprobs += logprobs.content or []
        if output.finish_reason is not None:
            self._end = output
        return self._blocks.add(output)

    def _add(self, output: CompletionOutput) -> list[OllamaAnswerFields]:
        lines = []
        for change in self._take(output):
            match change:
                case BlockDelta(block, text) if block.kind == "text":
                    lines.append(self._line(self._piece(text)))
                case BlockDelta(block, text) if block.kind == "reasoning":
                    lines.append(self._line(self._piece(thinking=text)))
                case BlockEnd(block) if block.kind == "call":
                    lines.append(self._line(self._piece(calls=[block])))
        return lines

    def _line(self, line: OllamaAnswerFields) -> OllamaAnswerFields:
        """Return `line`, with the warnings if it is the first one."""
        if self._warnings:
            line.warnings, self._warnings = self._warnings, []
        return line

    def response(self) -> OllamaAnswerFields:
        self._take(self._generation.states[0].output().outputs[0])
        blocks = self._blocks.all
        return self._finish(
            self._piece(
                "".join(block.text for block in blocks if block.kind == "text"),
                "".join(block.text for block in blocks if block.kind == "reasoning"),
                [block for block in blocks if block.kind == "call"],
            )
        )

    def _closing(self) -> list[OllamaAnswerFields]:
        return [self._finish(self._piece())]

    def _finish(self, answer: OllamaAnswerFields) -> OllamaAnswerFields:
        """Add the reason of the end, durations and counts."""
        assert self._end is not None
        generation = self._generation
        answer.done = True
        answer.done_reason = "length" if self._end.finish_reason == "length" else "stop"
        answer.total_duration = nanoseconds(time.monotonic() - self._arrived_s)
        answer.load_duration = 0  # the model is loaded already
        answer.prompt_eval_count, answer.eval_count = generation.prompt_tokens, generation.completion_tokens
        timing = generation.tracks[0].timing
        first_s = timing.first_token_s if timing is not None else None
        admitted_s = timing.admitted_s if timing is not None else None
        if timing is None or first_s is None or admitted_s is None:
            answer.prompt_eval_duration = answer.eval_duration = 0
        else:
            answer.prompt_eval_duration = nanoseconds(first_s - admitted_s)
            answer.eval_duration = nanoseconds(timing.until_s - first_s)
        answer.receipt = self._receipt()
        return self._line(answer)


class OllamaChatAnswer(OllamaAnswer):
    """The answer to a request to /api/chat."""

    def _piece(
        self, text: str = "", thinking: str = "", calls: list[ContentBlock] | None = None
    ) -> OllamaChatResponse:
        message = OllamaMessage(content=text, thinking=thinking or UNSET)
        if calls:
            numbers = {
                block.index: n for n, block in enumerate(b for b in self._blocks.all if b.kind == "call")
            }
            message.tool_calls = [_call(block, numbers[block.index]) for block in calls]
        return OllamaChatResponse(message=message, **self._fields())


class OllamaGenerateAnswer(OllamaAnswer):
    """The answer to a request to /api/generate. With `context` its end has the tokens of prompt and answer."""

    def __init__(self, opened: OpenChat, model: str, arrived_s: float, context: bool) -> None:
        super().__init__(opened, model, arrived_s)
        self._context = context

    def _piece(
        self, text: str = "", thinking: str = "", calls: list[ContentBlock] | None = None
    ) -> OllamaGenerateResponse:
        return OllamaGenerateResponse(response=text, thinking=thinking or UNSET, **self._fields())

    def _finish(self, answer: OllamaAnswerFields) -> OllamaAnswerFields:
        if self._context:
            assert isinstance(answer, OllamaGenerateResponse)
            state = self._generation.states[0]
            answer.context = [*state.prompt_token_ids, *state.answers[0].token_ids]
        return super()._finish(answer)


def _call(block: ContentBlock, index: int) -> OllamaToolCall:
    return OllamaToolCall(block.call_id, OllamaFunctionCall(block.name, block.arguments, index))
