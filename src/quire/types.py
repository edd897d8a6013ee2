"""The words that every layer of Quire shares: requests, plans, results, errors and the seams between them.

A leaf: imports no torch and nothing of Quire. Host arrays are numpy, so a plan can be shipped to
another process as it is. `Request` has one writer, the scheduler; a `StepPlan` is read-only once made.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import numpy as np

# ------------------------------------------------------------------------------------------ errors


class QuireError(Exception):
    """Base of every error that Quire raises on purpose; its text is one sentence for the user."""


class ConfigError(QuireError):
    """A setting, or a combination of settings, that cannot work."""


class ModelError(QuireError):
    """A checkpoint, config or tokenizer that is missing, corrupt or not supported."""


class RequestError(QuireError):
    """A request that cannot be served as it is (HTTP 400); names the field and the limit."""


class Overloaded(QuireError):
    """No room for the request now (HTTP 503 with Retry-After)."""


class EngineDead(QuireError):
    """The engine stopped; every open request fails with the cause."""


# ------------------------------------------------------------------------------ sampling parameters

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True)
class StructuredOutputsParams:
    """What an answer's text must be: exactly one of these. Names as in vLLM.

    `json` is a JSON schema (an object, or its text), `regex` must match the whole text, `choice` lists the
    possible texts, `grammar` is a context-free grammar, `json_object` asks for any JSON object.
    """

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool = False

    def __post_init__(self) -> None:
        given = [f.name for f in fields(self) if getattr(self, f.name) not in (None, False)]
        if len(given) != 1:
            raise RequestError(
                "structured_outputs must hold exactly one of json, regex, choice, grammar and json_object, "
                f"got {' and '.join(given) or 'none'}"
            )


Pooling = Literal["mean", "last"]  # of a prompt's hidden states: their mean, or that of the last token

GrammarKind = Literal["json", "regex", "choice", "grammar"]


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A checked `StructuredOutputsParams` on its way to the engine; equal ones share their compiled form.

    `text` is a JSON schema, a regular expression, a JSON list of strings, or a Lark or GBNF grammar.
    """

    kind: GrammarKind
    text: str


@dataclass(slots=True)
class SamplingParams:
    """How the tokens of one request are chosen. Names and defaults as in vLLM.

    temperature 0 is greedy. `top_k` 0 or -1, `top_p` 1 and `min_p` 0 are off. `repetition_penalty`
    (CTRL, arXiv:1909.05858) looks at prompt and output; `presence_penalty` and `frequency_penalty`
    (OpenAI API) at the output only. `logprobs` is the number of top alternatives to return for each
    output token (0: only the chosen token's), `prompt_logprobs` the same for prompt tokens.
    Raises RequestError from `verify` on a value out of range.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = field(default_factory=list)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        if isinstance(self.bad_words, str):
            self.bad_words = [self.bad_words]
        self.stop = list(self.stop or ())
        self.bad_words = list(self.bad_words or ())
        self.stop_token_ids = list(self.stop_token_ids or ())
        if self.logit_bias is not None:
            self.logit_bias = {_as_int("logit_bias", k): v for k, v in self.logit_bias.items()}
        self.verify()

    def verify(self) -> None:
        """Raise RequestError, naming the field and its limit, unless every value is in range."""
        for name, low, high in INT_RANGES:
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise RequestError(f"{name} must be an integer, got {value!r}")
            if not low <= value <= high:
                raise RequestError(f"{name} must be between {low} and {high}, got {value}")
        for name, lowest, highest, open_low in FLOAT_RANGES:
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or value != value:
                raise RequestError(f"{name} must be a number, got {value!r}")
            if not lowest <= value <= highest or (open_low and value == lowest):
                bracket = "(" if open_low else "["
                raise RequestError(f"{name} must be in {bracket}{lowest}, {highest}], got {value}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})"
            )
        for name in ("stop", "bad_words"):
            if any(not isinstance(s, str) or not s for s in getattr(self, name)):
                raise RequestError(f"{name} must hold non-empty strings")
        for name in ("stop_token_ids", "allowed_token_ids"):
            ids = getattr(self, name)
            if ids is not None and any(not isinstance(t, int) or isinstance(t, bool) or t < 0 for t in ids):
                raise RequestError(f"{name} must hold token ids (integers of at least 0)")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids must hold at least one token id, or be left out")
        for token, bias in (self.logit_bias or {}).items():
            if token < 0 or not isinstance(bias, (int, float)) or not -100 <= bias <= 100:
                raise RequestError(
                    f"logit_bias must map token ids to values in [-100, 100], got {token}: {bias!r}"
                )
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need detokenize=True; use stop_token_ids with token ids alone")

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5


MAX_LOGPROBS = 1000
_OPTIONAL = {"seed", "max_tokens", "logprobs", "prompt_logprobs"}
INT_RANGES = (
    ("n", 1, 1024),
    ("top_k", -1, 2**31 - 1),
    ("seed", -(2**63), 2**63 - 1),
    ("max_tokens", 1, 2**31 - 1),
    ("min_tokens", 0, 2**31 - 1),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
)
FLOAT_RANGES = (
    ("temperature", 0.0, 100.0, False),
    ("top_p", 0.0, 1.0, True),
    ("min_p", 0.0, 1.0, False),
    ("repetition_penalty", 0.0, 100.0, True),
    ("presence_penalty", -2.0, 2.0, False),
    ("frequency_penalty", -2.0, 2.0, False),
)


def _as_int(name: str, value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        raise RequestError(f"{name} must have token ids as keys, got {value!r}") from None


def check_field_names(cls: type, given: dict[str, Any], error: type[QuireError]) -> None:
    """Raise `error` for a keyword that is no field of the dataclass `cls`, naming the closest ones."""
    import difflib

    names = [f.name for f in fields(cls)]
    for key in given:
        if key not in names:
            near = difflib.get_close_matches(key, names, 3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise error(f"{cls.__name__} has no field {key!r}{hint}")


# ----------------------------------------------------------------- client <-> engine, ids only


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
    error: str | None = None
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
    prefix_end: str = ""  # why no more of the prompt was found in the prefix cache (core/prefix.py)


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
    phases_s: dict[str, float] = field(default_factory=dict)  # start-up by phase

    def start_up(self) -> str:
        """The phases of the start in one line, for people."""
        phases = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.phases_s.items())
        return f"{sum(self.phases_s.values()):.2f} s ({phases})"


@dataclass(slots=True)
class Load:
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
    preemptions: int = 0
    pressure: int = 0  # times that pages ran out: preemptions, and admissions that began to wait for pages
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
    free_pages: int = 0  # evictable ones included
    cached_pages: int = 0
    held: int = 0  # waiting requests that could not run even if there was room
    evictions: int = 0
    wait_reason: str | None = None
    totals: Totals = field(default_factory=Totals)
    steps: list[tuple[int, int, float]] = field(default_factory=list)


@dataclass(slots=True)
class EngineStats:
    """An engine's figures: now, and since it started (`totals`, in requests, steps and tokens)."""

    load: Load
    wait_reason: str | None  # why the first waiting request waits
    pages: int
    free_pages: int  # evictable ones included
    cached_pages: int  # free pages that still hold the beginning of some prompt
    page_size: int  # tokens
    totals: dict[str, int]
    last_step: dict[str, float]  # rows, tokens, and durations in seconds of the latest step
    served_tokens: dict[str, int]  # tokens computed for each client


