"""POST /v1/chat/completions; and `begin`, with which every API of conversations starts its answer."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from quire.frontend.templates.chat import render_chat
from quire.serve.answer.choice import ChatChoiceBuilder
from quire.serve.answer.form import AnswerForm
from quire.serve.answer.generation import Delta, Generation
from quire.serve.answer.tools.request import ToolUse, tool_use
from quire.serve.api.context import (
    ServerContext,
    answer_id,
    client_of,
    length_field,
    read_request,
    server_of,
    thread_of,
)
from quire.serve.api.logprobs import prompt_logprobs
from quire.serve.api.protocol.chat import ChatChunk, ChatRequest, ChatResponse, ChunkChoice
from quire.serve.api.protocol.chat import Delta as ContentDelta
from quire.serve.api.protocol.sampling import Usage, usage_of
from quire.serve.api.sampling_fields import check_fields, sampling_params
from quire.serve.async_engine import PromptJob
from quire.serve.http.auth import ApiClient
from quire.serve.http.errors import bad_request
from quire.serve.http.stream import MARK, ChunkTemplate, complete_response, event, stream_response
from quire.serve.observe.receipt import ReceiptMaker, receipt_maker
from quire.types import SamplingParams


@dataclass(slots=True)
class Turn:
    """The answer to a conversation, on its way. The chat is what it was asked as, whichever API it came by."""

    server: ServerContext
    chat: ChatRequest
    model: str  # name for the answer
    params: SamplingParams
    generation: Generation
    form: AnswerForm
    warnings: list[str]
    receipt: ReceiptMaker


async def chat_completions(request: Request) -> Response:
    chat, warnings = await read_request(request, ChatRequest)
    turn = await begin(request, chat, warnings, exact=True)
    answer = ChatAnswer(turn)
    if chat.stream:
        slow_s = turn.server.settings.slow_reader_timeout
        return await stream_response(request, turn.generation, answer.chunks, answer.last, slow_s)
    return await complete_response(request, turn.generation, answer.response, thread_of(request))


async def begin(request: Request, chat: ChatRequest, warnings: list[str], exact: bool = False) -> Turn:
    """Check a chat, render it, and send it to the engine. `exact`: as many tokens as were asked for must fit behind
    the prompt; else there is a warning when they do not. Raises ApiError or RequestError."""
    server = server_of(request)
    model = server.check_model(chat.model)
    check_fields(chat)
    _check_chat(chat, server.settings.max_logprobs)
    use = tool_use(chat)
    params = _params(server, chat)
    field = length_field(chat, "max_completion_tokens", "max_tokens")
    client = client_of(request)
    template = server.templates.choose(chat.chat_template, bool(use.tools))
    if use.tools and "tools" not in template:
        warnings.append("tools are not told to the model: its chat template has no place for them")
    forms: list[AnswerForm] = []
    rendered = await _rendered_apart(server, client, chat, use, template)

    def jobs() -> list[PromptJob]:
        prompt = chat_prompt(server, chat, use.tools, template) if rendered is None else rendered
        forms.append(server.forms.of(chat, use, template, prompt, params.structured_outputs))
        return [
            PromptJob(
                prompt,
                forms[0].params(params),
                chat.priority or 0,
                chat.cache_salt or "",
                bool(chat.add_special_tokens),
                keep_last(server, chat.truncate_prompt_tokens, params.max_tokens if field else None),
                bool(chat.return_prompt_text),
                length_field=field if exact else None,
            )
        ]

    generation = await server.engine.generate(client, params.n, jobs, bool(chat.stream), chat.timeout)
    receipt = receipt_maker(request, chat, generation)
    context = server.engine.info.max_model_len
    room = context - generation.prompt_tokens
    if field and params.max_tokens is not None and params.max_tokens > room:
        warnings.append(f"the answer can have {room} tokens: more do not fit into max_model_len ({context})")
    return Turn(server, chat, model, params, generation, forms[0], warnings, receipt)


async def _rendered_apart(
    server: ServerContext, client: ApiClient, chat: ChatRequest, use: ToolUse, template: str
) -> str | None:
    """Return the prompt of a request that brings a template: it does not keep the threads that others need."""
    if not chat.chat_template:
        return None
    return await server.templates.in_thread(
        client, chat.chat_template, lambda: chat_prompt(server, chat, use.tools, template)
    )


def keep_last(server: ServerContext, given: int | None, longest: int | None = None) -> int | None:
    """truncate_prompt_tokens: -1 keeps what leaves room for an answer of `longest` tokens if such a one fits at all,
    else for one token."""
    context = server.engine.info.max_model_len
    return context - (longest if longest is not None and longest < context else 1) if given == -1 else given


def _check_chat(chat: ChatRequest, max_logprobs: int) -> None:
    if chat.top_logprobs and not chat.logprobs:
        raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
    if chat.top_logprobs is not None and chat.top_logprobs < 0:
        raise bad_request(f"top_logprobs must be at least 0, got {chat.top_logprobs}", "top_logprobs")
    if 0 <= max_logprobs < (chat.top_logprobs or 0):
        raise bad_request(
            f"top_logprobs must be at most {max_logprobs} (max_logprobs), got {chat.top_logprobs}",
            "top_logprobs",
        )


def _params(server: ServerContext, chat: ChatRequest) -> SamplingParams:
    engine = server.engine
    defaults = engine.processor.defaults
    max_tokens = chat.max_completion_tokens if chat.max_completion_tokens is not None else chat.max_tokens
    if max_tokens is None:
        max_tokens = defaults.get("max_tokens")  # without one: the rest of the context
    logprobs = (chat.top_logprobs or 0) if chat.logprobs else None
    return sampling_params(
        chat, defaults, max_tokens, logprobs, server.settings.max_logprobs, engine.info.vocab_size
    )


def chat_prompt(server: ServerContext, chat: ChatRequest, tools: list[dict[str, Any]], template: str) -> str:
    """The text of the prompt. Raises RequestError for messages that the template does not take."""
    continues = bool(chat.continue_final_message)
    variables = dict(chat.chat_template_kwargs or {})
    if chat.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", chat.reasoning_effort)
    generation_prompt = chat.add_generation_prompt
    return render_chat(
        server.templates.renderer(chat.chat_template),
        server.engine.tokenizer,
        chat.messages,
        tools or None,
        not continues if generation_prompt is None else generation_prompt,
        continues,
        variables,
        chat.documents,
        template,
    )


def _echoed(chat: ChatRequest, role: str) -> str:
    """vLLM's echo: the last message comes again, if it has the role of the answer."""
    last = chat.messages[-1]
    content = last.get("content")
    return content if chat.echo and last.get("role") == role and isinstance(content, str) else ""


