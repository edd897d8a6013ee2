"""What scheduler and executor say to each other: plans, which are read-only once made, and results."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from quire.types.engine_io import EngineRequest, TokenLogprobs

if TYPE_CHECKING:
    import numpy as np


@dataclass(slots=True)
class SlotAdmission:
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
    admissions: list[SlotAdmission]
    new_blocks: list[tuple[int, int, list[int]]]  # (slot, index of the first in the slot's table, block ids)
    total_tokens: int
    max_seq_len: int  # bound on starts + num_tokens
    score_rows: list[int] = field(default_factory=list)  # rows that want prompt log-probabilities
    pool_rows: list[int] = field(default_factory=list)  # rows whose hidden states are pooled
    # int32 [rows]: tokens in blocks that rows begin with in common, 0 for rows that do not; None: nothing is
    shared: np.ndarray | None = None

    @property
    def keeps_hidden(self) -> bool:
        """Whether hidden states of other tokens than each row's last are needed."""
        return bool(self.score_rows or self.pool_rows)


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


# What a row's token is where none can be sampled. Found where tokens are sampled, so that nobody has to wait.
NOT_FINITE = -1  # a logit is NaN or +inf
NO_TOKEN = -2  # every logit is -inf


@dataclass(slots=True)
class StepResult:
    """What a step produced, for the rows with `samples`, in plan order."""

    step: int
    tokens: list[list[int]]  # 1 .. 1 + drafts tokens per sampling row, or NOT_FINITE or NO_TOKEN alone
    logprobs: LogprobArrays | None = None  # one entry per sampling row
    prompt_logprobs: dict[int, LogprobArrays] | None = None  # by row: entries for positions starts+1 ...
    pooled: dict[int, np.ndarray] | None = None  # by row: float32 [hidden], of its tokens so far


class StepHandle(Protocol):
    """A step in flight."""

    def wait(self) -> StepResult:
        """Block until the step's results are on the host; the only place where the host waits."""
        ...


class Executor(Protocol):
    """Runs plans on the device(s), in order. Neither call waits for the device.

    Both raise StepFailed if memory is short: nothing of that step counts then, and earlier steps are not affected.
    """

    def forward(self, plan: StepPlan) -> None: ...

    def sample(self, step: int, masks: TokenMasks | None) -> StepHandle: ...

    def warm_up(self) -> bool:
        """Use a moment without work to make later steps cheaper; False: nothing is left to prepare."""
        ...

    def close(self) -> None: ...