@dataclass(slots=True)
class LiveStep:
    """One finished step as the live view draws it: tokens by kind, requests, pages, time in seconds."""

    step: int
    time_s: float  # monotonic clock of the engine, when the step was scheduled
    prefill: int  # tokens of prompts, recomputed ones included
    decode: int
    drafts: int
    running: int
    waiting: int
    free_pages: int
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
    """One request as the live view lists it. Sizes in tokens and pages."""

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
    pages: int
    preemptions: int


@dataclass(slots=True)
class EngineLive:
    """What an engine does at this moment, bounded in size.

    `pages` is a uint16 for each cell of `pages_per_cell` pages: 0 blank, 1 evictable (free, but the prefix cache
    can still find it), 2 held by several requests, 3 + i held by the i-th running request. Where a cell stands for
    several pages it is the largest of these.
    """

    stats: EngineStats
    steps: list[LiveStep]  # finished since the step that was asked from, the newest of them, oldest first
    running: list[LiveRequest]  # the first of them, in order
    waiting: list[LiveRequest]  # the first of them, in the order of their turns
    pages: bytes
    pages_per_cell: int
    shared_pages: int


# -------------------------------------------------------------------------- scheduler's own record

Status = Literal["waiting", "running", "finished"]


@dataclass(slots=True, eq=False)
class Request:
    """One request inside the engine. Written only by the scheduler.

    known = len(tokens); `computed` KV entries are valid if every draft in flight is accepted;
    `pending` tokens will be appended by steps in flight, under the same assumption.
    """

    id: str
    prompt_len: int
    tokens: array[int]  # prompt + committed output, int32
    params: SamplingParams
    order: tuple[int, ...]  # admission order: smaller goes first; the largest is the first victim
    limit: int  # total tokens after which the request has its full length
    stop_ids: frozenset[int]
    eos_ids: frozenset[int]
    min_tokens: int  # before which stop_ids do not count
    source: EngineRequest
    timing: Timing = field(default_factory=lambda: Timing(0.0, 0.0))
    computed: int = 0
    pending: int = 0
    drafts: int = 0  # draft tokens to verify per step; 0 without speculation
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    published: int = 0  # full blocks already offered to the prefix cache
    publish_at: int = 0  # `computed` at which the next block is full
    names: list[bytes] = field(default_factory=list)  # prefix-cache names of its full blocks
    status: Status = "waiting"
    held: str | None = None  # why it must not be admitted yet; None: it may
    last_step: int = -1  # last step that held a row of this request
    cached: int = -1  # tokens found in the prefix cache on first admission; -1 before it
    scored: int = 1  # next prompt position whose log-probability is still to be delivered
    preemptions: int = 0
    charged: int = 0  # output tokens booked to its client so far
    catching_up: bool = True  # since its admission no step has computed all that is known of it
    waits_mark_s: dict[str, float] = field(default_factory=dict)  # the clocks when it began to wait
    prompt_mark_s: float = 0.0  # the clock of steps with prompts when it was admitted
    own_s: float = 0.0  # of these steps, its share since then

    @property
    def arrival_s(self) -> float:
        return self.timing.arrival_s

    @property
    def known(self) -> int:
        return len(self.tokens)


