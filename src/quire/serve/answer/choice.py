"""One choice of a chat: its text, parsed into a message or into the pieces of a stream.

Streams and whole answers go through the same parser, so the concatenated pieces equal the message.
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
    merge_events,
    parse_output,
)
from quire.serve.answer.tools.json_reader import is_object
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


def _delta_of(event: ParserEvent, legacy: bool) -> Delta:
    match event:
        case Content(text):
            return Delta(content=text)
        case Reasoning(text):
            return Delta(reasoning=text, reasoning_content=text)
        case ToolCall(_, _, name) if legacy:
            return Delta(function_call=FunctionCall(name, ""))
        case Arguments(_, text) if legacy:
            return Delta(function_call=FunctionCall(arguments=text))
        case ToolCall(index, id, name):
            return Delta(tool_calls=[ToolCallPart(index, id, "function", FunctionCall(name, ""))])
        case Arguments(index, text):
            return Delta(tool_calls=[ToolCallPart(index, function=FunctionCall(arguments=text))])


class ChatChoiceBuilder:
    """The builder of one choice, either as a message or as pieces. Owns the choice's parser."""

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
        legacy: bool = False,
        has_tools: bool = False,
        with_end: bool = False,
    ) -> None:
        """Create a builder.

        Args:
            index: the index of the choice.
            parser: a new parser.
            tokenizer: decodes the tokens of log-probabilities.
            role: the role of the message.
            prefix: text to put before the content (`echo`).
            top_logprobs: the number of most likely tokens to list for each token; None for no log-probabilities.
            as_ids: write tokens as `token_id:N`.
            token_ids: return the token ids.
            reasoning: include the reasoning.
            legacy: write the call as `function_call`, as before there were tools.
            has_tools: the message may turn out to be a call, so a stream does not begin with empty content.
            with_end: the token that ends the answer is part of the content, and so are its log-probabilities.
        """
        self.index = index
        self._parser, self._tokenizer = parser, tokenizer
        self._role, self._prefix = role, prefix
        self._top, self._as_ids, self._token_ids, self._reasoning = top_logprobs, as_ids, token_ids, reasoning
        self._legacy, self._has_tools, self._with_end = legacy, has_tools, with_end
        self._started = False
        self._has_calls = False
        self._arguments: list[str] = []  # of the last call
        self._held_logprobs: ChoiceLogprobs | None = None  # of tokens whose text has not been emitted
        self._held_ids: list[int] = []

    def _events(self, output: CompletionOutput) -> list[ParserEvent]:
        events = parse_output(self._parser, output)
        if not self._started and self._prefix:
            events = [Content(self._prefix), *events]
        if not self._reasoning:
            events = [event for event in events if not isinstance(event, Reasoning)]
        for event in events:
            if isinstance(event, ToolCall):
                self._has_calls, self._arguments = True, []
            elif isinstance(event, Arguments):
                self._arguments.append(event.text)
        return merge_events(events)

    def _finish_reason(self, output: CompletionOutput) -> str | None:
        if output.finish_reason == "stop" and self._has_calls:
            cut_off = isinstance(output.stop_reason, str) and not is_object("".join(self._arguments))
            return "stop" if cut_off else "function_call" if self._legacy else "tool_calls"
        return output.finish_reason

    def _logprobs(self, output: CompletionOutput) -> ChoiceLogprobs | None:
        if self._top is None or output.logprobs is None:
            return None
        return chat_logprobs(output, self._top, self._tokenizer, self._as_ids, self._with_end)

    def message(self, output: CompletionOutput) -> ChatChoice:
        """Return the choice with its whole output."""
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
                tool_calls=UNSET if self._legacy else calls or UNSET,
                function_call=calls[0].function if self._legacy and calls else UNSET,
                reasoning=reasoning or None,
                reasoning_content=reasoning or None,
            ),
            self._logprobs(output),
            self._finish_reason(output) or "stop",
            output.stop_reason,
            output.token_ids if self._token_ids else None,
        )

    def chunks(self, output: CompletionOutput) -> list[ChunkChoice]:
        """Return new output as pieces of a stream: the role first, the finish reason last."""
        opening = Delta(role=self._role, content=None if self._has_tools else "")
        first = [] if self._started else [ChunkChoice(self.index, opening)]
        pieces = [ChunkChoice(self.index, _delta_of(event, self._legacy)) for event in self._events(output)]
        self._started = True
        reason = self._finish_reason(output)
        if reason is not None:
            pieces.append(ChunkChoice(self.index, Delta(), None, reason, output.stop_reason))
        self._attach(output, pieces)
        return first + pieces

    def _attach(self, output: CompletionOutput, pieces: list[ChunkChoice]) -> None:
        """Attach log-probabilities and ids to the first piece, or hold them until there is one."""
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
