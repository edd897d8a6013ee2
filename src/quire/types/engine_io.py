"""The interface between client and engine: requests, outputs and figures. It carries token ids, never text."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from quire.types.errors import QuireError, RequestError, StepFailed
from quire.types.kv import KVGroup
from quire.types.sampling_params import GrammarSpec, Pooling, SamplingParams
from quire.types.transfer import SharedBlocks


class RequestTargets(NamedTuple):
    """The latency that a request asks for, in seconds; infinite where it asks for none."""

    itl_s: float = math.inf  # between two of its tokens
    ttft_s: float = math.inf  # from its arrival to its first token

    @classmethod
    def of_ms(cls, itl_ms: float | None, ttft_ms: float | None) -> RequestTargets:
        """Return targets given in milliseconds, None for none."""
        return cls(*(math.inf if ms is None else ms / 1e3 for ms in (itl_ms, ttft_ms)))

    def over(self, defaults: RequestTargets) -> RequestTargets:
        """Return these targets, with those of `defaults` where there is none."""
        return RequestTargets(*(own if own < math.inf else other for own, other in zip(self, defaults)))


@dataclass(slots=True)
class EngineRequest:
    """A request as the engine takes it. `params.n` is 1: the client makes one engine request per completion.

    `stop_ids` end the request when sampled: the end-of-sequence ids, unless ignore_eos, and stop_token_ids.
    `bad_words_ids` are the tokenized bad words. `seed` is always set. `grammar` replaces `params.structured_outputs`,
    and then enforces ignore_eos and min_tokens itself. With `pooling` max_tokens is 1, and the last output carries the
    pooled hidden states of the prompt.
    """

    id: str
    prompt: list[int]
    params: SamplingParams
    stop_ids: list[int] = field(default_factory=list)
    eos_ids: list[int] = field(default_factory=list)
    bad_words_ids: list[list[int]] = field(default_factory=list)
    seed: int = 0
    priority: int = 0
    targets: RequestTargets = RequestTargets()
    cache_salt: str = ""
    client: str = ""  # the client that sent it: clients take turns
    weight: float = 1.0  # of the client: its share of slots and tokens, relative to other clients
    grammar: GrammarSpec | None = None
    pooling: Pooling | None = None
    likely_cached: int = 0  # prompt tokens that the sender expects in the prefix cache; only figures use it
    exports: bool = False  # shows its blocks to another engine, which releases them by aborting it


def answer_room(prompt_len: int, max_model_len: int, pooling: Pooling | None) -> int:
    """Return the most tokens that may follow a prompt: what is left of the context, or 1 for an embedding.

    An embedding reads no token behind its prompt, so its prompt may fill the whole context.

    Raises:
        RequestError: if the prompt is too long.
    """
    longest = max_model_len if pooling else max_model_len - 1
    if prompt_len > longest:
        needs = "" if pooling else ", which must also hold at least one output token"
        raise RequestError(
            f"prompt has {prompt_len} tokens, but max_model_len is {max_model_len}{needs}",
            param="prompt",
            code="context_length_exceeded",
        )
    return 1 if pooling else max_model_len - prompt_len


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities of one position: `ids[0]` is the sampled token, then come the most likely ones in order."""

    ids: list[int]
    logprobs: list[float]
    rank: int  # of the sampled token; 1 is the most likely


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


class ExportedBlocks(NamedTuple):
    """Blocks of a group, from place `first` of the request on, that another engine may read."""

    group: int
    first: int
    blocks: list[int]


TimingPhase = Literal["held", "waiting", "computing", "decoding"]


@dataclass(slots=True)
class Timing:
    """A request's time in the engine by phase, in seconds on a monotonic clock that all processes share.

    The sum of `waited_s` and of the other durations is `until_s - arrival_s`. Since `until_s` the request is in
    `phase`. `lost_s` is the delay by the prompts of other requests (core/clocks.py).
    """

    arrival_s: float  # point in time
    until_s: float  # point in time
    phase: TimingPhase = "waiting"
    waited_s: dict[str, float] = field(default_factory=dict)  # before the first admission, by cause
    prefill_s: float = 0.0
    decode_s: float = 0.0
    lost_s: float = 0.0
    preempted_s: float = 0.0  # waiting again after a preemption
    recompute_s: float = 0.0  # computing again the KV entries that a preemption discarded
    admitted_s: float | None = None  # point in time
    first_token_s: float | None = None  # point in time
    lost_mark_s: float = 0.0  # `Figures.lost_s` at `until_s`
    preemptions: int = 0
    cached_tokens: int = 0  # prompt tokens found in the prefix cache at the first admission
    recomputed_tokens: int = 0  # tokens computed again after preemptions
    draft_tokens: int = 0  # draft tokens verified
    accepted_tokens: int = 0  # draft tokens that became output
    fetched_tokens: dict[str, int] = field(
        default_factory=dict
    )  # of the cached ones, by the tier they came from
    prefix_end: str = ""  # why the prefix cache held no more of the prompt (core/prefix_cache.py)


