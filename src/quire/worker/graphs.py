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


class Eager:
    def __init__(self, model: Model) -> None:
        self._model = model

    def shape_for(self, plan: StepPlan) -> tuple[int, int]:
        return len(plan.slots), plan.total_tokens

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        return self._model(batch)
