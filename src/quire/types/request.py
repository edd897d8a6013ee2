"""The scheduler's own record of a request. It has one writer, the scheduler."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Literal

from quire.types.engine_io import EngineRequest, Timing
from quire.types.sampling import SamplingParams

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
    paused: bool = False  # its next mask is being computed, so it gets no row
    dropped_step: int = -1  # the last step whose token for this request is not used
    last_step: int = -1  # last step that held a row of this request, or admitted it
    cached: int = -1  # tokens found in the prefix cache on first admission; -1 before it
    scored: int = 1  # next prompt position whose log-probability is still to be delivered
    preemptions: int = 0
    charged: int = 0  # tokens booked to its client so far, cached ones included
    admitted_known: int = 0  # `known` when it was last admitted
    catching_up: bool = True  # since its admission no step has computed all that is known of it
    waits_mark_s: dict[str, float] = field(default_factory=dict)  # the clocks when it began to wait
    prompt_mark_s: float = 0.0  # the clock of steps with prompts when it was admitted
    own_s: float = 0.0  # of these steps, its share since then

    @property
    def known(self) -> int:
        return len(self.tokens)