# ----------------------------------------------------------------------------- plans and results


@dataclass(slots=True)
class Admit:
    """A request that takes a slot: every column of the slot is overwritten from this."""

    slot: int
    tokens: array[int]
    prompt_len: int
    computed: int
    blocks: list[int]
    request: EngineRequest


@dataclass(slots=True)
class StepPlan:
    """One step for every rank: a ragged batch as a struct of arrays, in batch order.

    Row i runs `num_tokens[i]` tokens of slot `slots[i]`, starting at KV entry `starts[i]` (an upper
    bound when drafts are in flight; the device's own column decides). Rows with `samples` yield a token.
    """

    step: int
    slots: np.ndarray  # int32 [rows]
    num_tokens: np.ndarray  # int32 [rows], drafts included
    num_drafts: np.ndarray  # int32 [rows]
    starts: np.ndarray  # int32 [rows]
    samples: np.ndarray  # bool [rows]
    admits: list[Admit]
    new_blocks: list[tuple[int, int, list[int]]]  # (slot, index of the first in the slot's table, block ids)
    total_tokens: int
    max_seq_len: int  # bound on starts + num_tokens
    score_rows: list[int] = field(default_factory=list)  # rows that want prompt log-probabilities
    pool_rows: list[int] = field(default_factory=list)  # rows whose hidden states are pooled
    # int32 [rows]: tokens in pages that rows begin with in common, 0 for rows that do not; None: nothing is
    shared: np.ndarray | None = None


@dataclass(slots=True)
class TokenMasks:
    """What the constrained rows of a step may sample: bit v % 32 of word v // 32 is token v. Other rows may
    sample anything."""

    rows: np.ndarray  # int64 [k], ascending rows of the plan
    bits: np.ndarray  # int32 [k, ceil(vocab / 32)]


@dataclass(slots=True)
class LogprobArrays:
    """Column 0 is the chosen (or given) token, then the top ones in descending order."""

    ids: np.ndarray  # int32 [n, 1 + k]
    logprobs: np.ndarray  # float32 [n, 1 + k]
    ranks: np.ndarray  # int32 [n]

    def __len__(self) -> int:
        return len(self.ranks)

    def at(self, index: int, top: int) -> TokenLogprobs:
        return TokenLogprobs(
            self.ids[index, : 1 + top].tolist(),
            self.logprobs[index, : 1 + top].tolist(),
            int(self.ranks[index]),
        )


@dataclass(slots=True)
class StepResult:
    """What a step produced, for the rows with `samples`, in plan order."""

    step: int
    tokens: list[list[int]]  # 1 .. 1 + drafts tokens per sampling row
    logprobs: LogprobArrays | None = None  # one entry per sampling row
    prompt_logprobs: dict[int, LogprobArrays] | None = None  # by row: entries for positions starts+1 ...
    pooled: dict[int, np.ndarray] | None = None  # by row: float32 [hidden], of its tokens so far


class StepHandle(Protocol):
    """A step in flight."""

    def wait(self) -> StepResult:
        """Block until the step's results are on the host; the only place where the host waits."""
        ...


class Executor(Protocol):
    """Runs plans on the device(s), in order. Neither call waits for the device."""

    def forward(self, plan: StepPlan) -> None: ...

    def sample(self, step: int, masks: TokenMasks | None) -> StepHandle: ...

    def warm_up(self) -> bool:
        """Use a moment without work to make later steps cheaper; False: nothing is left to prepare."""
        ...

    def close(self) -> None: ...


# ------------------------------------------------------------------------------- results for users


@dataclass(slots=True)
class Logprob:
    """Log-probability of a token, its rank (1 = most likely) and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One of the n answers to a prompt."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestMetrics:
    """Times in seconds on the client's monotonic clock."""

    arrival_s: float
    first_token_s: float | None = None
    finished_s: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """The answer to one prompt, as vLLM users know it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
