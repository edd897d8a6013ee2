"""What client and engine say to each other: requests, outputs and figures, with ids only and no text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from quire.types.errors import QuireError, RequestError, StepFailed
from quire.types.sampling import FinishReason, GrammarSpec, Pooling, SamplingParams


@dataclass(slots=True)
class EngineRequest:
    """What a client sends to the engine: token ids in, no text. `params.n` is 1 here; the client fans out.

    `stop_ids` end the request when sampled (end-of-sequence ids unless ignore_eos, and
    stop_token_ids). `bad_words_ids` are the tokenised bad words. `seed` is always set. With a `grammar`,
    which replaces `params.structured_outputs`, it is the grammar that honours ignore_eos and min_tokens.
    With `pooling` the last output has the prompt's hidden states, pooled; max_tokens is 1 then.
    """

    id: str
    prompt: list[int]
    params: SamplingParams
    stop_ids: list[int] = field(default_factory=list)
    eos_ids: list[int] = field(default_factory=list)
    bad_words_ids: list[list[int]] = field(default_factory=list)
    seed: int = 0
    priority: int = 0
    cache_salt: str = ""
    client: str = ""  # whose request it is: waiting requests are taken in turn between clients
    weight: float = 1.0  # the client's share of the tokens, against those of others
    grammar: GrammarSpec | None = None
    pooling: Pooling | None = None


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities of one position: ids[0] is the chosen token, the rest the top ones in order."""

    ids: list[int]
    logprobs: list[float]
    rank: int  # of the chosen token, 1 = most likely


@dataclass(slots=True)
class RequestFailure:
    """The reason why a request ended with an error, in a form that crosses process boundaries.

    `internal` is True if the server is at fault (HTTP 500) and False if the request is (HTTP 400). `param` and `code`
    are those of the `RequestError` that refused the request.
    """

    message: str
    internal: bool = False
    param: str | None = None
    code: str | None = None

    def as_error(self) -> QuireError:
        """Return the exception to raise in the client's process."""
        if self.internal:
            return StepFailed(self.message)
        return RequestError(self.message, param=self.param, code=self.code)


@dataclass(slots=True)
class EngineOutput:
    """What one step brought one request. Exactly one output per admitted request has finish_reason set.

    `prompt_logprobs` holds entries for prompt positions `prompt_logprobs_start ...`, each once.
    """

    id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token id; None for end of sequence
    num_cached_tokens: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs_start: int = 1
    pooled: bytes | None = None  # float32 [hidden]
    error: RequestFailure | None = None  # set if, and only if, finish_reason is "error"
    timing: Timing | None = None  # with the first token, the first one after a preemption, and the end


TimingPhase = Literal["held", "waiting", "computing", "decoding"]


@dataclass(slots=True)
class Timing:
    """Where a request's time in the engine went: seconds, on a monotonic clock that all processes share.

    The sum of `waited_s` and the other durations is `until_s - arrival_s`; after `until_s` the request is in
    `phase`. `lost_s` is what it waited while other requests' prompts were computed (core/clocks.py).
    """

    arrival_s: float
    until_s: float
    phase: TimingPhase = "waiting"
    waited_s: dict[str, float] = field(default_factory=dict)  # before it was first admitted, by cause
    prefill_s: float = 0.0
    decode_s: float = 0.0
    lost_s: float = 0.0
    preempted_s: float = 0.0  # waiting again, after a preemption
    recompute_s: float = 0.0  # computing again what a preemption threw away
    admitted_s: float | None = None  # when
    first_token_s: float | None = None  # when
    lost_mark_s: float = 0.0  # Figures.lost_s at `until_s`
    preemptions: int = 0
    cached_tokens: int = 0  # of the prompt, when it was first admitted
    recomputed_tokens: int = 0  # after preemptions
    prefix_end: str = ""  # why no more of the prompt was found in the prefix cache (core/prefix_cache.py)


@dataclass(slots=True)
class EngineInfo:
    """What an engine that has started tells its clients. Times in seconds, sizes in bytes."""

    model: str
    family: str
    vocab_size: int
    max_model_len: int
    eos_ids: list[int]
    device: str
    dtype: str
    attention: str
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int
    block_size: int
    block_bytes: int
    weight_bytes: int
    num_parameters: int
    reserved_bytes: int = 0  # what steps may take beside weights, KV blocks and slot columns
    prefix_caching: bool = False
    eviction: str = "lru"  # of cached blocks
    generates: bool = True  # False: a model without a head, for embeddings only
    phases_s: dict[str, float] = field(default_factory=dict)  # start-up by phase

    def start_up(self) -> str:
        """The phases of the start in one line, for people."""
        phases = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.phases_s.items())
        return f"{sum(self.phases_s.values()):.2f} s ({phases})"