class ChatAnswer:
    """The answer to one chat, whole or in chunks. Owns the builders of its choices."""

    def __init__(self, turn: Turn) -> None:
        server, chat, generation = turn.server, turn.chat, turn.generation
        self._chat, self._model, self._generation = chat, turn.model, generation
        self._warnings, self._receipt = turn.warnings, turn.receipt
        self._id = answer_id("chatcmpl", chat.request_id)
        self._created = int(time.time())
        self._first = True
        options = chat.stream_options
        self._usage = bool(options and options.include_usage)
        self._continuous = bool(options and options.include_usage and options.continuous_usage_stats)
        self._thought_tokens = turn.form.thought_tokens
        role = server.settings.response_role
        self._builders = [
            ChatChoiceBuilder(
                index,
                turn.form.make_parser(),
                server.engine.tokenizer,
                role=role,
                prefix=_echoed(chat, role),
                top_logprobs=(chat.top_logprobs or 0) if chat.logprobs else None,
                as_ids=bool(chat.return_tokens_as_token_ids),
                token_ids=bool(chat.return_token_ids),
                reasoning=chat.include_reasoning is not False,
            )
            for index in range(len(generation.states[0].answers))
        ]
        self._unfinished = len(self._builders)
        self._moulds: dict[int, ChunkTemplate] = {}  # by index of the choice

    def response(self) -> ChatResponse:
        generation, chat = self._generation, self._chat
        output = generation.states[0].output()
        found = ChatResponse(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[b.message(o) for b, o in zip(self._builders, output.outputs)],
            usage=self._whole_usage(),
            warnings=self._warnings or UNSET,
        )
        if output.prompt_logprobs is not None:
            found.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
        if chat.return_token_ids:
            found.prompt_token_ids = output.prompt_token_ids
        if chat.return_prompt_text:
            found.prompt_text = output.prompt or ""
        found.receipt = self._receipt()
        return found

    def _whole_usage(self) -> Usage:
        generation, count = self._generation, self._thought_tokens
        answers = [answer.token_ids for state in generation.states for answer in state.answers]
        return usage_of(
            generation.prompt_tokens,
            generation.completion_tokens,
            generation.cached_tokens,
            None if count is None else sum(map(count, answers)),
        )

    def chunks(self, deltas: list[Delta]) -> list[bytes]:
        found: list[bytes] = []
        for _, output in deltas:
            found += map(self._event, self._builders[output.index].chunks(output))
        return found

    def _event(self, piece: ChunkChoice) -> bytes:
        text = piece.only_text
        if text is not None and not self._continuous:
            if (mould := self._moulds.get(piece.index)) is None:
                mould = self._moulds[piece.index] = self._mould(piece.index)
            return mould.render(text)
        chunk = self._chunk()
        chunk.choices = [piece]
        if self._continuous:
            generation = self._generation
            chunk.usage = usage_of(
                generation.prompt_tokens, generation.completion_tokens, generation.cached_tokens
            )
        if piece.finish_reason is not None and not self._usage:
            self._unfinished -= 1
            if not self._unfinished:
                chunk.receipt = self._receipt()
        return event(chunk)

    def _mould(self, index: int) -> ChunkTemplate:
        """Of the pieces of a choice that are content alone."""
        chunk = self._chunk()
        chunk.choices = [ChunkChoice(index, ContentDelta(content=MARK))]
        return ChunkTemplate(chunk)

    def _chunk(self) -> ChatChunk:
        """A chunk without choices. The first one of a stream carries what comes once."""
        chunk = ChatChunk(id=self._id, created=self._created, model=self._model, choices=[])
        if self._usage:
            chunk.usage = None
        if self._first:
            self._first = False
            chunk.warnings = self._warnings or UNSET
            if self._chat.return_token_ids:
                chunk.prompt_token_ids = self._generation.states[0].prompt_token_ids
        return chunk

    def last(self) -> list[bytes]:
        if not self._usage:
            return []
        chunk = self._chunk()
        chunk.usage = self._whole_usage()
        chunk.receipt = self._receipt()
        return [event(chunk)]
