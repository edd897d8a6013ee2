"""Both ends of a step: the ragged batch that the model reads, and the update of the slot columns with its tokens.

Input ids, positions and KV addresses are computed on the device from the slot columns, so the host never needs a token
to build the next step. `KernelBatcher` (kernel_batch.py) fills static buffers with one kernel that reads only a small
header from the host, so that graphs can replay it. `TorchBatcher` (torch_batch.py) does the same with PyTorch
operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Protocol

import torch

from quire.attention.base import KV, AttentionBackend, ForwardBatch
from quire.sampling.columns import LogitRows
from quire.sampling.logprobs import Logprobs
from quire.speculation.drafter import Drafter, NoDrafter
from quire.types import StepPlan, TokenMasks
from quire.worker.memory.states import NO_STATES, StateMemory
from quire.worker.staging import Staging
from quire.worker.state import SlotState
from quire.worker.step.step_shapes import StepShape
from quire.worker.step.step_stages import StepStage


class FirstEntries(dict[int, torch.Tensor]):
    """Views of the first entries of a tensor, by their number. Each is made once: that takes longer than to look it up."""

    def __init__(self, whole: torch.Tensor) -> None:
        super().__init__()
        self.whole = whole

    def __missing__(self, count: int) -> torch.Tensor:
        view = self[count] = self.whole[:count]
        return view


class SameObjects:
    """A memory of some objects, to recognise that the same ones come again. Only objects that are never modified fit."""

    def __init__(self) -> None:
        self._objects: tuple[object, ...] = ()

    def come_again(self, *objects: object) -> bool:
        """Return whether these are the objects of the last call."""
        known, self._objects = self._objects, objects
        return len(known) == len(objects) and all(map(is_, known, objects))

    def forget(self) -> None:
        """Recognise nothing in the next call."""
        self._objects = ()


@dataclass(frozen=True, slots=True)
class BatchParts:
    """What batches refer to: slot columns, KV blocks and states, and who reads them."""

    state: SlotState
    backend: AttentionBackend
    kv: list[KV]  # the blocks of each layer
    block_size: int
    group_of: Sequence[int] = ()  # the group of each layer, if there are several
    drafter: Drafter = field(default_factory=NoDrafter)
    states: StateMemory = NO_STATES


@dataclass(slots=True)
class DeviceStep:
    """A step on the device, and what its stages have computed so far.

    A step of a plan has exactly the rows of the plan. A step of a shape has padding too, and the host knows nothing
    else of it.
    """

    plan: StepPlan | None
    rows: int
    max_drafts: int  # of a row
    slots: torch.Tensor  # int64 [rows]
    shape: StepShape | None = None
    done: StepStage = StepStage.OPEN
    masks: TokenMasks | None = None  # tokens allowed by structured output
    batch: ForwardBatch = field(init=False)  # from PREPARE on
    logit_rows: LogitRows = field(init=False)  # from PREPARE on
    hidden: torch.Tensor | None = (
        None  # [tokens, hidden], from MODEL on; dropped in HEAD unless the plan keeps it
    )
    logits: torch.Tensor = field(init=False)  # [logit rows, vocab], from HEAD on
    sampled: torch.Tensor = field(init=False)  # int32 [logit rows], from SAMPLE on
    logprobs: Logprobs | None = None  # from SAMPLE on, if a row requests any
    # int32 [rows, 1 + max_drafts], from COMMIT on: the appended tokens, and REJECTED behind them. Undefined for rows
    # that do not sample. Valid on the host when the step has ended.
    tokens: torch.Tensor = field(init=False)


class Batcher(Protocol):
    """Builder of batches that also writes sampled tokens back to the slot columns."""

    parts: BatchParts

    def open(self, plan: StepPlan, staging: Staging) -> DeviceStep:
        """Send the indices of `plan` to the device, and return its step."""
        ...

    def prepare(self, step: DeviceStep) -> None:
        """Compute the batch of an open step on the device."""
        ...

    def advance(self, step: DeviceStep, tokens: torch.Tensor) -> torch.Tensor:
        """Update the slot columns after the model has run: count KV entries, append sampled tokens.

        Of a row with draft tokens, the tokens up to the first one that differs from its draft are appended, and the
        KV entries of the rejected drafts are not counted.

        Args:
            tokens: int32 [logit rows]; only those of sampling rows are appended.

        Returns:
            int32 [rows, 1 + most drafts]: see `DeviceStep.tokens`.
        """
        ...

    def count(self, step: DeviceStep) -> None:
        """Count the KV entries of a step whose tokens are sampled in a later stage of the pipeline."""
        ...

    def on_device(self, step: DeviceStep) -> torch.Tensor:
        """Return the tokens of the newest step on the device, in stream order."""
        ...

    def recover(self) -> None:
        """Restore a consistent state of host and device after a step failed half-way."""
        ...
