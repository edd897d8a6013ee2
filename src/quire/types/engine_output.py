"""The outcome of a step for one request. Apart from the other types, because importing msgspec takes a while."""

from __future__ import annotations

import msgspec

from quire.types.engine_io import ExportedBlocks, RequestFailure, Timing, TokenLogprobs
from quire.types.sampling_params import FinishReason


class EngineOutput(msgspec.Struct, omit_defaults=True, gc=False):
    """The outcome of one step for one request. Exactly one output of each request has finish_reason set.

    `prompt_logprobs` holds the entries of the prompt positions from `prompt_logprobs_start` on, each once. A step makes
    one for each row, so this is a `Struct`, which takes a third of the time of a dataclass to make. It refers to no
    object that refers to it, so the garbage collector need not track it.
    """

    id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token id; None for end of sequence
    num_cached_tokens: int = 0  # with the first token, and with any output that is more than a token
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs_start: int = 1
    pooled: bytes | None = None  # float32 [hidden]
    error: RequestFailure | None = None  # set if, and only if, finish_reason is "error"
    exported: list[ExportedBlocks] | None = None  # of a request that exports
    timing: Timing | None = None  # with the first token, the first after a preemption, and the last output
