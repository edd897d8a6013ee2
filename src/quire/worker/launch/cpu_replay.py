"""Replay of the model and the head of small steps on a CPU, as CUDA graphs do on a GPU.

In a step of few rows with one token each, these two stages consist only of kernels of step.c. For each number of rows,
the first such step runs on static buffers while its kernel calls are captured. Later steps copy their batch into these
buffers and make the same calls from C. Without this, a Python call between two products takes some 30 us, because the
weights have just evicted the interpreter from the caches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from quire.attention.base import ForwardBatch
from quire.kernels.cpu.ops import CpuKernels
from quire.quant.c_matmul import FEW_ROWS
from quire.types import StepPlan
from quire.worker.launch.launcher import Eager
from quire.worker.staging import Staging
from quire.worker.step.batch import DeviceStep
from quire.worker.step.stage_functions import StageFunctions
from quire.worker.step.step_stages import NO_STAGES, StepStage

# Functions of torch that compute nothing (contiguous: unless it copies). __get__ reads attributes, such as shape.
_HARMLESS = {
    "__get__", "contiguous", "data_ptr", "empty_like", "new_empty", "numel", "stride", "view",
}  # fmt: skip
# Fields of a batch that kernels read, besides the block table. Groups of layers differ in their kv_slots.
_COPIED = ("input_ids", "positions", "kv_slots", "seq_lens", "slots")
_COPIED_STATES = ("query_start", "state_rows", "fresh")  # fields that layers with a state also read


@dataclass(slots=True)
class CapturedStep:
    """Kernel calls of the stages MODEL and HEAD, and the buffers that they read and write."""

    batch: ForwardBatch  # in static buffers
    logits: torch.Tensor
    replay: Callable[[], None]


class CpuReplay:
    """Launcher that replays captured steps of up to `FEW_ROWS` rows with one token each. `eager` opens all steps."""

    def __init__(self, eager: Eager, stages: StageFunctions, kernels: CpuKernels) -> None:
        self._eager, self._stages, self._kernels = eager, stages, kernels
        self.captured: dict[int, CapturedStep] = {}  # by rows
        self._computes_in_torch = False  # part of the model is not a kernel, so the model cannot be captured

    @property
    def can_capture(self) -> bool:
        """Return True until a step turns out to compute something in torch."""
        return not self._computes_in_torch

    def launch(self, plan: StepPlan, staging: Staging) -> DeviceStep:
        step = self._eager.launch(plan, staging)
        if not self._fits(plan):
            return step
        self._stages.run(step, StepStage.PREPARE)
        if captured := self.captured.get(step.rows):
            _copy(step.batch, captured.batch)
            captured.replay()
            step.done, step.logits = StepStage.HEAD, captured.logits
        else:
            self._capture(step)
        return step

    def _fits(self, plan: StepPlan) -> bool:
        return (
            self.can_capture
            and not self._kernels.span  # a profiler times each kernel
            and 0 < plan.total_tokens == len(plan.slots) <= FEW_ROWS  # other kernels multiply more rows
            and bool(plan.samples.all())
            and self._stages.prefix(plan) != NO_STAGES
        )

    def warm_up(self, staging: Staging) -> bool:
        return False

    def drop_graphs(self) -> None:
        self.captured.clear()

    def capture_common(self) -> None:
        pass

    def run_common(self, most: int | None = None) -> None:
        pass

    def _capture(self, step: DeviceStep) -> None:
        """Run a step up to its logits. Keep the kernel calls if they are all that it computes."""
        step.batch = _clone(step.batch)
        with _TorchOperators() as operators:
            _, replay = self._kernels.capture(lambda: self._stages.run(step, StepStage.HEAD))
        self._computes_in_torch = bool(operators.names)
        if not self._computes_in_torch:
            self.captured[step.rows] = CapturedStep(step.batch, step.logits, replay)


def _clone(batch: ForwardBatch) -> ForwardBatch:
    clone = replace(batch, others=[], **{name: getattr(batch, name).clone() for name in _fields(batch)})
    for other in batch.others:
        clone.add_group(other.block_table, other.kv_slots.clone())
        clone.others[-1].attn = other.attn
    return clone


def _copy(batch: ForwardBatch, to: ForwardBatch) -> None:
    for name in _fields(batch):
        getattr(to, name).copy_(getattr(batch, name))
    for other, to_other in zip(batch.others, to.others):
        to_other.kv_slots.copy_(other.kv_slots)


def _fields(batch: ForwardBatch) -> tuple[str, ...]:
    return _COPIED + _COPIED_STATES if batch.states else _COPIED


class _TorchOperators(TorchFunctionMode):
    """Context that collects the names of the torch functions called in it that compute anything."""

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
