"""The scheduler's record of a request.

Each field has one writer: the scheduler, or the part of `quire.core` that heads its group below. Everything else only
reads. What a step reads or writes for every row is a column of `RequestTable`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal, NamedTuple

from quire.types.engine_io import EngineRequest, Timing
from quire.types.kv import BlockTable
from quire.types.request_table import (
    CATCHING_UP,
    COMPUTED,
    DRAFTS,
    EXTRA,
    FULL_AT,
    KNOWN,
    LAST_STEP,
    LIMIT,
    NO_DRAFTS,
    PAUSED,
    ROOM,
    SLOT,
    UNUSED_ROW,
    VISIT_AT,
    RequestTable,
)
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

    These numbers, and the others that a step reads of every row, are in a row of a `RequestTable`, to which properties
    refer. All other state is in attributes.
    """

    # Constant.
    id: str
    prompt_len: int
    _tokens: array[int]  # int32: prompt, then committed output; the newest tokens may still be in the table
    params: SamplingParams
    order: RequestOrder
    limit: (
        int  # number of tokens, prompt included, at which the request ends with "length"; also in the table
    )
    stop_ids: frozenset[int]
    eos_ids: frozenset[int]
    min_tokens: int  # output tokens before which stop_ids do not end the request
    source: EngineRequest
    table: RequestTable = field(default_factory=RequestTable)  # by default one of its own
    row: int = field(default=UNUSED_ROW, init=False)  # of the table

    # Written by the scheduler.
    status: RequestStatus = "waiting"  # written by core/lifecycle.py alone
    held: str | None = None  # the reason why it must not be admitted yet, or None
    cached: int = -1  # prompt tokens found in the prefix cache when it was first admitted; -1 before
    scored: int = 1  # next prompt position whose log-probability is to be delivered
    preemptions: int = 0
    admitted_known: int = 0  # `known` when it was last admitted

    # Written by `Blocks` (core/blocks.py).
    tables: list[BlockTable] = field(default_factory=list)  # by group of layers; none while it waits
    num_blocks: int = 0  # blocks that it holds, of all groups

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
    acceptance: float = 0.0  # smoothed share of its drafts that is accepted

    # Written by the clocks (core/clocks.py).
    timing: Timing = field(default_factory=lambda: Timing(0.0, 0.0))
    waits_mark_s: dict[str, float] = field(default_factory=dict)  # the clocks when it began to wait
    prompt_mark_s: float = 0.0  # the clock of steps with prompts when it was admitted
    own_s: float = 0.0  # its share of these steps since then

    def __post_init__(self) -> None:
        self.row = row = self.table.add(self)
        cells = self.table.cells
        cells[KNOWN, row] = len(self._tokens)
        cells[EXTRA, row] = len(self._tokens) - 1
        cells[LIMIT, row], cells[SLOT, row], cells[LAST_STEP, row] = self.limit, -1, -1
        cells[CATCHING_UP, row] = 1
        cells[VISIT_AT, row] = self.limit if self.params.logprobs is None else 0

    def held_blocks(self) -> Iterator[int]:
        """Iterate over the blocks that it holds, of all groups."""
        return chain.from_iterable(table.held for table in self.tables)

    @property
    def ended(self) -> bool:
        """Return whether the request is finished, though another engine may still read its blocks."""
        return self.status in ("finished", "holding")

    # ------------------------------------------------------------------------------- tokens

    @property
    def tokens(self) -> array[int]:
        """The prompt and the committed output, int32. Read-only; `append` adds to it."""
        self.flush()
        return self._tokens

    @property
    def known(self) -> int:
        """Number of known tokens: the prompt and the output so far."""
        return self.table.cells[KNOWN, self.row]

    def append(self, token: int) -> None:
        """Append a sampled token that is not pending any more."""
        self.tokens.append(token)
        cells, row = self.table.cells, self.row
        cells[KNOWN, row] += 1
        cells[EXTRA, row] += 1

    def flush(self) -> None:
        """Move the newest tokens from the table to the array."""
        begin, end = len(self._tokens), self.table.cells[KNOWN, self.row]
        if begin < end:
            self._tokens.frombytes(self.table.tail(self.row, begin, end))

    def retire(self) -> None:
        """Give up the row of an ended request, to which no step in flight refers. Its counts mean nothing then."""
        self.flush()
        self.table.remove(self.row)
        self.row = UNUSED_ROW

    # -------------------------------------------------------------- written by the scheduler

    @property
    def computed(self) -> int:
        """Number of its KV entries, if every draft token in flight is accepted."""
        return self.table.cells[COMPUTED, self.row]

    @computed.setter
    def computed(self, value: int) -> None:
        cells, row = self.table.cells, self.row
        cells[EXTRA, row] += cells[COMPUTED, row] - value
        cells[COMPUTED, row] = value

    @property
    def pending(self) -> int:
        """Number of tokens that steps in flight will append, if every draft token is accepted."""
        cells, row = self.table.cells, self.row
        return cells[EXTRA, row] + 1 + cells[COMPUTED, row] - cells[KNOWN, row]

    @pending.setter
    def pending(self, value: int) -> None:
        cells, row = self.table.cells, self.row
        cells[EXTRA, row] = cells[KNOWN, row] + value - cells[COMPUTED, row] - 1

    @property
    def slot(self) -> int:
        """Its slot, or -1."""
        return self.table.cells[SLOT, self.row]

    @slot.setter
    def slot(self, value: int) -> None:
        self.table.cells[SLOT, self.row] = value

    @property
    def last_step(self) -> int:
        """The last step that admitted this request or had a row of it, or -1."""
        return self.table.cells[LAST_STEP, self.row]

    @last_step.setter
    def last_step(self, value: int) -> None:
        self.table.cells[LAST_STEP, self.row] = value

    @property
    def room(self) -> int:
        """Number of tokens for which it holds blocks; written by `Blocks`."""
        return self.table.cells[ROOM, self.row]

    @room.setter
    def room(self, value: int) -> None:
        self.table.cells[ROOM, self.row] = value

    @property
    def full_at(self) -> int:
        """Value of `computed` at which its next block is full; written by `Blocks`."""
        return self.table.cells[FULL_AT, self.row]

    @full_at.setter
    def full_at(self, value: int) -> None:
        self.table.cells[FULL_AT, self.row] = value

    @property
    def drafts(self) -> int:
        """Draft tokens to verify in the next step, 0 without speculation; written by the choice of depth."""
        return self.table.cells[DRAFTS, self.row]

    @drafts.setter
    def drafts(self, value: int) -> None:
        self.table.cells[DRAFTS, self.row] = value

    @property
    def paused(self) -> bool:
        """Whether it gets no row, because its next mask is still being computed."""
        return bool(self.table.cells[PAUSED, self.row])

    @paused.setter
    def paused(self, value: bool) -> None:
        self.table.cells[PAUSED, self.row] = value

    @property
    def catching_up(self) -> bool:
        """Whether no step since its admission has computed all known tokens."""
        return bool(self.table.cells[CATCHING_UP, self.row])

    @catching_up.setter
    def catching_up(self, value: bool) -> None:
        self.table.cells[CATCHING_UP, self.row] = value

    @property
    def may_draft(self) -> bool:
        """Whether its rows may verify draft tokens: the masks of its grammar, if it has one, are quick enough."""
        return not self.table.cells[NO_DRAFTS, self.row]

    @may_draft.setter
    def may_draft(self, value: bool) -> None:
        self.table.cells[NO_DRAFTS, self.row] = not value

    def end(self) -> None:
        """Note that the request has ended. Its row stays until no step in flight refers to it."""
        self.table.cells[VISIT_AT, self.row] = 0
        if not self.pending:
            self.retire()