@dataclass(slots=True)
class EngineLoad:
    """How busy an engine is, in requests and tokens. `received` counts requests since it started."""

    received: int = 0
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0  # prompt tokens of the requests that wait


@dataclass(slots=True)
class Totals:
    """Counters since start, in requests, steps and tokens."""

    steps: int = 0
    requests: int = 0
    finished: int = 0
    aborted: int = 0
    not_finite: int = 0  # requests ended because the model's output was NaN or infinite
    preemptions: int = 0
    yielded: int = 0  # preemptions in favour of other clients
    pressure: int = 0  # times that blocks ran out: preemptions, and admissions that began to wait for blocks
    prompt_tokens: int = 0
    queried_tokens: int = 0  # looked up in the prefix cache; again after a preemption
    cached_tokens: int = 0  # of them found
    computed_tokens: int = 0
    generated_tokens: int = 0


@dataclass(slots=True)
class Figures:
    """What an engine sends along with its outputs: its counters, and what it is like after the latest step.

    `lost_s` is a clock (core/clocks.py). `steps` are those that ended since the last message:
    (rows, tokens, seconds).
    """

    time_s: float = 0.0  # monotonic clock, when the latest step ended
    lost_s: float = 0.0
    free_blocks: int = 0  # evictable ones included
    cached_blocks: int = 0
    held: int = 0  # waiting requests that could not run even if there was room
    evictions: int = 0
    wait_reason: str | None = None
    totals: Totals = field(default_factory=Totals)
    steps: list[tuple[int, int, float]] = field(default_factory=list)


@dataclass(slots=True)
class EngineStats:
    """An engine's figures: now, and since it started (`totals`, in requests, steps and tokens).

    They may be those for one client: `load` is then that by its requests, `others` that by all other requests, and
    `served_tokens` has its tokens only.
    """

    load: EngineLoad
    others: EngineLoad
    wait_reason: str | None  # why the first waiting request waits
    blocks: int
    free_blocks: int  # evictable ones included
    cached_blocks: int  # free blocks that still hold the beginning of some prompt
    block_size: int  # tokens
    totals: dict[str, int]
    last_step: dict[str, float]  # rows, tokens, and durations in seconds of the latest step
    served_tokens: dict[str, int]  # tokens computed for each client


@dataclass(slots=True)
class LiveStep:
    """One finished step as the live view draws it: tokens by kind, requests, blocks, time in seconds."""

    step: int
    time_s: float  # monotonic clock of the engine, when the step was scheduled
    prefill: int  # tokens of prompts, recomputed ones included
    decode: int
    drafts: int
    running: int
    waiting: int
    free_blocks: int
    admitted: int
    preempted: int
    wait_reason: str | None
    took_s: float  # from the end of the step before it, or its own beginning, to its end
    schedule_s: float  # of the host, as the next three
    launch_s: float
    wait_s: float  # for the device
    retire_s: float


@dataclass(slots=True)
class LiveRequest:
    """One request as the live view lists it. Sizes in tokens and blocks."""

    id: str
    client: str
    state: str  # prefill or decode; for one that waits, the reason
    slot: int  # of the batch; -1 for one that waits
    age_s: float
    prompt: int
    cached: int  # of the prompt, found in the prefix cache
    computed: int  # KV entries
    generated: int
    limit: int  # longest answer
    blocks: int
    preemptions: int


@dataclass(slots=True)
class EngineLive:
    """What an engine does at this moment, bounded in size. For one client: with its requests only.

    `blocks` is a uint16 for each cell of `blocks_per_cell` blocks: 0 blank, 1 evictable (free, but the prefix cache
    can still find it), 2 held by several requests, 3 held by a request that is not in the list, 4 + i held by the
    i-th running request. Where a cell stands for several blocks it is the largest of these.
    """

    stats: EngineStats
    steps: list[LiveStep]  # finished since the step that was asked from, the newest of them, oldest first
    running: list[LiveRequest]  # the first of them, in order
    waiting: list[LiveRequest]  # the first of them, in the order of their turns
    blocks: bytes
    blocks_per_cell: int
    shared_blocks: int
