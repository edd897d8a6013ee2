"""Engine outputs to answers: text, stop strings, log-probabilities, and the merging of n answers into one.

All text state of a request is here, on the client's side of the engine. The engine ends a request by token
ids and lengths; a stop string is found here, and then the engine is told to abort.

engine outputs --> OutputAssembler.apply --> RequestState --> Answer (one per choice)
                        | ids to abort            | output(): all so far    take_delta(): what is new
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from quire.frontend.tokenizer.detokenizer import Detokenizer, StopStrings
from quire.frontend.tokenizer.tokenizer import NoTokenizer, Tokenizer
from quire.types import (
    CompletionOutput,
    EngineOutput,
    EngineRequest,
    FinishReason,
    Logprob,
    RequestFailure,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)


class _NoText:
    """In place of a detokenizer when a request wants token ids alone."""

    def push(self, ids: Sequence[int]) -> str:
        return ""

    def finish(self) -> str:
        return ""


def readable_logprobs(found: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """By token id: the chosen token first, then the most likely ones in order."""
    chosen = {found.ids[0]: Logprob(found.logprobs[0], found.rank)}
    for rank, (token, value) in enumerate(zip(found.ids[1:], found.logprobs[1:]), 1):
        chosen.setdefault(token, Logprob(value, rank))
    if tokenizer is not None:
        for token, entry in chosen.items():
            entry.decoded_token = tokenizer.token_text(token)
    return chosen


class ChoiceOutput:
    """One of the n answers to a prompt, as it grows."""

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
        self._taken_text = self._taken_tokens = 0
        self._told_end = False

    @property
    def text(self) -> str:
        return "".join(self._text)

    def apply(self, output: EngineOutput) -> bool:
        """Take in what one step brought. True if a stop string ended the answer before the engine did."""
        # The token that ended the answer is no part of its text, unless asked for.
        silent = output.finish_reason == "stop" and not self.params.include_stop_str_in_output
        last = len(output.token_ids) - 1
        for i, token in enumerate(output.token_ids):
            self.token_ids.append(token)
            if (
                output.logprobs is not None
                and self.logprobs is not None
                and self.cumulative_logprob is not None
            ):
                self.logprobs.append(readable_logprobs(output.logprobs[i], self._tokenizer))
                self.cumulative_logprob += output.logprobs[i].logprobs[0]
            if not (silent and i == last) and self._say(self._detokenizer.push([token])):
                self.finish_reason, self.stop_reason = "stop", self._stops.stopped
                return output.finish_reason is None
        if output.finish_reason is not None:
            self.finish(output.finish_reason, output.stop_reason)
        return False

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """No more tokens come: let out what was held back."""
        if self._say(self._detokenizer.finish()):
            reason, stop_reason = "stop", self._stops.stopped
        else:
            self._show(self._stops.finish())
        self.finish_reason, self.stop_reason = reason, stop_reason

    def _say(self, text: str) -> bool:
        """Add text; True if it completed a stop string. None may end within the first `min_tokens` tokens."""
        if not text:
            return False
        if len(self.token_ids) <= self.params.min_tokens:
            self._show(self._stops.skip(text))
            return False
        safe, stopped = self._stops.push(text)
        self._show(safe)
        return stopped is not None

    def _show(self, text: str) -> None:
        if text:
            self._text.append(text)

    def output(self) -> CompletionOutput:
        """All so far."""
        return CompletionOutput(
            index=self.index,
            text=self.text,
            token_ids=list(self.token_ids),
            cumulative_logprob=self.cumulative_logprob,
            logprobs=None if self.logprobs is None else list(self.logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def take_delta(self) -> CompletionOutput | None:
        """What is new since the last call; None if nothing is. The end is told once."""
        text, tokens = self._text[self._taken_text :], self.token_ids[self._taken_tokens :]
        ends = self.finish_reason is not None and not self._told_end
        if not (text or tokens or ends):
            return None
        logprobs = None if self.logprobs is None else self.logprobs[self._taken_tokens :]
        self._taken_text, self._taken_tokens = len(self._text), len(self.token_ids)
        self._told_end = self.finish_reason is not None
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
    """One prompt and its n answers."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        requests: Sequence[EngineRequest],
        tokenizer: Tokenizer | None,
        arrival_s: float | None = None,
    ) -> None:
        """`requests` are what InputProcessor made of the prompt, in its order."""
        self._tokenizer = None if isinstance(tokenizer, NoTokenizer) else tokenizer
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = requests[0].prompt
        self.answers = [ChoiceOutput(i, request, self._tokenizer) for i, request in enumerate(requests)]
        self.error: RequestFailure | None = None
        self.pooled: bytes | None = None  # float32 [hidden], of a request for pooling that is finished
        self.num_cached_tokens = 0
        self.metrics = RequestMetrics(time.monotonic() if arrival_s is None else arrival_s)
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if requests[0].params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]  # nothing predicts the first token
        self._by_id = {answer.engine_id: answer for answer in self.answers}
        self._left = len(self.answers)  # answers that are not finished

    @property
    def params(self) -> SamplingParams:
        return self.answers[0].params

    @property
    def finished(self) -> bool:
        return self._left == 0

    @property
    def open_ids(self) -> list[str]:
        """Engine requests that still run."""
        return [answer.engine_id for answer in self.answers if answer.finish_reason is None]

    def has_ended(self, engine_id: str) -> bool:
        """Whether the answer of this engine request is finished."""
        return self._by_id[engine_id].finish_reason is not None

    def apply(self, output: EngineOutput, now_s: float | None = None) -> bool:
        """Take in one engine output. True if its engine request is to be aborted: a stop string was found."""
        answer = self._by_id[output.id]
        if answer.finish_reason is not None:
            return False
        now_s = time.monotonic() if now_s is None else now_s
        if output.token_ids and self.metrics.first_token_s is None:
            self.metrics.first_token_s = now_s
        if answer.index == 0:  # the others find what the first one computed
            self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        if output.prompt_logprobs and self.prompt_logprobs is not None and answer.index == 0:
            seen = max(0, len(self.prompt_logprobs) - output.prompt_logprobs_start)
            fresh = output.prompt_logprobs[seen:]
            self.prompt_logprobs += [readable_logprobs(entry, self._tokenizer) for entry in fresh]
        if output.pooled is not None:
            self.pooled = output.pooled
        if output.error is not None:
            self.error = output.error
        aborts = answer.apply(output)
        if answer.finish_reason is not None:
            self._left -= 1
            self._note_end(now_s)
        return aborts

    def abort(self) -> list[str]:
        """End every answer that still runs; the engine requests to abort."""
        ids = self.open_ids
        for engine_id in ids:
            self._by_id[engine_id].finish("abort")
        self._left = 0
        self._note_end(time.monotonic())
        return ids

    def _note_end(self, now_s: float) -> None:
        if self.finished and self.metrics.finished_s is None:
            self.metrics.finished_s = now_s

    def output(self) -> RequestOutput:
        """All so far, of all answers."""
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
    """What a batch of engine outputs changed."""

    changed: list[RequestState] = field(default_factory=list)  # each once, in order of arrival in the batch
    aborts: list[str] = field(default_factory=list)  # engine requests that a stop string ended


class OutputAssembler:
    """All open requests of one client, found by the ids of their engine requests."""

    def __init__(self) -> None:
        self._states: dict[str, RequestState] = {}

    def __len__(self) -> int:
        return len({id(state) for state in self._states.values()})

    def add(self, state: RequestState) -> None:
        self._states.update((answer.engine_id, state) for answer in state.answers)

    def apply(self, outputs: Iterable[EngineOutput], now_s: float | None = None) -> OutputChanges:
        """Hand outputs to their requests. Those of requests that have ended here are dropped: an abort takes
        effect in the engine some steps late."""
        now_s = time.monotonic() if now_s is None else now_s
        applied = OutputChanges()
        changed: dict[int, RequestState] = {}
        for output in outputs:
            state = self._states.get(output.id)
            if state is None:
                continue
            if state.apply(output, now_s):
                applied.aborts.append(output.id)
            changed[id(state)] = state
            if state.has_ended(output.id):
                del self._states[output.id]
        applied.changed = list(changed.values())
        return applied

    def abort(self, state: RequestState) -> list[str]:
        """Forget a request; the engine requests to abort."""
        ids = state.abort()
        for engine_id in ids:
            self._states.pop(engine_id, None)
        return ids
