"""Both ends of a step: the ragged batch that the model reads, and the update of the slot columns with its tokens.

Input ids, positions and KV addresses are computed on the device from the slot columns, so the host never needs a token
to build the next step. `KernelBatcher` fills static buffers with one kernel that reads only a small header from the
host, so that graphs can replay it. `TorchBatcher` does the same with PyTorch operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
import torch

from quire.attention.base import KV, AttentionBackend, ForwardBatch
from quire.types import StepPlan
from quire.worker.staging import Staging
from quire.worker.state import SlotState


class HeaderColumn(IntEnum):
    """Columns of the batch header, int32 [rows, 4]. The kernels of kernels/batch.py use the same numbers."""

    SLOT = 0
    NEW_TOKENS = 1
    SAMPLES = 2  # 1 if the row samples a token, else 0
    SHARED_TOKENS = 3  # tokens in blocks that the row shares with other rows


@dataclass(slots=True)
class DeviceStep:
    """A plan whose indices are on the device."""

    plan: StepPlan
    slots: torch.Tensor  # int64 [rows]
    # int32 [rows], pinned: the sampled tokens arrive here if the last kernel of the step writes them to the host.
    tokens_host: torch.Tensor | None = None
    # Only from TorchBatcher:
    counts: torch.Tensor | None = None  # int64 [rows]: new tokens of each row
    sampling: torch.Tensor | None = None  # int64 [sampling rows]: indices of these rows


class Batcher(Protocol):
    """Builder of batches that also writes sampled tokens back to the slot columns."""

    def build(self, plan: StepPlan, staging: Staging) -> tuple[DeviceStep, ForwardBatch]:
        """Return the step and the batch of `plan`, on the device."""
        ...

    def advance(self, step: DeviceStep, tokens: torch.Tensor) -> None:
        """Update the slot columns after the model has run: count KV entries, append sampled tokens.

        Args:
            tokens: int32 [rows]; only those of sampling rows are appended.
        """
        ...

    def recover(self) -> None:
        """Restore a consistent state of host and device after a step failed half-way."""
        ...


def plan_header(plan: StepPlan | None) -> np.ndarray:
    """Return the batch header of a plan, int32 [rows, 4], with the columns of `HeaderColumn`. None has no rows."""
    header = np.empty((0 if plan is None else len(plan.slots), len(HeaderColumn)), np.int32)
    if plan is not None:
        header[:, HeaderColumn.SLOT] = plan.slots
        header[:, HeaderColumn.NEW_TOKENS] = plan.num_tokens
        header[:, HeaderColumn.SAMPLES] = plan.samples
        header[:, HeaderColumn.SHARED_TOKENS] = 0 if plan.shared is None else plan.shared
    return header


class TorchBatcher:
    """Batcher of about ten small PyTorch operations. The host computes the indices."""

    def __init__(
        self,
        state: SlotState,
        backend: AttentionBackend,
        kv: list[KV],
        block_size: int,
        group_of: Sequence[int] = (),
    ) -> None:
        """Build batches over the blocks `kv`; `group_of` is the group of each layer, if there are several."""
        self.kv, self._state, self._backend, self._block_size = kv, state, backend, block_size
        self._group_of = group_of

    def build(self, plan: StepPlan, staging: Staging) -> tuple[DeviceStep, ForwardBatch]:
        state, total, rows = self._state, plan.total_tokens, len(plan.slots)
        ends = np.cumsum(plan.num_tokens)
        firsts = ends - plan.num_tokens
        row_of_token = np.repeat(np.arange(rows), plan.num_tokens)
        slots, counts, starts, slot_of_token, offset, logit_index, sampling = staging.send(
            plan.slots,
            plan.num_tokens,
            np.append(firsts, total),
            plan.slots[row_of_token],
            np.arange(total) - firsts[row_of_token],
            ends - 1,
            np.flatnonzero(plan.samples),
        )
        positions = state.num_computed.index_select(0, slot_of_token) + offset
        block, within = positions // self._block_size, positions % self._block_size
        entry = slot_of_token * state.table_row + block

        def kv_slots(group: int) -> torch.Tensor:
            blocks = state.table_entries.index_select(0, entry + group * state.max_blocks)
            return blocks.long() * self._block_size + within

        batch = ForwardBatch(
            input_ids=state.tokens.view(-1).index_select(0, slot_of_token * state.max_len + positions).long(),
            positions=positions,
            kv_slots=kv_slots(0),
            query_start=starts.int(),
            seq_lens=state.num_computed.index_select(0, slots) + counts.int(),
            block_table=state.block_tables[0],
            slots=slots,
            logit_index=logit_index,
            kv=self.kv,
            num_tokens=plan.num_tokens,
            seq_bounds=plan.starts + plan.num_tokens,
            block_size=self._block_size,
            wanted=None if plan.keeps_hidden or rows == total else logit_index,
            group_of=self._group_of,
        )
        for group, table in enumerate(state.block_tables[1:], 1):
            batch.add_group(table, kv_slots(group))
        batch.plan(self._backend)
        return DeviceStep(plan, slots, counts=counts, sampling=sampling), batch

    def recover(self) -> None:
        pass

    def advance(self, step: DeviceStep, tokens: torch.Tensor) -> None:
        state, slots = self._state, step.slots
        assert step.counts is not None and step.sampling is not None
        if state.keeps_kv:
            state.num_computed.index_add_(0, slots, step.counts.int())
        if not step.plan.samples.all():
            slots, tokens = slots.index_select(0, step.sampling), tokens.index_select(0, step.sampling)
        lengths = state.num_tokens.index_select(0, slots)
        # A negative token tells the host of a failure; a step in flight still reads this column, so it needs an id.
        state.tokens.view(-1).index_copy_(0, slots * state.max_len + lengths, tokens.clamp(min=0))
        state.num_tokens.index_copy_(0, slots, lengths + 1)


class KernelBatcher:
    """Batcher of one kernel at each end of a step (kernels/batch.py), with static buffers.

    Sampled tokens go to a ring of pinned rows, one for each step in flight and one more. A row is written again only
    after its step has been retired.
    """

    def __init__(
        self,
        state: SlotState,
        backend: AttentionBackend,
        kv: list[KV],
        *,
        block_size: int,
        group_of: Sequence[int] = (),
        max_tokens: int,
        max_rows: int,
        turns: int,
        device: torch.device,
    ) -> None:
        """Allocate buffers for `max_tokens` tokens in `max_rows` rows, and a ring of `turns` rows.

        `group_of` is the group of each layer, if there are several.
        """
        # Imported here: an installation for CPUs has no Triton.
        from quire.kernels import batch as kernels

        def buffer(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._kernels = kernels
        self.kv, self._state, self._backend, self._block_size = kv, state, backend, block_size
        self._header = buffer(max_rows, len(HeaderColumn), dtype=torch.int32)
        self._sent = b""  # content of the header on the device
        self._group_of = group_of
        self._input_ids, self._positions = (buffer(max_tokens) for _ in range(2))
        self._kv_slots = buffer(len(state.block_tables), max_tokens)
        self._logit_index, self._slots = (buffer(max_rows) for _ in range(2))
        self._query_start = buffer(max_rows + 1, dtype=torch.int32)
        self._seq_lens = buffer(max_rows, dtype=torch.int32)
        self._turn = buffer(1, dtype=torch.int32)
        self._turn_host = 0
        self._ring = torch.zeros(turns, max_rows, dtype=torch.int32, pin_memory=device.type == "cuda")

    def build(self, plan: StepPlan, staging: Staging) -> tuple[DeviceStep, ForwardBatch]:
        rows = len(plan.slots)
        self.load(plan_header(plan), staging, rows)
        bounds = plan.starts + plan.num_tokens
        shares = plan.shared is not None
        batch = self._batch(rows, plan.total_tokens, plan.num_tokens, bounds, shares)
        if plan.keeps_hidden:
            batch.wanted = None
        return self.step(plan), batch

    def bounded(self, rows: int, tokens: int, shares: bool) -> ForwardBatch:
        """Return a batch that serves every header of its shape, for capture: nothing in it depends on the host.

        Args:
            rows: rows of the header, padding included.
            tokens: most tokens of all rows together; if equal to `rows`, each row has one token.
            shares: rows may share blocks.
        """
        state = self._state
        counts = np.ones(rows, np.int32) if rows == tokens else None
        bounds = np.full(rows, state.max_len, np.int32)
        return self._batch(rows, tokens, counts, bounds, shares)

    def load(self, content: np.ndarray, staging: Staging, rows: int, one_each: bool = False) -> None:
        """Send the header of a step, unless the device already has it, as in most steps of steady decoding.

        Args:
            content: int32 [real rows, 4].
            rows: rows after padding with the dummy slot.
            one_each: each row has one token, padding rows too; otherwise padding rows have none.
        """
        header = np.empty((rows, len(HeaderColumn)), np.int32)
        padding = header[len(content) :]
        header[: len(content)], padding[:] = content, 0
        padding[:, HeaderColumn.SLOT] = self._state.dummy
        padding[:, HeaderColumn.NEW_TOKENS] = one_each
        if (content_bytes := header.tobytes()) != self._sent:
            staging.send_into(self._header[:rows], header)
            self._sent = content_bytes
        self._turn_host = (self._turn_host + 1) % self._ring.shape[0]

    def _batch(
        self,
        rows: int,
        tokens: int,
        counts: np.ndarray | None,
        bounds: np.ndarray,
        shares: bool,
    ) -> ForwardBatch:
        state = self._state
        slots = self._slots[:rows]
        batch = ForwardBatch(
            input_ids=self._input_ids[:tokens],
            positions=self._positions[:tokens],
            kv_slots=self._kv_slots[0, :tokens],
            query_start=self._query_start[: rows + 1],
            seq_lens=self._seq_lens[:rows],
            block_table=state.block_tables[0],
            slots=slots,
            logit_index=self._logit_index[:rows],
            kv=self.kv,
            num_tokens=counts,
            seq_bounds=bounds,
            block_size=self._block_size,
            wanted=None if rows == tokens else self._logit_index[:rows],
            shared=self._header[:rows, HeaderColumn.SHARED_TOKENS] if shares else None,
            group_of=self._group_of,
        )
        for table, kv_slots in zip(state.block_tables[1:], self._kv_slots[1:]):
            batch.add_group(table, kv_slots[:tokens])
        self._kernels.prepare(
            self._header, rows, tokens, rows == tokens, state.tokens, state.num_computed, state.block_tables,
            self._block_size, self._turn, self._ring.shape[0], batch.input_ids, batch.positions,
            self._kv_slots, batch.query_start, batch.seq_lens, batch.logit_index, slots,
        )  # fmt: skip
        batch.plan(self._backend)
        return batch

    def slots(self, rows: int) -> torch.Tensor:
        """Return the slots of the header's first `rows` rows, int64 [rows]."""
        return self._slots[:rows]

    def step(self, plan: StepPlan) -> DeviceStep:
        """Return the step of `plan`, whose header has been loaded."""
        rows = len(plan.slots)
        return DeviceStep(plan, self._slots[:rows], self._ring[self._turn_host, :rows])

    def recover(self) -> None:
        self._turn.fill_(self._turn_host)
        self._sent = b""

    def advance(self, step: DeviceStep, tokens: torch.Tensor) -> None:
        self.advance_rows(len(step.plan.slots), tokens)

    def advance_rows(self, rows: int, tokens: torch.Tensor) -> None:
        """Do the same as `advance` for the header's first `rows` rows."""
        state = self._state
        self._kernels.advance(
            self._header, rows, tokens, state.tokens, state.num_tokens, state.num_computed,
            self._turn, self._ring, state.dummy, state.keeps_kv,
        )  # fmt: skip
