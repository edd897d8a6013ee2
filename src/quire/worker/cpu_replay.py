"""Steps on a CPU that are one call: what CUDA graphs are to a GPU.

In a step of few rows with one token each the model is nothing but kernels of step.c. The first such step of a number
of rows is run on static buffers while its kernels are noted; later ones copy their batch into the buffers and
make the same calls from C. A Python call between two products takes some 30 us, for the weights have just driven
the interpreter out of the caches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from quire.attention.base import ForwardBatch
from quire.kernels.cpu.ops import CpuKernels
from quire.models.decoder import Model
from quire.quant.packed import FEW_ROWS
from quire.types import StepPlan
from quire.worker.batch import Batcher
from quire.worker.graphs import Eager, LaunchedStep, Threads
from quire.worker.staging import Staging

# Functions of torch that compute nothing (contiguous: unless it copies). __get__: attributes, such as shape.
_HARMLESS = {
    "__get__", "contiguous", "data_ptr", "empty_like", "new_empty", "numel", "stride", "view",
}  # fmt: skip
_COPIED = (
    "input_ids",
    "positions",
    "kv_slots",
    "seq_lens",
    "slots",
)  # what kernels read, besides the block table


@dataclass(slots=True)
class _CapturedStep:
    batch: ForwardBatch  # static
    logits: torch.Tensor
    again: Callable[[], None]


class CpuReplay:
    """Replays what it can; `eager` runs the rest."""

    def __init__(
        self,
        eager: Eager,
        model: Model,
        batcher: Batcher,
        kernels: CpuKernels,
        threads: Threads,
    ) -> None:
        self._eager, self._model, self._batcher = eager, model, batcher
        self._kernels, self._threads = kernels, threads
        self._recordings: dict[int, _CapturedStep] = {}  # by rows
        self._computes_in_torch = False  # some of the model is not kernels, so it cannot be recorded

    def launch(self, plan: StepPlan, staging: Staging) -> LaunchedStep:
        rows = len(plan.slots)
        if (
            self._computes_in_torch
            or self._kernels.span  # a profiler wants to see them
            or not 0 < plan.total_tokens == rows <= FEW_ROWS  # more are multiplied by oneDNN
            or not plan.samples.all()
            or plan.keeps_hidden
        ):
            return self._eager.launch(plan, staging)
        self._threads.use_for(rows)
        step, batch = self._batcher.build(plan, staging)
        recording = self._recordings.get(rows)
        if recording is None:
            return LaunchedStep(step, self._record(rows, batch))
        _copy(batch, recording.batch)
        recording.again()
        return LaunchedStep(step, recording.logits)

    def warm_up(self, staging: Staging) -> bool:
        return False

    def drop_graphs(self) -> None:
        self._recordings.clear()

    def _record(self, rows: int, batch: ForwardBatch) -> torch.Tensor:
        """Run the step, and keep its calls if they are all there is to it."""
        fixed = self._static(batch)
        with _Operators() as operators:
            logits, again = self._kernels.capture(lambda: self._model.logits(self._model(fixed)))
        self._computes_in_torch = bool(operators.names)
        if not self._computes_in_torch:
            self._recordings[rows] = _CapturedStep(fixed, logits, again)
        return logits

    @staticmethod
    def _static(batch: ForwardBatch) -> ForwardBatch:
        """Return the same batch in memory of its own."""
        return replace(batch, **{name: getattr(batch, name).clone() for name in _COPIED})


def _copy(batch: ForwardBatch, to: ForwardBatch) -> None:
    for name in _COPIED:
        getattr(to, name).copy_(getattr(batch, name))


class _Operators(TorchFunctionMode):
    """The names of what is called of torch within, if it computes anything."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.__name__
        if name not in _HARMLESS or (name == "contiguous" and result is not args[0]):
            self.names.add(name)
        return result
