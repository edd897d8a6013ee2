"""How a step is launched: batch building, model and logits, eagerly or as one replay of a CUDA graph.

A step in which every row runs one token and samples needs nothing from the host but its slots, so it can be
captured once for a number of rows and replayed: the graph reads the slots from a static buffer and derives
everything else from the columns. Fewer rows are padded with the dummy slot. All other steps run eagerly.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from quire.attention.base import ForwardBatch
from quire.models.decoder import Model
from quire.types import StepPlan
from quire.worker.batch import BatchBuilder, Step
from quire.worker.staging import Staging
from quire.worker.state import SlotState


@dataclass(slots=True)
class Launched:
    """A step under way on the device."""

    step: Step
    hidden: torch.Tensor  # [tokens, hidden]
    logits: torch.Tensor  # [sampling rows, vocab]
    greedy: torch.cuda.CUDAGraph | None = (
        None  # replaying it takes the most likely tokens and advances the columns
    )
    tokens: torch.Tensor | None = None  # int32 [sampling rows]: where `greedy` leaves them


class Launcher(Protocol):
    def launch(self, plan: StepPlan, staging: Staging) -> Launched: ...


class Threads:
    """How many CPU threads a step is worth.

    The layers of a small step take microseconds: waking more threads for each of them gains nothing, and
    loses much when another process has their core. So steps below `_SMALL` multiply-adds run on one.
    """

    _SMALL = 64_000_000

    def __init__(self, num_parameters: int, asked: int | None) -> None:
        self._num_parameters = num_parameters
        self._most = asked or _ALL_THREADS
        self._least = asked or 1

    def use_for(self, tokens: int) -> None:
        torch.set_num_threads(self._most if tokens * self._num_parameters >= self._SMALL else self._least)


_ALL_THREADS = torch.get_num_threads()  # before any step has changed it


class Eager:
    """One launch per operation. `threads` is for the CPU."""

    def __init__(self, model: Model, builder: BatchBuilder, threads: Threads | None = None) -> None:
        self._model, self._builder, self._threads = model, builder, threads

    def launch(self, plan: StepPlan, staging: Staging) -> Launched:
        if self._threads:
            self._threads.use_for(plan.total_tokens)
        step = self._builder.build(plan, staging)
        hidden = self._model(step.batch)
        return Launched(step, hidden, self._model.logits(hidden.index_select(0, step.batch.logit_index)))


@dataclass(slots=True)
class _Captured:
    """The graphs of one padded number of rows, and where they leave their results."""

    forward: torch.cuda.CUDAGraph
    greedy: torch.cuda.CUDAGraph
    batch: ForwardBatch
    hidden: torch.Tensor
    tokens: torch.Tensor


class CudaGraphs:
    """Replays steps of single tokens; `eager` runs the rest. Captures when a size first occurs."""

    def __init__(
        self,
        eager: Eager,
        model: Model,
        builder: BatchBuilder,
        state: SlotState,
        max_rows: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._eager, self._model, self._builder, self._state = eager, model, builder, state
        self._sizes = graph_sizes(max_rows)
        self._slots = torch.full((max_rows,), state.dummy, dtype=torch.int64, device=device)
        self._ones = torch.ones(max_rows, dtype=torch.int32, device=device)
        self._captured: dict[int, _Captured] = {}
        # One buffer of logits for all sizes: kept per size, they would add up to gigabytes.
        self._logits = torch.empty(max_rows, model.spec.vocab_size, dtype=dtype, device=device)
        self._pool = torch.cuda.graph_pool_handle()

    def launch(self, plan: StepPlan, staging: Staging) -> Launched:
        rows = len(plan.slots)
        if plan.total_tokens != rows or not plan.samples.all() or plan.score_rows:
            return self._eager.launch(plan, staging)
        size = self._sizes[bisect.bisect_left(self._sizes, rows)]
        found = self._captured.get(size) or self._capture(size)
        slots = np.full(size, self._state.dummy, np.int64)
        slots[:rows] = plan.slots
        self._slots[:size].copy_(staging.send(slots)[0])
        found.forward.replay()
        step = Step(plan, found.batch, self._slots[:rows], self._ones[:rows], self._slots[:rows], plan.slots)
        return Launched(step, found.hidden, self._logits[:rows], found.greedy, found.tokens[:rows])

    def _capture(self, size: int) -> _Captured:
        """Record the step for `size` rows, first running it on dummy rows so that kernels are compiled."""
        slots, ones, logits = self._slots[:size], self._ones[:size], self._logits[:size]
        slots.fill_(self._state.dummy)

        def forward() -> tuple[ForwardBatch, torch.Tensor]:
            batch = self._builder.build_single(slots)
            hidden = self._model(batch)
            logits.copy_(self._model.logits(hidden))
            return batch, hidden

        def greedy() -> torch.Tensor:
            tokens = logits.argmax(1).int()
            self._state.advance(slots, ones, slots, tokens)
            self._state.reset_dummy()
            return tokens

        forward()
        greedy()
        torch.cuda.synchronize()
        first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(first, pool=self._pool):
            batch, hidden = forward()
        with torch.cuda.graph(second, pool=self._pool):
            tokens = greedy()
        found = self._captured[size] = _Captured(first, second, batch, hidden, tokens)
        return found


def graph_sizes(max_rows: int) -> list[int]:
    """Numbers of rows that are captured: fine steps where few rows make a step cheap."""
    sizes = {1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), *range(544, 4097, 32)}
    return sorted(size for size in sizes if size < max_rows) + [max_rows]
