"""POST /v1/completions: one prompt or several, as text or token ids, with `n` choices for each."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from quire.serve.answer.generation import ChoiceDelta
from quire.serve.api.api_answer import ChunkedAnswer, OpenRequest
from quire.serve.api.context import (
    ServerContext,
    answer_id,
    client_of,
    label_of,
    read_request,
    server_of,
    stream_interval,
)
from quire.serve.api.logprobs import Entry, completion_logprobs, prompt_logprobs
from quire.serve.api.prompts import length_field, prompt_job, prompts_of
from quire.serve.api.protocol.completions import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
)
from quire.serve.api.protocol.fields import Usage, usage_of
from quire.serve.api.sampling_fields import MAX_CHOICES, check_fields, sampling_params
from quire.serve.async_engine import PromptJob
from quire.serve.http.errors import bad_request
from quire.serve.observe.receipt import receipt_maker
from quire.types import CompletionOutput, RequestOutput, SamplingParams

EchoedLogprobs = Sequence[Entry | None]
_MAX_TOKENS = 16  # OpenAI's default for this route


async def completions(request: Request) -> Response:
    """Continue one or more prompts, given as text or token ids, whole or as a stream."""
    server = server_of(request)
    completion, warnings = await read_request(request, CompletionRequest)
    model = server.check_model(completion.model)
    check_fields(completion)
    prompts = prompts_of(completion.prompt)
    params = _sampling_params(server, completion)
    choices = len(prompts) * params.n
    if choices > MAX_CHOICES:
        raise bad_request(f"prompts times n must be at most {MAX_CHOICES}, got {choices}", "n")

    def jobs() -> list[PromptJob]:
        return [
            prompt_job(
                server,
                completion,
                prompt,
                params,
                add_special_tokens=completion.add_special_tokens is not False,
                length_field=length_field(completion, "max_tokens"),
                echo=bool(completion.echo),
            )
            for prompt in prompts
        ]

    client, streamed = client_of(request), bool(completion.stream)
    generation = await server.engine.generate(
        client, choices, jobs, stream_interval(server, completion), completion.timeout, label_of(request)
    )
    warnings += generation.warnings
    receipt = receipt_maker(request, completion, generation)
    answer = CompletionAnswer(OpenRequest(server, model, params, generation, warnings, receipt), completion)
    return await answer.send(request, streamed)


def _sampling_params(server: ServerContext, completion: CompletionRequest) -> SamplingParams:
    engine = server.engine
    defaults = engine.processor.defaults
    if completion.best_of is not None and completion.best_of != (completion.n or 1):
        raise bad_request("best_of is not available in Quire, unless it equals n", "best_of")
    max_tokens = completion.max_tokens
    if max_tokens is None:
        max_tokens = defaults.get("max_tokens", _MAX_TOKENS)
    if max_tokens == 0 and completion.echo:
        max_tokens = 1  # only the prompt is scored: the token after it is dropped
    logprobs = completion.logprobs
    params = sampling_params(
        completion, defaults, max_tokens, logprobs, server.settings.max_logprobs, engine.info.vocab_size
    )
    if completion.echo and logprobs is not None and params.prompt_logprobs is None:
        params.prompt_logprobs = logprobs
    return params


class CompletionAnswer(ChunkedAnswer[CompletionChoice]):
    """The answer to one request. Choice `i` of prompt `p` has index p * n + i."""

    def __init__(self, opened: OpenRequest, completion: CompletionRequest) -> None:
        super().__init__(opened, answer_id("cmpl", completion.request_id), completion.stream_options)
        generation = opened.generation
        self._fingerprint = opened.server.fingerprint
        self._completion = completion
        self._tokenizer = opened.server.engine.tokenizer
        self._n = len(generation.states[0].answers)
        self._prompt_only = completion.max_tokens == 0
        self._as_ids = bool(completion.return_tokens_as_token_ids)
        self._echoed = [state.prompt or "" if completion.echo else "" for state in generation.states]
        self._held: list[ChoiceDelta] = []  # of prompts whose log-probabilities have not arrived
        self._echoes_logprobs = bool(completion.echo) and completion.logprobs is not None
        # Characters sent so far, by index of the choice: log-probabilities come with places in the text.
        self._sent_chars: dict[int, int] = {}
        self._text_only = not (
            self._prompt_only
            or self._continuous_usage
            or completion.return_token_ids
            or completion.logprobs is not None
        )

    def _usage(self, final: bool = True) -> Usage:
        generation = self._generation
        completion_tokens = 0 if self._prompt_only else generation.completion_tokens
        return usage_of(generation.prompt_tokens, completion_tokens, generation.cached_tokens)

    def response(self) -> CompletionResponse:
        choices = []
        for number, state in enumerate(self._generation.states):
            output = state.output()
            choices += [self._choice(number, output, answer) for answer in output.outputs]
        body = self._new_chunk(choices)
        body.usage, body.warnings, body.receipt = self._usage(), self._warnings or UNSET, self._receipt()
        return body

    def _choice(self, number: int, output: RequestOutput, answer: CompletionOutput) -> CompletionChoice:
        completion, echoed = self._completion, self._echoed[number]
        self._drop_answer(answer)
        choice = CompletionChoice(
            number * self._n + answer.index,
            echoed + answer.text,
            self._logprobs(output.prompt_token_ids, output.prompt_logprobs, answer, len(echoed)),
            answer.finish_reason,
            answer.stop_reason,
        )
        if completion.prompt_logprobs is not None and output.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
        if completion.return_token_ids:
            choice.token_ids, choice.prompt_token_ids = answer.token_ids, output.prompt_token_ids
        return choice

    def _drop_answer(self, answer: CompletionOutput) -> None:
        """Remove the token after a prompt that is only scored (`max_tokens` 0)."""
        if self._prompt_only:
            answer.text, answer.token_ids = "", []
            answer.logprobs = None if answer.logprobs is None else []
            answer.finish_reason = answer.finish_reason and "length"

    def _logprobs(
        self, prompt_ids: list[int], scored: EchoedLogprobs | None, answer: CompletionOutput, offset: int
    ) -> CompletionLogprobs | None:
        """Return the log-probabilities of an answer that starts at `offset`, after those of an echoed prompt."""
        if answer.logprobs is None:
            return None
        logprobs = completion_logprobs(
            answer.token_ids, answer.logprobs, offset, self._tokenizer, self._as_ids
        )
        if self._completion.echo and scored is not None:
            prompt = completion_logprobs(prompt_ids, scored, 0, self._tokenizer, self._as_ids)
            logprobs = CompletionLogprobs(
                prompt.text_offset + logprobs.text_offset,
                prompt.token_logprobs + logprobs.token_logprobs,
                prompt.tokens + logprobs.tokens,
                prompt.top_logprobs + logprobs.top_logprobs,
            )
        return logprobs

    def chunks(self, deltas: list[ChoiceDelta]) -> list[bytes]:
        events = []
        if self._echoes_logprobs:
            deltas = self._scored(deltas)
        for number, answer in deltas:
            index = number * self._n + answer.index
            if self._text_only and index in self._sent_chars and answer.finish_reason is None:
                events.append(self._text_event(index, answer.text))
            else:
                events.append(self._event(self._piece(number, index, answer)))
        return events

    def _scored(self, deltas: list[ChoiceDelta]) -> list[ChoiceDelta]:
        """Return the deltas, also those held so far, whose prompts have log-probabilities; hold the others.

        Only the first choice computes those of a prompt, and another choice may have its first token earlier.
        """
        states, waiting = self._generation.states, [*self._held, *deltas]
        ready = [delta for delta in waiting if states[delta.prompt_index].is_scored]
        self._held = [delta for delta in waiting if not states[delta.prompt_index].is_scored]
        return ready

    def entries(self, deltas: list[ChoiceDelta]) -> int:
        count = super().entries(deltas)
        if self._echoes_logprobs:
            states, each = self._generation.states, 1 + (self._params.prompt_logprobs or 0)
            waiting = {delta.prompt_index: delta.output.index for delta in [*self._held, *deltas]}
            for number, index in waiting.items():
                if number * self._n + index not in self._sent_chars and states[number].is_scored:
                    count += each * len(states[number].prompt_token_ids)
        return count

    def _piece(self, number: int, index: int, answer: CompletionOutput) -> CompletionChoice:
        state, is_first = self._generation.states[number], index not in self._sent_chars
        self._drop_answer(answer)
        echoed = self._echoed[number] if is_first else ""
        offset = self._sent_chars.get(index, 0) + len(echoed)
        self._sent_chars[index] = offset + len(answer.text)
        choice = CompletionChoice(index, echoed + answer.text, None, answer.finish_reason, answer.stop_reason)
        scored = state.prompt_logprobs if is_first else None
        choice.logprobs = self._logprobs(state.prompt_token_ids, scored, answer, offset)
        if self._completion.return_token_ids:
            choice.token_ids = answer.token_ids
            if is_first:
                choice.prompt_token_ids = state.prompt_token_ids
        return choice

    def _new_chunk(self, choices: Sequence[CompletionChoice]) -> CompletionResponse:
        return CompletionResponse(
            id=self._id,
            created=self._created,
            model=self._model,
            system_fingerprint=self._fingerprint,
            choices=list(choices),
        )

    def _text_choice(self, index: int, text: str) -> CompletionChoice:
        return CompletionChoice(index, text)