@dataclass(slots=True)
class EngineInfo:
    """The description of a started engine. Times in seconds, sizes in bytes."""

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
    # Groups of layers, each with its own blocks: number of layers, and window or None.
    kv_groups: list[tuple[int, int | None]] = field(default_factory=lambda: [(0, None)])
    kv_dtype: str = ""  # of KV entries; if they are codes, scales follow
    spec_method: str = "off"
    draft_weight_bytes: int = 0  # of the network that drafts, on each rank
    state_bytes: int = 0  # that layers with a recurrence keep of each request, and in each snapshot
    states_per_request: int = 1  # 1 + most draft tokens
    num_snapshots: int = 0
    reserved_bytes: int = 0  # for steps, besides weights, KV blocks and slot columns
    prefix_caching: bool = False
    eviction: str = "lru"  # policy for cached blocks
    generates: bool = True  # False for a model without a language-model head, which only embeds
    phases_s: dict[str, float] = field(default_factory=dict)  # duration of each phase of the start-up
    # By rank and phase: seconds from the first begin of all ranks to the phase's begin, and its duration.
    rank_phases_s: list[dict[str, tuple[float, float]]] = field(default_factory=list)
    shared: SharedBlocks | None = None  # its blocks, for an engine that exports them

    def request_blocks(self, tokens: int) -> int:
        """Return the blocks that a decoding request of `tokens` tokens holds."""
        groups = (KVGroup((), window) for _, window in self.kv_groups)
        return sum(group.most_blocks(tokens, 1, self.block_size) for group in groups)

    def start_up(self) -> str:
        """Return the start-up time, total and by phase, as one line of text."""
        phases = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.phases_s.items())
        return f"{sum(self.phases_s.values()):.2f} s ({phases})"

    def start_up_of_ranks(self) -> list[str]:
        """Return one line of text per rank, if there are several: begin and duration of phases of 10 ms and more."""
        lines = []
        for spans in self.rank_phases_s if len(self.rank_phases_s) > 1 else ():
            long = {phase: span for phase, span in spans.items() if span[1] >= 0.01}
            lines.append(
                ", ".join(f"{phase} {begin:.2f}+{took:.2f} s" for phase, (begin, took) in long.items())
            )
        return lines


@dataclass(slots=True)
class EngineLoad:
    """The load of an engine. `received` counts the requests since its start, refused ones included."""

    received: int = 0
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0  # prompt tokens of the waiting requests
    uncached_tokens: int = 0  # those of them that are not expected in the prefix cache
    computing_tokens: int = 0  # prompt tokens of the running requests that are not computed yet
    prompt_rate: float = 0.0  # prompt tokens per second beside the rows that decode now; 0 if it is not known


@dataclass(slots=True)
class Totals:
    """Counters since the start of an engine, in requests, steps and tokens."""

    steps: int = 0
    requests: int = 0
    finished: int = 0
    aborted: int = 0
    not_finite: int = 0  # requests that ended because a logit was NaN or infinite
    preemptions: int = 0
    yielded: int = 0  # preemptions in favour of other clients
    pressure: int = 0  # times that blocks ran out: preemptions, and admissions that had to wait for blocks
    prompt_tokens: int = 0
    queried_tokens: int = 0  # looked up in the prefix cache, once per admission
    cached_tokens: int = 0  # found in the prefix cache
    # Tokens of cached blocks that were not on the device, by tier: host, disk or prefill.
    fetched_tokens: dict[str, int] = field(default_factory=dict)
    moved_bytes: dict[str, int] = field(default_factory=dict)  # by kind of transfer (types/transfer.py)
    unsaved_blocks: int = 0  # evicted blocks for which host memory had no free row
    computed_tokens: int = 0
    generated_tokens: int = 0
    draft_rows: int = 0  # rows that verified draft tokens
    draft_tokens: int = 0
    accepted_tokens: int = 0  # draft tokens that became output
    accepted_at: list[int] = field(
        default_factory=list
    )  # accepted tokens by position among the drafts of a row

    def count_drafts(self, drafted: int, accepted: int) -> None:
        """Count a row that verified `drafted` draft tokens, of which the first `accepted` were accepted."""
        self.draft_rows += 1
        self.draft_tokens += drafted
        self.accepted_tokens += accepted
        self.accepted_at += [0] * (drafted - len(self.accepted_at))
        for position in range(accepted):
            self.accepted_at[position] += 1


