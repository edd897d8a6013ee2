"""The results that users of the Python API get. Names and fields as in vLLM."""

from __future__ import annotations

from dataclasses import dataclass

from quire.types.sampling_params import FinishReason


@dataclass(slots=True)
class Logprob:
    """Log-probability of a token, its rank (1 is the most likely) and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One of the n completions of a prompt. `finish_reason` is None while it is incomplete."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token id or stop string; None for end of sequence


@dataclass(slots=True)
class RequestMetrics:
    """Times of a request in seconds on the client's monotonic clock."""

    arrival_s: float
    first_token_s: float | None = None
    finished_s: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """The result of one prompt: its completions, and the prompt's own log-probabilities if requested."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
