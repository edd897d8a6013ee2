"""Convert engine outputs to request outputs: text, stop strings, log-probabilities, and the n choices of a prompt.

All text state of a request lives here, on the client's side. The engine ends requests by token ids and lengths; stop
strings are found here, and the client then tells the engine to abort.

engine outputs --> OutputAssembler.apply --> RequestState --> ChoiceOutput (one per choice)
                        | ids to abort            | output(): everything    take_delta(): since the last call
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quire.frontend.tokenizer.detokenizer import Detokenizer, StopStrings
from quire.frontend.tokenizer.tokenizer import NoTokenizer, Tokenizer
from quire.types import (
    CompletionOutput,
    EngineOutput,
    EngineOutputs,
    EngineRequest,
    FinishReason,
    Logprob,
    NewTokens,
    RequestFailure,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)


class _NoText:
    """The stand-in for a detokenizer when a request wants only token ids."""

    def push(self, ids: Sequence[int]) -> str:
        return ""

    def finish(self) -> str:
        return ""


def readable_logprobs(logprobs: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """Return log-probabilities by token id: the chosen token first, then the most likely ones in order.

    Each entry has the token's text if there is a tokenizer.
    """
    entries = {logprobs.ids[0]: Logprob(logprobs.logprobs[0], logprobs.rank)}
    for rank, (token, value) in enumerate(zip(logprobs.ids[1:], logprobs.logprobs[1:]), 1):
        entries.setdefault(token, Logprob(value, rank))
    if tokenizer is not None:
        for token, entry in entries.items():
            entry.decoded_token = tokenizer.token_text(token)
    return entries


class ChoiceOutput:
    """One of the n choices of a prompt while it is generated.

    Args:
        index: its position among the choices.
        request: its engine request.
        tokenizer: decodes its tokens; None if the engine has no tokenizer.

    Attributes:
        append: appends a token that comes without anything else, and returns a true value if it completed a stop string.
    """

    def __init__(self, index: int, request: EngineRequest, tokenizer: Tokenizer | None) -> None:
        params = request.params
        self.index = index
        self.engine_id = request.id
        self.token_ids: list[int] = []
        self.logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self.cumulative_logprob: float | None = None if params.logprobs is None else 0.0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.params = params
        self._tokenizer = tokenizer
        self._detokenizer: Detokenizer | _NoText = _NoText()
        if params.detokenize and tokenizer is not None:
            self._detokenizer = Detokenizer(
                tokenizer, request.prompt, params.skip_special_tokens, params.spaces_between_special_tokens
            )
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output)
        self._text: list[str] = []
        self._decoded = 0  # tokens that have their text, or are to have none
        # Without a stop string to look for, many tokens are decoded at once, when their text is read.
        self.append: Callable[[int], object] = self._append_decoded if params.stop else self.token_ids.append
        self._taken_text = self._taken_tokens = (
            0  # pieces of text, and tokens, that `take_delta` has returned
        )
        self._end_taken = False

    @property
    def text(self) -> str:
        """Return the text so far, without characters that could still become part of a stop string."""
        self._decode()
        return "".join(self._text)

    def apply(self, output: EngineOutput) -> bool:
        """Append the output of one step. Return True if a stop string ended the choice before the engine did."""
        # The stop token is not part of the text unless the request includes it.
        hides_last = output.finish_reason == "stop" and not self.params.include_stop_str_in_output
        last = len(output.token_ids) - 1
        for i, token in enumerate(output.token_ids):
            if output.logprobs is not None:
                self._append_logprobs(output.logprobs[i])
            if hides_last and i == last:
                self._append_hidden(token)
            elif self.append(token):
                return output.finish_reason is None
        if output.finish_reason is not None:
            self.finish(output.finish_reason, output.stop_reason)
        return False

    def _append_decoded(self, token: int) -> bool:
        """Append a token and its text. If this completes a stop string, end the choice and return True."""
        self.token_ids.append(token)
        if not self._decode():
            return False
        self.finish_reason, self.stop_reason = "stop", self._stops.stopped
        return True

    def _append_hidden(self, token: int) -> None:
        """Append a token that has no text."""
        self._decode()
        self.token_ids.append(token)
        self._decoded += 1

    def _append_logprobs(self, logprobs: TokenLogprobs) -> None:
        if self.logprobs is not None and self.cumulative_logprob is not None:
            self.logprobs.append(readable_logprobs(logprobs, self._tokenizer))
            self.cumulative_logprob += logprobs.logprobs[0]

    def _decode(self) -> bool:
        """Append the text of tokens that have none yet. Return True if it completed a stop string."""
        ids = self.token_ids[self._decoded :]
        if not ids:
            return False
        self._decoded += len(ids)
        return self._append_text(self._detokenizer.push(ids))

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End the choice and append the text that was held back."""
        self._decode()
        if self._append_text(self._detokenizer.finish()):
            reason, stop_reason = "stop", self._stops.stopped
        else:
            self._release(self._stops.finish())
        self.finish_reason, self.stop_reason = reason, stop_reason

    def _append_text(self, text: str) -> bool:
        """Append text. Return True if it completed a stop string, which cannot end in the first `min_tokens` tokens."""
        if not text:
            return False
        if len(self.token_ids) <= self.params.min_tokens:
            self._release(self._stops.skip(text))
            return False
        released, stopped = self._stops.push(text)
        self._release(released)
        return stopped is not None

    def _release(self, text: str) -> None:
        if text:
            self._text.append(text)

    def output(self) -> CompletionOutput:
        """Return everything generated so far."""
        return CompletionOutput(
            index=self.index,
            text=self.text,
            token_ids=list(self.token_ids),
            cumulative_logprob=self.cumulative_logprob,
            logprobs=None if self.logprobs is None else list(self.logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def has_news(self, tokens: int) -> bool:
        """Return whether the next delta has so many tokens, or is the first one, or the end."""
        ends = self.finish_reason is not None and not self._end_taken
        return ends or len(self.token_ids) - self._taken_tokens >= (tokens if self._taken_tokens else 1)

    def take_delta(self) -> CompletionOutput | None:
        """Return everything generated since the last call, or None if nothing was.

        Concatenating the deltas gives the final text and tokens. The finish reason alone makes one last delta.
        """
        self._decode()
        text, tokens = self._text[self._taken_text :], self.token_ids[self._taken_tokens :]
        ends = self.finish_reason is not None and not self._end_taken
        if not (text or tokens or ends):
            return None
        logprobs = None if self.logprobs is None else self.logprobs[self._taken_tokens :]
        self._taken_text, self._taken_tokens = len(self._text), len(self.token_ids)
        self._end_taken = self.finish_reason is not None
        return CompletionOutput(
            index=self.index,
            text="".join(text),
            token_ids=tokens,
            cumulative_logprob=self.cumulative_logprob,
            logprobs=logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


class RequestState:
    """One prompt and its n choices.

    Args:
        request_id: the client's id of the request.
        prompt: its text, if it was given as text.
        requests: the engine requests that `InputProcessor.process` built for it.
        tokenizer: the model's tokenizer.
        arrival_s: time of arrival on the monotonic clock; None means now.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        requests: Sequence[EngineRequest],
        tokenizer: Tokenizer | None,
        arrival_s: float | None = None,
    ) -> None:
        self._tokenizer = None if isinstance(tokenizer, NoTokenizer) else tokenizer
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = requests[0].prompt
        grammar = requests[0].grammar
        self.warnings = grammar.warnings if grammar is not None else ()  # about the structured output
        self.answers = [ChoiceOutput(i, request, self._tokenizer) for i, request in enumerate(requests)]
        self.error: RequestFailure | None = None
        self.pooled: bytes | None = None  # float32 [hidden], once an embedding request is finished
        self.num_cached_tokens = 0
        self.metrics = RequestMetrics(time.monotonic() if arrival_s is None else arrival_s)
        self._scores: list[TokenLogprobs] = []  # of the prompt's tokens after the first
        self._readable_scores: list[dict[int, Logprob] | None] = [None]  # the first token has no prediction
        self._by_id = {answer.engine_id: answer for answer in self.answers}
        self._num_open = len(self.answers)  # choices that are not finished

    @property
    def params(self) -> SamplingParams:
        return self.answers[0].params

    @property
    def finished(self) -> bool:
        return self._num_open == 0

    @property
    def is_scored(self) -> bool:
        """Return whether all log-probabilities of the prompt have arrived, or none were asked for."""
        wanted = self.params.prompt_logprobs is not None
        return not wanted or 1 + len(self._scores) >= len(self.prompt_token_ids)

    @property
    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """Return the log-probabilities of the prompt so far, by token; None if none were asked for.

        Their texts are looked up when first read: for long prompts that takes longer than a step.
        """
        if self.params.prompt_logprobs is None:
            return None
        readable = self._readable_scores
        readable += [readable_logprobs(e, self._tokenizer) for e in self._scores[len(readable) - 1 :]]
        return readable

    @property
    def open_ids(self) -> list[str]:
        """Return the ids of the engine requests that still run."""
        return [answer.engine_id for answer in self.answers if answer.finish_reason is None]

    def apply(self, output: EngineOutput, now_s: float | None = None) -> bool:
        """Apply one engine output. Return True if the engine must abort the request: a stop string was found."""
        answer = self._by_id[output.id]
        if answer.finish_reason is not None:
            return False
        now_s = time.monotonic() if now_s is None else now_s
        if output.token_ids and self.metrics.first_token_s is None:
            self.metrics.first_token_s = now_s
        # The other choices hit the blocks that the first one computed.
        if output.num_cached_tokens and answer.index == 0:
            self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        if output.prompt_logprobs and self.params.prompt_logprobs is not None and answer.index == 0:
            seen = max(0, 1 + len(self._scores) - output.prompt_logprobs_start)
            self._scores += output.prompt_logprobs[seen:]
        if output.pooled is not None:
            self.pooled = output.pooled
        if output.error is not None:
            self.error = output.error
        aborts = answer.apply(output)
        if answer.finish_reason is not None:
            self.end_choice(now_s)
        return aborts

    def end_choice(self, now_s: float) -> None:
        """Note that one more choice has ended."""
        self._num_open -= 1
        self._note_end(now_s)

    def abort(self) -> list[str]:
        """End every choice that still runs. Return the ids of the engine requests to abort."""
        ids = self.open_ids
        for engine_id in ids:
            self._by_id[engine_id].finish("abort")
        self._num_open = 0
        self._note_end(time.monotonic())
        return ids

    def _note_end(self, now_s: float) -> None:
        if self.finished and self.metrics.finished_s is None:
            self.metrics.finished_s = now_s

    def output(self) -> RequestOutput:
        """Return everything generated so far, for all choices."""
        outputs = [answer.output() for answer in self.answers]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=outputs,
            finished=self.finished,
            prompt_logprobs=self.prompt_logprobs,
            num_cached_tokens=self.num_cached_tokens,
            metrics=self.metrics,
        )


@dataclass(slots=True)
class OutputChanges:
    """The effects of a batch of engine outputs."""

    changed: list[RequestState] = field(default_factory=list)  # each once, in order of first appearance
    aborts: list[str] = field(default_factory=list)  # ids of engine requests that a stop string ended


class OutputAssembler:
    """The open requests of one client, by the ids of their engine requests."""

    def __init__(self) -> None:
        # By the id of the engine request: the request, and `append` of its choice.
        self._open: dict[str, tuple[RequestState, Callable[[int], object]]] = {}

    def __len__(self) -> int:
        return len({state for state, _ in self._open.values()})

    def add(self, state: RequestState) -> None:
        """Register an open request."""
        self._open.update((answer.engine_id, (state, answer.append)) for answer in state.answers)

    def apply(self, outputs: Sequence[EngineOutput], now_s: float | None = None) -> OutputChanges:
        """Apply outputs to their requests.

        Outputs of requests that have ended here are dropped, because an abort reaches the engine some steps late.

        Args:
            outputs: the engine outputs of one step.
            now_s: time of their arrival on the monotonic clock; None means now.
        """
        now_s = time.monotonic() if now_s is None else now_s
        aborts: list[str] = []
        changed: dict[RequestState, None] = {}
        for part in outputs.parts if isinstance(outputs, EngineOutputs) else outputs:
            if isinstance(part, NewTokens):
                aborts += self._append(part, changed, now_s)
            elif (place := self._open.get(part.id)) is not None:
                state, _ = place
                changed[state] = None
                if is_stopped := state.apply(part, now_s):
                    aborts.append(part.id)
                if is_stopped or part.finish_reason is not None:
                    del self._open[part.id]
        return OutputChanges(list(changed), aborts)

    def _append(self, new: NewTokens, changed: dict[RequestState, None], now_s: float) -> list[str]:
        """Append tokens, add their requests to `changed`, and return the ids of those that a stop string ended."""
        stopped = []
        for request_id, token in zip(new.ids, new.tokens):
            if (place := self._open.get(request_id)) is not None:
                state, append = place
                changed[state] = None
                if append(token):
                    stopped.append(request_id)
        for request_id in stopped:
            self._open.pop(request_id)[0].end_choice(now_s)
        return stopped

    def abort(self, state: RequestState) -> list[str]:
        """Forget a request. Return the ids of the engine requests to abort."""
        ids = state.abort()
        for engine_id in ids:
            self._open.pop(engine_id, None)
        return ids
