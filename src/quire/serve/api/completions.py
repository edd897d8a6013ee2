"""POST /v1/completions: one prompt or several, as text or token ids, n answers to each."""

from __future__ import annotations

import time
from typing import Any

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from quire.frontend.processor import Prompt
from quire.serve.answer.generation import Delta, Generation
from quire.serve.api.chat import keep_last
from quire.serve.api.context import (
    ServerContext,
    answer_id,
    client_of,
    length_field,
    read_request,
    server_of,
    thread_of,
)
from quire.serve.api.logprobs import completion_logprobs, prompt_logprobs
from quire.serve.api.protocol.completions import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
)
from quire.serve.api.protocol.sampling import Usage, usage_of
from quire.serve.api.sampling_fields import MAX_CHOICES, check_fields, sampling_params
from quire.serve.async_engine import PromptJob
from quire.serve.http.errors import bad_request
from quire.serve.http.stream import MARK, ChunkTemplate, complete_response, event, stream_response
from quire.serve.observe.receipt import ReceiptMaker, receipt_maker
from quire.types import CompletionOutput, RequestOutput, SamplingParams

_MAX_TOKENS = 16  # OpenAI's default for this route


async def completions(request: Request) -> Response:
    server = server_of(request)
    wanted, warnings = await read_request(request, CompletionRequest)
    model = server.check_model(wanted.model)
    check_fields(wanted)
    prompts = prompts_of(wanted.prompt)
    params = _params(server, wanted)
    choices = len(prompts) * params.n
    if choices > MAX_CHOICES:
        raise bad_request(f"prompts times n must be at most {MAX_CHOICES}, got {choices}", "n")
    client = client_of(request)
    field = length_field(wanted, "max_tokens")

    def jobs() -> list[PromptJob]:
        return [
            PromptJob(
                prompt,
                params,
                wanted.priority or 0,
                wanted.cache_salt or "",
                wanted.add_special_tokens is not False,
                keep_last(server, wanted.truncate_prompt_tokens, params.max_tokens if field else None),
                bool(wanted.echo),
                length_field=field,
            )
            for prompt in prompts
        ]

    generation = await server.engine.generate(client, choices, jobs, bool(wanted.stream), wanted.timeout)
    receipt = receipt_maker(request, wanted, generation)
    answer = CompletionAnswer(server, wanted, model, generation, warnings, receipt)
    if wanted.stream:
        slow_s = server.settings.slow_reader_timeout
        return await stream_response(request, generation, answer.chunks, answer.last, slow_s)
    return await complete_response(request, generation, answer.response, thread_of(request))


