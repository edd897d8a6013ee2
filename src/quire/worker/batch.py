"""Both ends of a step: from a plan to the ragged batch that a model reads, and from tokens to the columns.

Input ids, positions and KV addresses are derived on the device from the slot columns, so the host never
needs a token to build the next step. `KernelBatcher` writes static buffers with one kernel that takes
nothing from the host but a small header, so that graphs can replay it; `TorchBatcher` is its plain twin.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from quire.attention.base import KV, AttentionBackend, ForwardBatch
from quire.types import StepPlan
from quire.worker.staging import Staging
from quire.worker.state import SlotState


@dataclass(slots=True)
class DeviceStep:
    """A plan on the device. `tokens_host` is where its tokens will be, if the device writes them home."""

    plan: StepPlan
    slots: torch.Tensor  # int64 [rows]
    tokens_host: torch.Tensor | None = None  # int32 [rows], pinned
    # Where the host sends indices: int64 [rows], new tokens of each; int64 [sampling rows], which sample.
    counts: torch.Tensor | None = None
    sampling: torch.Tensor | None = None


class Batcher(Protocol):
    def build(self, plan: StepPlan, staging: Staging) -> tuple[DeviceStep, ForwardBatch]: ...

    def advance(self, step: DeviceStep, tokens: torch.Tensor) -> None:
        """The step's KV is written, and each sampling row has one more token, from `tokens` int32 [rows]."""
        ...

    def recover(self) -> None:
        """A step failed after some of its work was launched: agree with the device again."""
        ...


def plan_header(plan: StepPlan | None) -> np.ndarray:
    """int32 [rows, 4] of a plan: slot, new tokens, whether the row samples, shared tokens. None: no rows."""
    if plan is None:
        return np.empty((0, 4), np.int32)
    shared = np.zeros_like(plan.slots) if plan.shared is None else plan.shared
    return np.stack((plan.slots, plan.num_tokens, plan.samples, shared), 1, dtype=np.int32, casting="unsafe")


class TorchBatcher:
    """Some ten small operations; the host computes the indices."""

    def __init__(self, state: SlotState, backend: AttentionBackend, kv: list[KV], block_size: int) -> None:
        self._state, self._backend, self._kv, self._block_size = state, backend, kv, block_size

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
        blocks = state.block_table.view(-1).index_select(0, slot_of_token * state.max_blocks + block)
        batch = ForwardBatch(
            input_ids=state.tokens.view(-1).index_select(0, slot_of_token * state.max_len + positions).long(),
            positions=positions,
            kv_slots=blocks.long() * self._block_size + within,
            query_start=starts.int(),
            seq_lens=state.num_computed.index_select(0, slots) + counts.int(),
            block_table=state.block_table,
            slots=slots,
            logit_index=logit_index,
            kv=self._kv,
            num_tokens=plan.num_tokens,
            seq_bounds=plan.starts + plan.num_tokens,
            block_size=self._block_size,
            wanted=None if plan.keeps_hidden or rows == total else logit_index,
        )
        batch.attn = self._backend.plan(batch)
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
        # A failure is told to the host; a step in flight reads a token all the same.
        state.tokens.view(-1).index_copy_(0, slots * state.max_len + lengths, tokens.clamp(min=0))
        state.num_tokens.index_copy_(0, slots, lengths + 1)


class KernelBatcher:
    """One kernel at each end (kernels/batch.py), on static buffers for `max_tokens` tokens of `max_rows` rows.

    Tokens are written into `turns` rows of pinned memory, in turn: a row is written again only when its
    step has been retired.
    """

    def __init__(
        self,
        state: SlotState,
        backend: AttentionBackend,
        kv: list[KV],
        block_size: int,
        max_tokens: int,
        max_rows: int,
        turns: int,
        device: torch.device,
    ) -> None:
        # Imported here: an installation for CPUs has no Triton.
        from quire.kernels import batch as kernels

        def buffer(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._kernels = kernels
        self._state, self._backend, self._kv, self._block_size = state, backend, kv, block_size
        self._header = buffer(max_rows, 4, dtype=torch.int32)  # slot, new tokens, samples, shared tokens
        self._sent = b""  # what the header holds
        self._input_ids, self._positions, self._kv_slots = (buffer(max_tokens) for _ in range(3))
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
        """The batch of any header with `rows` rows and up to `tokens` tokens (as many as rows: one token
        each), for a graph: nothing here depends on the host. `shares`: some rows may share blocks."""
        state = self._state
        counts = np.ones(rows, np.int32) if rows == tokens else None
        bounds = np.full(rows, state.max_len, np.int32)
        return self._batch(rows, tokens, counts, bounds, shares)

    def load(self, content: np.ndarray, staging: Staging, rows: int, one_each: bool = False) -> None:
        """Send the header [real rows, 4] of a step, padded to `rows` with dummy rows, which have a token only
        if every row has one. What is there already, as in most steps of steady decoding, is not sent."""
        header = np.empty((rows, 4), np.int32)
        header[: len(content)] = content
        header[len(content) :] = self._state.dummy, one_each, 0, 0
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
            kv_slots=self._kv_slots[:tokens],
            query_start=self._query_start[: rows + 1],
            seq_lens=self._seq_lens[:rows],
            block_table=state.block_table,
            slots=slots,
            logit_index=self._logit_index[:rows],
            kv=self._kv,
            num_tokens=counts,
            seq_bounds=bounds,
            block_size=self._block_size,
            wanted=None if rows == tokens else self._logit_index[:rows],
            shared=self._header[:rows, 3] if shares else None,
        )
        self._kernels.prepare(
            self._header, rows, tokens, rows == tokens, state.tokens, state.num_computed, state.block_table,
            self._block_size, self._turn, self._ring.shape[0], batch.input_ids, batch.positions,
            batch.kv_slots, batch.query_start, batch.seq_lens, batch.logit_index, slots,
        )  # fmt: skip
        batch.attn = self._backend.plan(batch)
        return batch

    def slots(self, rows: int) -> torch.Tensor:
        """int64 [rows]: the slots of the header's first rows."""
        return self._slots[:rows]

    def step(self, plan: StepPlan) -> DeviceStep:
        rows = len(plan.slots)
        return DeviceStep(plan, self._slots[:rows], self._ring[self._turn_host, :rows])

    def recover(self) -> None:
        self._turn.fill_(self._turn_host)
        self._sent = b""

    def advance(self, step: DeviceStep, tokens: torch.Tensor) -> None:
        self.advance_rows(len(step.plan.slots), tokens)

    def advance_rows(self, rows: int, tokens: torch.Tensor) -> None:
        """`advance` of the header's first `rows` rows."""
        state = self._state
        self._kernels.advance(
            self._header, rows, tokens, state.tokens, state.num_tokens, state.num_computed,
            self._turn, self._ring, state.dummy, state.keeps_kv,
        )  # fmt: skip
