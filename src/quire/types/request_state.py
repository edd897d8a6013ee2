"""The scheduler's record of a request.

Each field has one writer: the scheduler, or the part of `quire.core` that heads its group below. Everything else only
reads.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal, NamedTuple

from quire.types.engine_io import EngineRequest, Timing
from quire.types.kv import BlockTable
from quire.types.sampling_params import SamplingParams

RequestStatus = Literal["waiting", "loading", "running", "holding", "finished"]


class RequestOrder(NamedTuple):
    """The sort key of a request. Smaller keys are admitted first, and the largest key is preempted first."""

    priority: int
    due_s: float  # point in time on the engine's clock when its first token is due
    arrival: int  # number


class ReservedRow(NamedTuple):
    """A snapshot of a request that has no name yet, because its last token was in flight when it was taken."""

    tokens: int
    row: int


@dataclass(slots=True, eq=False)
class Request:
    """The state of one request inside the engine.

    Three numbers say what it needs next. `known` is the number of its tokens, prompt and output. `computed` is the
    number of its KV entries, and `pending` the number of tokens that steps in flight will append; both assume that
    every draft token in flight is accepted. The request wants `known + pending + drafts - computed` tokens.
    """

    # Constant.
    id: str
    prompt_len: int
    tokens: array[int]  # int32: prompt, then committed output, to which the scheduler appends
    params: SamplingParams
    order: RequestOrder
    limit: int  # number of tokens, prompt included, at which the request ends with "length"
    stop_ids: frozenset[int]
    eos_ids: frozenset[int]
    min_tokens: int  # output tokens before which stop_ids do not end the request
    source: EngineRequest

    # Written by the scheduler.
    computed: int = 0
    pending: int = 0
    slot: int = -1
    status: RequestStatus = "waiting"  # written by core/lifecycle.py alone
    held: str | None = None  # the reason why it must not be admitted yet, or None
    paused: bool = False  # gets no row, because its next mask is still being computed
    may_draft: bool = True  # False: the masks of its grammar are too slow for draft tokens
    dropped_step: int = -1  # the last step whose token for this request is dropped
    last_step: int = -1  # the last step that admitted this request or had a row of it
    cached: int = -1  # prompt tokens found in the prefix cache when it was first admitted; -1 before
    scored: int = 1  # next prompt position whose log-probability is to be delivered
    preemptions: int = 0
    admitted_known: int = 0  # `known` when it was last admitted
    catching_up: bool = True  # no step since its admission has computed all known tokens

    # Written by `Blocks` (core/blocks.py).
    tables: list[BlockTable] = field(default_factory=list)  # by group of layers; none while it waits
    num_blocks: int = 0  # blocks that it holds, of all groups
    room: int = 0  # tokens for which it holds blocks
    full_at: int = 0  # value of `computed` at which its next block is full

    # Written by the prefix cache (core/prefix_cache.py).
    published: int = 0  # number of its full blocks already offered to the prefix cache
    names: list[bytes] = field(default_factory=list)  # names of its full blocks in the prefix cache

    # Written by `Blocks` and the snapshots of states (core/snapshots.py).
    diverges: int = 0  # tokens whose blocks were cached when it was admitted, if more than its snapshot holds
    last_snapshot: int = 0  # token behind its last snapshot, or the one it started from
    passing: int = 0  # token behind its last snapshot, if that is dropped when the next one is taken
    reserved_rows: list[ReservedRow] = field(default_factory=list)

    # Written by the shares of clients (core/shares.py).
    charged: int = 0  # number of its tokens that are settled with its client, cached ones included

    # Written by the choice of depth (core/draft_depth.py).
    drafts: int = 0  # draft tokens to verify in the next step; 0 without speculation
    acceptance: float = 0.0  # smoothed share of its drafts that is accepted

    # Written by the clocks (core/clocks.py).
    timing: Timing = field(default_factory=lambda: Timing(0.0, 0.0))
    waits_mark_s: dict[str, float] = field(default_factory=dict)  # the clocks when it began to wait
    prompt_mark_s: float = 0.0  # the clock of steps with prompts when it was admitted
    own_s: float = 0.0  # its share of these steps since then

    def held_blocks(self) -> Iterator[int]:
        """Iterate over the blocks that it holds, of all groups."""
        return chain.from_iterable(table.held for table in self.tables)

    @property
    def ended(self) -> bool:
        """Return whether the request is finished, though another engine may still read its blocks."""
        return self.status in ("finished", "holding")

    @property
    def known(self) -> int:
        """Number of known tokens: the prompt and the output so far."""
        return len(self.tokens)
