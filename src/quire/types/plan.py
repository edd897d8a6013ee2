"""The interface between scheduler and executor: plans of steps, and their results."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from quire.types.engine_io import EngineRequest, TokenLogprobs

if TYPE_CHECKING:
    import numpy as np


@dataclass(slots=True)
class SlotAdmission:
    """A request that takes a slot. The executor overwrites every column of the slot with these values."""

    slot: int
    tokens: array[int]  # prompt, and output so far if the request was preempted
    prompt_len: int
    computed: int  # KV entries found in the prefix cache
    blocks: list[list[int]]  # by group of layers; blocks behind the window of a group are any
    request: EngineRequest


# A block to append to a block table: slot, group of layers, place in the table of both, block. Not a NamedTuple, which
# takes several times as long to make. Plans hold them as rows of an integer array.
NewBlock = tuple[int, int, int, int]


@dataclass(slots=True)
class StepPlan:
    """One step: a ragged batch as a struct of arrays, in batch order. Read-only once built.

    Row i runs `num_tokens[i]` tokens of slot `slots[i]`, starting at KV entry `starts[i]`. With draft tokens in
    flight `starts` is an upper bound, and the device's own column decides. A row with `samples` yields a token, and
    one more for each of its draft tokens that is accepted. Each row has 1 + `num_drafts[i]` rows of logits.
    """

    step: int
    slots: np.ndarray  # int32 [rows]
    num_tokens: np.ndarray  # int32 [rows], draft tokens included
    num_drafts: np.ndarray  # int32 [rows]
    starts: np.ndarray  # int32 [rows]
    samples: np.ndarray  # bool [rows]
    admissions: list[SlotAdmission]
    new_blocks: np.ndarray  # int32 [blocks, 4], rows of `NewBlock`
    total_tokens: int
    score_rows: list[int] = field(default_factory=list)  # rows that need prompt log-probabilities
    pool_rows: list[int] = field(default_factory=list)  # rows whose hidden states are pooled
    # int32 [rows]: number of tokens in the blocks that rows share at their beginning, 0 for rows that share none.
    # None: no rows share blocks.
    shared: np.ndarray | None = None
    # Copies of states, as (slot, row of a snapshot): to the slot before the model runs, from the slot after it has run.
    restores: list[tuple[int, int]] = field(default_factory=list)
    saves: list[tuple[int, int]] = field(default_factory=list)
    max_drafts: int = -1  # most draft tokens of a row; negative: computed from `num_drafts`
    num_sampling: int = -1  # rows with `samples`; negative: counted

    def __post_init__(self) -> None:
        if self.max_drafts < 0:
            self.max_drafts = int(self.num_drafts.max(initial=0))
        if self.num_sampling < 0:
            self.num_sampling = int(self.samples.sum())

    @property
    def max_seq_len(self) -> int:
        """Return an upper bound of starts + num_tokens."""
        return int((self.starts + self.num_tokens).max(initial=0))

    @property
    def has_prompts(self) -> bool:
        """Return whether a row has more known tokens than one, as those of prompts have."""
        return self.total_tokens > len(self.slots) and bool((self.num_tokens - self.num_drafts > 1).any())

    @property
    def first_logit_rows(self) -> np.ndarray:
        """Return the first logit row of each row, [rows]."""
        counts = 1 + self.num_drafts
        return counts.cumsum() - counts

    def per_logit_row(self, column: np.ndarray) -> np.ndarray:
        """Repeat the entries of `column` [rows] for the 1 + drafts logit rows of each row."""
        return column.repeat(1 + self.num_drafts) if self.max_drafts else column

    @property
    def keeps_hidden(self) -> bool:
        """Return whether the step needs hidden states of other tokens than the last of each row."""
        return bool(self.score_rows or self.pool_rows)


@dataclass(slots=True)
class TokenMasks:
    """The tokens that the constrained logit rows of a step may sample: bit v % 32 of word v // 32 stands for token v.

    Logit rows that are not listed may sample any token. Without draft tokens they are the rows of the plan.
    """

    rows: np.ndarray  # int64 [k], ascending logit rows
    bits: np.ndarray  # int32 [k, ceil(vocab / 32)]


@dataclass(slots=True)
class LogprobArrays:
    """Log-probabilities of n positions, each with k alternatives.

    Column 0 is the sampled token, or the given one in a prompt. The most likely tokens follow in descending order.
    """

    ids: np.ndarray  # int32 [n, 1 + k]
    logprobs: np.ndarray  # float32 [n, 1 + k]
    ranks: np.ndarray  # int32 [n], of the tokens in column 0; 1 is the most likely

    def __len__(self) -> int:
        return len(self.ranks)

    def at(self, index: int, top: int) -> TokenLogprobs:
        """Return the entry at `index`, with `top` alternatives."""
        return TokenLogprobs(
            self.ids[index, : 1 + top].tolist(),
            self.logprobs[index, : 1 + top].tolist(),
            int(self.ranks[index]),
        )

    def of(self, first: int, count: int, top: int) -> list[TokenLogprobs]:
        """Return `count` entries from index `first` on."""
        return [self.at(index, top) for index in range(first, first + count)]


# Tokens of the steps with prompts that a GPU captures before the first request. Such a step needs no padding.
COMMON_STEP_TOKENS = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)


def max_logit_rows(max_num_seqs: int, drafts: int) -> int:
    """Return the most rows of logits of a step, in which up to `max_num_seqs` rows have up to `drafts` draft tokens.

    It bounds the memory for logits. More draft tokens are not scheduled; a step of so many rows gains nothing from them.
    """
    return max(max_num_seqs, min(max_num_seqs * (1 + drafts), 1024))


# Sentinels that stand for the token of a row where none can be sampled. The sampler itself detects this, so the host
# does not have to wait for the device to check it.
NOT_FINITE = -1  # a logit is NaN or +inf
NO_TOKEN = -2  # every logit is -inf
# Fills the results of a row behind its last token, because a draft token was rejected.
REJECTED = -3


class DeviceTimes(NamedTuple):
    """Seconds until the end of a step, by the clock of the device that ran it."""

    since_start_s: float  # since its first command was queued, or the step in front ended if that was later
    since_last_s: float  # since the end of the step in front


@dataclass(slots=True)
class StepResult:
    """The results of a step, for its sampling rows in plan order."""

    step: int
    # int32 [sampling rows, 1 + most drafts]: 1 to 1 + drafts tokens, of which the last may be NOT_FINITE or NO_TOKEN,
    # then REJECTED
    tokens: np.ndarray
    logprobs: LogprobArrays | None = (
        None  # 1 + drafts entries per sampling row; those of rejected drafts are unused
    )
    prompt_logprobs: dict[int, LogprobArrays] | None = None  # by row: entries for positions starts + 1 ...
    pooled: dict[int, np.ndarray] | None = None  # by row: float32 [hidden], pooled over its tokens so far
    times: DeviceTimes | None = None  # None: only the host has a clock


class StepHandle(Protocol):
    """A step in flight.

    Attributes:
        is_timed: the results carry `times`, so the host need not notice when the step ends.
    """

    @property
    def is_timed(self) -> bool: ...

    def ready(self) -> bool:
        """Return whether `wait` would return at once."""
        ...

    def wait(self) -> StepResult:
        """Wait until the results are on the host, and return them. The host waits for the device only here."""
        ...


class Executor(Protocol):
    """The device side of an engine: it runs plans in order.

    `forward` and `sample` only launch work and do not wait for the device. Both raise StepFailed if memory runs out;
    the results of that step are then void, and earlier steps are not affected.
    """

    def forward(self, plan: StepPlan) -> None:
        """Launch the forward pass of a plan."""
        ...

    def drafts(self) -> np.ndarray:
        """Wait for the draft tokens of the step whose forward pass was launched last, and return them.

        Returns:
            int32 [rows, most drafts], undefined behind the drafts of a row.
        """
        ...

    def sample(self, step: int, masks: TokenMasks | None) -> StepHandle:
        """Launch the sampling of a step whose forward pass has been launched."""
        ...

    def warm_up(self) -> bool:
        """Prepare something that makes later steps faster. Return False if nothing is left to prepare."""
        ...

    def close(self) -> None: ...
