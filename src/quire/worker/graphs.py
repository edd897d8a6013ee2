"""How a step's forward pass is launched. `Eager` calls the model; a graph runner replays a capture of it
for the batch's shape (the batch's tensors are views into static buffers for that purpose)."""

from __future__ import annotations

from typing import Protocol

import torch

from quire.attention.base import ForwardBatch
from quire.models.decoder import Model
from quire.types import StepPlan


class GraphRunner(Protocol):
    def shape_for(self, plan: StepPlan) -> tuple[int, int]:
        """(rows, tokens) to which the batch is padded."""
        ...

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states [tokens, hidden]."""
        ...


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
    def __init__(self, model: Model, threads: Threads | None = None) -> None:
        self._model, self._threads = model, threads

    def shape_for(self, plan: StepPlan) -> tuple[int, int]:
        return len(plan.slots), plan.total_tokens

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        if self._threads:
            self._threads.use_for(batch.input_ids.shape[0])
        return self._model(batch)