def prompts_of(given: str | list[Any], name: str = "prompt") -> list[Prompt]:
    """The four forms of a prompt, in the field `name`, as a list of prompts."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise bad_request(f"{name} is empty: it needs at least one token", name)
    if len({type(part) for part in given}) > 1:
        raise bad_request(f"{name} must hold either strings, or token ids, or lists of token ids", name)
    if isinstance(given[0], int):
        return [given]
    return given


def _params(server: ServerContext, wanted: CompletionRequest) -> SamplingParams:
    engine = server.engine
    defaults = engine.processor.defaults
    if wanted.best_of is not None and wanted.best_of != (wanted.n or 1):
        raise bad_request("best_of is not available in Quire, unless it equals n", "best_of")
    max_tokens = wanted.max_tokens
    if max_tokens is None:
        max_tokens = defaults.get("max_tokens", _MAX_TOKENS)
    if max_tokens == 0 and wanted.echo:
        max_tokens = 1  # the prompt is to be scored: what comes after it is dropped
    if wanted.echo and wanted.stream and wanted.logprobs is not None:
        raise bad_request("echo with logprobs cannot be streamed: set stream to false", "echo")
    logprobs = wanted.logprobs
    params = sampling_params(
        wanted, defaults, max_tokens, logprobs, server.settings.max_logprobs, engine.info.vocab_size
    )
    if wanted.echo and logprobs is not None and params.prompt_logprobs is None:
        params.prompt_logprobs = logprobs
    return params


class CompletionAnswer:
    """The answer to one request, whole or in chunks. Choice `i` of prompt `p` has index p * n + i."""

    def __init__(
        self,
        server: ServerContext,
        wanted: CompletionRequest,
        model: str,
        generation: Generation,
        warnings: list[str],
        receipt: ReceiptMaker,
    ) -> None:
        self._tokenizer = server.engine.tokenizer
        self._wanted, self._model, self._generation = wanted, model, generation
        self._warnings, self._receipt = warnings, receipt
        self._id = answer_id("cmpl", wanted.request_id)
        self._created = int(time.time())
        self._n = len(generation.states[0].answers)
        self._nothing = wanted.max_tokens == 0  # only the prompt is wanted
        self._as_ids = bool(wanted.return_tokens_as_token_ids)
        self._echoed = [state.prompt or "" if wanted.echo else "" for state in generation.states]
        self._said: dict[
            int, int
        ] = {}  # characters sent so far, by index of the choice; for log-probabilities
        self._unfinished = len(generation.states) * self._n
        self._moulds: dict[int, ChunkTemplate] = {}  # by index of the choice
        self._first = True
        options = wanted.stream_options
        self._include_usage = bool(options and options.include_usage)
        self._continuous = bool(options and options.include_usage and options.continuous_usage_stats)
        more = (self._nothing, self._continuous, wanted.return_token_ids, wanted.logprobs is not None)
        self._text_only = not any(more)

    def _usage(self) -> Usage:
        generation = self._generation
        completion_tokens = 0 if self._nothing else generation.completion_tokens
        return usage_of(generation.prompt_tokens, completion_tokens, generation.cached_tokens)

    def response(self) -> CompletionResponse:
        choices = []
        for number, state in enumerate(self._generation.states):
            output = state.output()
            choices += [self._choice(number, output, answer) for answer in output.outputs]
        return CompletionResponse(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=self._usage(),
            warnings=self._warnings or UNSET,
            receipt=self._receipt(),
        )

    def _choice(self, number: int, output: RequestOutput, answer: CompletionOutput) -> CompletionChoice:
        wanted, echoed = self._wanted, self._echoed[number]
        if self._nothing:
            answer.text, answer.token_ids, answer.finish_reason = "", [], "length"
            answer.logprobs = None if answer.logprobs is None else []
        choice = CompletionChoice(
            number * self._n + answer.index,
            echoed + answer.text,
            self._logprobs(output, answer, len(echoed)),
            answer.finish_reason,
            answer.stop_reason,
        )
        if wanted.prompt_logprobs is not None and output.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
        if wanted.return_token_ids:
            choice.token_ids, choice.prompt_token_ids = answer.token_ids, output.prompt_token_ids
        return choice

    def _logprobs(
        self, output: RequestOutput, answer: CompletionOutput, offset: int
    ) -> CompletionLogprobs | None:
        if answer.logprobs is None:
            return None
        found = completion_logprobs(answer.token_ids, answer.logprobs, offset, self._tokenizer, self._as_ids)
        if self._wanted.echo and output.prompt_logprobs is not None:
            prompt = completion_logprobs(
                output.prompt_token_ids, output.prompt_logprobs, 0, self._tokenizer, self._as_ids
            )
            found = CompletionLogprobs(
                prompt.text_offset + found.text_offset,
                prompt.token_logprobs + found.token_logprobs,
                prompt.tokens + found.tokens,
                prompt.top_logprobs + found.top_logprobs,
            )
        return found

    def chunks(self, deltas: list[Delta]) -> list[bytes]:
        found = []
        for number, answer in deltas:
            index = number * self._n + answer.index
            mould = self._moulds.get(index)
            if mould is not None and answer.finish_reason is None:
                found.append(mould.render(answer.text))
                continue
            chunk = self._chunk()
            chunk.choices = [self._piece(number, index, answer)]
            if self._continuous:
                chunk.usage = self._usage()
            if answer.finish_reason is not None and not self._include_usage:
                self._unfinished -= 1
                if not self._unfinished:
                    chunk.receipt = self._receipt()
            found.append(event(chunk))
            if self._text_only:
                self._moulds[index] = self._mould(index)
        return found

    def _mould(self, index: int) -> ChunkTemplate:
        """Of the further pieces of a choice, which say nothing but their text."""
        chunk = self._chunk()
        chunk.choices = [CompletionChoice(index, MARK)]
        return ChunkTemplate(chunk)

    def _piece(self, number: int, index: int, answer: CompletionOutput) -> CompletionChoice:
        begins = index not in self._said
        text = "" if self._nothing else answer.text
        if begins:
            text = self._echoed[number] + text
        said = self._said.get(index, 0)
        self._said[index] = said + len(text)
        choice = CompletionChoice(index, text, None, answer.finish_reason, answer.stop_reason)
        if answer.logprobs is not None:
            choice.logprobs = completion_logprobs(
                answer.token_ids, answer.logprobs, said, self._tokenizer, self._as_ids
            )
        if self._wanted.return_token_ids:
            choice.token_ids = answer.token_ids
            if begins:
                choice.prompt_token_ids = self._generation.states[number].prompt_token_ids
        return choice

    def _chunk(self) -> CompletionResponse:
        chunk = CompletionResponse(id=self._id, created=self._created, model=self._model, choices=[])
        if self._include_usage:
            chunk.usage = None
        if self._first:
            self._first = False
            chunk.warnings = self._warnings or UNSET
        return chunk

    def last(self) -> list[bytes]:
        if not self._include_usage:
            return []
        chunk = self._chunk()
        chunk.usage, chunk.receipt = self._usage(), self._receipt()
        return [event(chunk)]