class StepFigures(NamedTuple):
    """The size and duration of a finished step."""

    rows: int
    tokens: int
    took_s: float


@dataclass(slots=True)
class Figures:
    """The counters and the state of an engine after its latest step. Sent with every message of outputs."""

    time_s: float = 0.0  # monotonic clock, at the end of the latest step
    lost_s: float = 0.0  # the clock of time lost to prompts (core/clocks.py)
    free_blocks: int = 0  # evictable ones included
    cached_blocks: int = 0
    held: int = 0  # waiting requests that may not run yet, whatever is free
    evictions: int = 0
    snapshots: int = 0  # of states, that the prefix cache can find
    snapshot_evictions: int = 0
    wait_reason: str | None = None
    notes: list[str] = field(default_factory=list)  # about each process of the engine that is not up
    totals: Totals = field(default_factory=Totals)
    steps: list[StepFigures] = field(default_factory=list)  # that ended since the last message


@dataclass(slots=True)
class EngineStats:
    """The figures of an engine: its present state, and its counters since the start (`totals`).

    In the figures for one client, `load` counts its requests, `others` all other requests, and `served_tokens` holds
    its tokens only.
    """

    load: EngineLoad
    others: EngineLoad
    wait_reason: str | None  # why the first waiting request waits
    blocks: int
    free_blocks: int  # evictable ones included
    cached_blocks: int  # free blocks that the prefix cache can still find
    block_size: int  # tokens
    totals: dict[str, Any]
    last_step: dict[str, float]  # of the latest step: rows, tokens, and durations in seconds
    served_tokens: dict[str, int]  # tokens computed by client
    snapshot_rows: int = 0  # for snapshots of states
    snapshots: int = 0  # that the prefix cache can find


@dataclass(slots=True)
class LiveStep:
    """One finished step for the live view: tokens by kind, requests, blocks, durations in seconds."""

    step: int
    time_s: float  # monotonic clock of the engine, when the step was scheduled
    prefill: int  # prompt tokens, and tokens computed again after a preemption
    decode: int
    drafts: int
    running: int
    waiting: int
    free_blocks: int
    admitted: int
    preempted: int
    wait_reason: str | None
    took_s: float  # from the end of the previous step, or its own start if that is later, to its end
    schedule_s: float  # host time; so are the next three
    launch_s: float
    wait_s: float  # waiting for the device
    retire_s: float
    predicted_s: float = 0.0  # of `took_s`; 0 if nothing predicts it


@dataclass(slots=True)
class LiveRequest:
    """One request for the live view. Sizes in tokens and blocks."""

    id: str
    client: str
    state: str  # prefill or decode; the reason for waiting, if it waits
    slot: int  # -1 if it waits
    age_s: float
    prompt: int
    cached: int  # prompt tokens found in the prefix cache
    computed: int  # KV entries
    generated: int
    limit: int  # maximum number of output tokens
    blocks: int
    preemptions: int


@dataclass(slots=True)
class EngineLive:
    """A snapshot of an engine for the live view, bounded in size. For one client it lists only its requests.

    `blocks` is an array of uint16, one for each cell of `blocks_per_cell` blocks: 0 blank, 1 evictable (free, but the
    prefix cache can still find it), 2 held by several requests, 3 held by a request that is not listed, 4 + i held by
    request i of `running`. A cell of several blocks shows the largest of their values.
    """

    stats: EngineStats
    steps: list[LiveStep]  # the newest finished steps, oldest first
    running: list[LiveRequest]  # the first ones, in batch order
    waiting: list[LiveRequest]  # the first ones, in the order of their turns
    blocks: bytes
    blocks_per_cell: int
    shared_blocks: int
