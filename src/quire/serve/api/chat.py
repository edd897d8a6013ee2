"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from quire.serve.answer.choice import ChatChoiceBuilder
from quire.serve.answer.generation import ChoiceDelta
from quire.serve.api.api_answer import ChunkedAnswer, OpenChat
from quire.serve.api.context import answer_id, read_request
from quire.serve.api.conversation import open_chat
from quire.serve.api.legacy_functions import convert_functions
from quire.serve.api.logprobs import prompt_logprobs
from quire.serve.api.protocol.chat import ChatChunk, ChatRequest, ChatResponse, ChunkChoice
from quire.serve.api.protocol.chat import Delta as ContentDelta
from quire.serve.api.protocol.fields import Usage, usage_of


async def chat_completions(request: Request) -> Response:
    """Answer a conversation, whole or as a stream of chunks, with tool calls and structured output."""
    chat, warnings = await read_request(request, ChatRequest)
    legacy = convert_functions(chat)
    answer = ChatAnswer(await open_chat(request, chat, warnings, must_fit=True), legacy)
    return await answer.send(request, bool(chat.stream))


class ChatAnswer(ChunkedAnswer[ChunkChoice]):
    """The answer to one chat. Owns the builders of its choices."""

    def __init__(self, opened: OpenChat, legacy: bool) -> None:
        """`legacy`: write calls as `function_call`, for a request with `functions`."""
        chat, server = opened.chat, opened.server
        super().__init__(opened, answer_id("chatcmpl", chat.request_id), chat.stream_options)
        self._chat, self._opened = chat, opened
        role = server.settings.response_role
        self._builders = [
            ChatChoiceBuilder(
                index,
                opened.form.make_parser(),
                server.engine.tokenizer,
                role=role,
                prefix=_echoed(chat, role),
                top_logprobs=(chat.top_logprobs or 0) if chat.logprobs else None,
                as_ids=bool(chat.return_tokens_as_token_ids),
                token_ids=bool(chat.return_token_ids),
                reasoning=chat.include_reasoning is not False,
                legacy=legacy,
                has_tools=bool(chat.tools),
                with_end=bool(chat.include_stop_str_in_output),
            )
            for index in range(len(opened.generation.states[0].answers))
        ]

    def response(self) -> ChatResponse:
        chat = self._chat
        output = self._generation.states[0].output()
        body = ChatResponse(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[b.message(o) for b, o in zip(self._builders, output.outputs)],
            usage=self._usage(),
            system_fingerprint=self._opened.server.fingerprint,
            warnings=self._warnings or UNSET,
        )
        if output.prompt_logprobs is not None:
            body.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
        if chat.return_token_ids:
            body.prompt_token_ids = output.prompt_token_ids
        if chat.return_prompt_text:
            body.prompt_text = output.prompt or ""
        body.receipt = self._receipt()
        return body

    def _usage(self, final: bool = True) -> Usage:
        generation = self._generation
        return usage_of(
            generation.prompt_tokens,
            generation.completion_tokens,
            generation.cached_tokens,
            self._opened.reasoning_tokens() if final else None,
        )

    def _usage_beside(self, choice: ChunkChoice) -> Usage:
        if choice.delta.role is UNSET:
            return super()._usage_beside(choice)
        return usage_of(self._generation.prompt_tokens, 0, self._generation.cached_tokens)

    def chunks(self, deltas: list[ChoiceDelta]) -> list[bytes]:
        return [
            self._choice_event(choice)
            for _, output in deltas
            for choice in self._builders[output.index].chunks(output)
        ]

    def _choice_event(self, choice: ChunkChoice) -> bytes:
        text = choice.only_text
        if text is None or self._continuous_usage:
            return self._event(choice)
        return self._text_event(choice.index, text)

    def _new_chunk(self, choices: Sequence[ChunkChoice]) -> ChatChunk:
        chunk = ChatChunk(
            id=self._id,
            created=self._created,
            model=self._model,
            system_fingerprint=self._opened.server.fingerprint,
            choices=list(choices),
        )
        if self._is_first and self._chat.return_token_ids:
            chunk.prompt_token_ids = self._generation.states[0].prompt_token_ids
        return chunk

    def _text_choice(self, index: int, text: str) -> ChunkChoice:
        return ChunkChoice(index, ContentDelta(content=text))


def _echoed(chat: ChatRequest, role: str) -> str:
    """Return the last message's text if the request wants it back (vLLM's `echo`) and it has the answer's role."""
    last = chat.messages[-1]
    content = last.get("content")
    return content if chat.echo and last.get("role") == role and isinstance(content, str) else ""
