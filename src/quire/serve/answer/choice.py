"""One choice of a chat as it grows: text through the parser, into a message or into pieces of a stream.

Streams and whole answers both go through `ChatChoiceBuilder.add`: the pieces put together are the message.
"""

from __future__ import annotations

from msgspec import UNSET

from quire.frontend.tokenizer.tokenizer import Tokenizer
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
from quire.serve.api.logprobs import chat_logprobs
from quire.serve.api.protocol.chat import (
    AssistantMessage,
    ChatChoice,
    ChoiceLogprobs,
    ChunkChoice,
    Delta,
    FunctionCall,
    ToolCallPart,
)
from quire.types import CompletionOutput


def delta_of(event: ParserEvent) -> Delta:
    match event:
        case Content(text):
            return Delta(content=text)
        case Reasoning(text):
            return Delta(reasoning=text, reasoning_content=text)
        case ToolCall(index, id, name):
            return Delta(tool_calls=[ToolCallPart(index, id, "function", FunctionCall(name, ""))])
        case Arguments(index, text):
            return Delta(tool_calls=[ToolCallPart(index, function=FunctionCall(arguments=text))])


class ChatChoiceBuilder:
    """Owns the parser of one choice and what came out of it."""

    def __init__(
        self,
        index: int,
        parser: TextParser,
        tokenizer: Tokenizer,
        *,
        role: str,
        prefix: str,
        top_logprobs: int | None,
        as_ids: bool,
        token_ids: bool,
        reasoning: bool,
    ) -> None:
        """`prefix` is put before the content (echo). `top_logprobs` None: no log-probabilities;
        `token_ids`: return them; `reasoning` False: leave it out of the answer."""
        self.index = index
        self._parser, self._tokenizer = parser, tokenizer
        self._role, self._prefix = role, prefix
        self._top, self._as_ids, self._token_ids, self._reasoning = top_logprobs, as_ids, token_ids, reasoning
        self._begun = False
        self._called = False
        self._held_logprobs: ChoiceLogprobs | None = None  # of tokens whose text is not out yet
        self._held_ids: list[int] = []

    def _events(self, output: CompletionOutput) -> list[ParserEvent]:
        events = read(self._parser, output)
        if not self._begun and self._prefix:
            events = [Content(self._prefix), *events]
        if not self._reasoning:
            events = [event for event in events if not isinstance(event, Reasoning)]
        self._called = self._called or any(isinstance(event, ToolCall) for event in events)
        return merged(events)

    def _finish_reason(self, output: CompletionOutput) -> str | None:
        if output.finish_reason == "stop" and self._called:
            return "tool_calls"
        return output.finish_reason

    def _logprobs(self, output: CompletionOutput) -> ChoiceLogprobs | None:
        if self._top is None or output.logprobs is None:
            return None
        return chat_logprobs(output.token_ids, output.logprobs, self._top, self._tokenizer, self._as_ids)

    def message(self, output: CompletionOutput) -> ChatChoice:
        """The whole choice from its whole output."""
        texts: dict[type[ParserEvent], list[str]] = {Content: [], Reasoning: []}
        calls: list[ToolCallPart] = []
        for event in self._events(output):
            match event:
                case Content(text) | Reasoning(text):
                    texts[type(event)].append(text)
                case ToolCall(_, id, name):
                    calls.append(ToolCallPart(id=id, type="function", function=FunctionCall(name, "")))
                case Arguments(index, text):
                    function = calls[index].function
                    assert isinstance(function, FunctionCall) and isinstance(function.arguments, str)
                    function.arguments += text
        content, reasoning = "".join(texts[Content]), "".join(texts[Reasoning])
        return ChatChoice(
            self.index,
            AssistantMessage(
                self._role,
                content if content or not calls else None,
                tool_calls=calls or UNSET,
                reasoning=reasoning or UNSET,
                reasoning_content=reasoning or UNSET,
            ),
            self._logprobs(output),
            self._finish_reason(output) or "stop",
            output.stop_reason,
            output.token_ids if self._token_ids else UNSET,
        )

    def chunks(self, output: CompletionOutput) -> list[ChunkChoice]:
        """What is new, as pieces of a stream: the role first, why it ended last."""
        found = [] if self._begun else [ChunkChoice(self.index, Delta(role=self._role, content=""))]
        pieces = [ChunkChoice(self.index, delta_of(event)) for event in self._events(output)]
        self._begun = True
        reason = self._finish_reason(output)
        if reason is not None:
            pieces.append(ChunkChoice(self.index, Delta(), None, reason, output.stop_reason))
        self._attach(output, pieces)
        return found + pieces

    def _attach(self, output: CompletionOutput, pieces: list[ChunkChoice]) -> None:
        """Log-probabilities and ids ride on the first piece; they wait if there is none yet."""
        new = self._logprobs(output)
        if new is not None and new.content is not None and self._held_logprobs is not None:
            new.content = [*(self._held_logprobs.content or []), *new.content]
        self._held_logprobs = new
        self._held_ids += output.token_ids if self._token_ids else []
        if pieces:
            if self._held_logprobs is not None and self._held_logprobs.content:
                pieces[0].logprobs = self._held_logprobs
            if self._token_ids:
                pieces[0].token_ids = self._held_ids
            self._held_logprobs, self._held_ids = None, []
