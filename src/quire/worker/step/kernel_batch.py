"""`KernelBatcher`: both ends of a step as one kernel each, which a graph can replay."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch

from quire.attention.base import ForwardBatch
from quire.sampling.columns import LogitRows
from quire.speculation.drafter import DraftRows
from quire.types import StepPlan
from quire.worker.staging import Staging
from quire.worker.step.batch import BatchParts, DeviceStep, FirstEntries, SameObjects
from quire.worker.step.step_shapes import StepShape, most_logit_rows


class HeaderColumn(IntEnum):
    """Columns of the batch header, int32 [rows, 4]. The kernels of kernels/batch.py use the same numbers."""

    SLOT = 0
    NEW_TOKENS = 1
    SAMPLES = 2  # most tokens that the row samples: 1 + its draft tokens, or 0
    SHARED_TOKENS = 3  # tokens in blocks that the row shares with other rows


def plan_header(plan: StepPlan) -> np.ndarray:
    """Return the batch header of a plan, int32 [rows, 4], with the columns of `HeaderColumn`."""
    header = np.empty((len(plan.slots), len(HeaderColumn)), np.int32)
    header[:, HeaderColumn.SLOT] = plan.slots
    header[:, HeaderColumn.NEW_TOKENS] = plan.num_tokens
    header[:, HeaderColumn.SAMPLES] = plan.samples * (1 + plan.num_drafts)
    header[:, HeaderColumn.SHARED_TOKENS] = 0 if plan.shared is None else plan.shared
    return header


class BatchBounds(NamedTuple):
    """What the host knows of a batch: exactly from a plan, or as bounds of all plans of a shape."""

    rows: int
    tokens: int
    logit_rows: int
    drafts: int  # most of a row
    counts: np.ndarray | None  # int32 [rows]: tokens of each row, if known
    seq_lens: np.ndarray  # [rows]: most KV entries of each row, with the step's
    shares: bool  # rows may share blocks
    decodes_only: bool  # no row has more tokens than 1 + `drafts`
    has_prompts: bool
    keeps_hidden: bool = False
    brief: bool = False

    @classmethod
    def of_plan(cls, plan: StepPlan) -> BatchBounds:
        """Return the bounds of one plan."""
        rows, counts = len(plan.slots), plan.num_tokens
        return cls(
            rows=rows,
            tokens=plan.total_tokens,
            logit_rows=rows + int(plan.num_drafts.sum()),
            drafts=plan.max_drafts,
            counts=counts,
            seq_lens=plan.starts + counts,
            shares=plan.shared is not None,
            decodes_only=int(counts.max()) <= 1 + plan.max_drafts,
            has_prompts=plan.has_prompts,
            keeps_hidden=plan.keeps_hidden,
        )

    @classmethod
    def of_shape(cls, shape: StepShape, max_len: int) -> BatchBounds:
        """Return the bounds of all plans of a shape, with contexts of up to `max_len` tokens."""
        rows, tokens = shape.rows, shape.tokens
        return cls(
            rows=rows,
            tokens=tokens,
            logit_rows=shape.logit_rows,
            drafts=shape.drafts,
            counts=np.ones(rows, np.int32) if shape.one_each else None,
            seq_lens=np.full(rows, max_len, np.int32),
            shares=shape.shares,
            decodes_only=shape.one_each or shape.decodes_only,
            has_prompts=not (shape.one_each or shape.decodes_only),
            brief=shape.brief,
        )


class KernelBatcher:
    """Batcher of one kernel at each end of a step (kernels/batch.py), with static buffers.

    Sampled tokens go to a ring of pinned rows, one for each step in flight and one more. A row is written again only
    after its step has been retired.
    """

    def __init__(
        self,
        parts: BatchParts,
        *,
        max_tokens: int,
        max_rows: int,
        turns: int,
        device: torch.device,
        max_drafts: int = 0,
    ) -> None:
        """Allocate buffers for `max_tokens` tokens in `max_rows` rows, and a ring of `turns` rows.

        Args:
            max_drafts: most draft tokens of a row.
        """
        # Imported here: an installation for CPUs has no Triton.
        from quire.kernels import batch as kernels

        def buffer(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._kernels, self.parts, self._state = kernels, parts, parts.state
        self._header = buffer(max_rows, len(HeaderColumn), dtype=torch.int32)
        self._sent = b""  # content of the header on the device
        self._source = SameObjects()  # that from which it was made
        self._input_ids, self._positions = (buffer(max_tokens) for _ in range(2))
        self._kv_slots = buffer(len(parts.state.block_tables), max_tokens)
        self._slots = buffer(max_rows)
        logit_rows = most_logit_rows(max_rows, max_tokens, max_drafts)
        self._logit_index, self._logit_slots = (buffer(logit_rows) for _ in range(2))
        self._lengths = buffer(logit_rows, dtype=torch.int32)
        self._first_logits = buffer(max_rows, dtype=torch.int32)
        self._query_start = buffer(max_rows + 1, dtype=torch.int32)
        self._seq_lens = buffer(max_rows, dtype=torch.int32)
        self._turn = buffer(1, dtype=torch.int32)
        self._turn_host = 0
        self._ring = torch.zeros(
            turns, max_rows, 1 + max_drafts, dtype=torch.int32, pin_memory=device.type == "cuda"
        )
        self._turns = [FirstEntries(rows) for rows in self._ring]
        self._first_slots = FirstEntries(self._slots)
        self._first_logit_slots, self._first_lengths = (
            FirstEntries(self._logit_slots),
            FirstEntries(self._lengths),
        )

    def open(self, plan: StepPlan, staging: Staging, shape: StepShape | None = None) -> DeviceStep:
        """Send the header of `plan`, padded to the rows of `shape` if there is one, and return the plan's step."""
        rows = len(plan.slots)
        # The steps of an unchanged batch share columns, which nobody modifies.
        if not self._source.come_again(
            plan.slots, plan.num_tokens, plan.num_drafts, plan.samples, plan.shared, shape
        ):
            self._send(plan_header(plan), staging, *(shape.rows, shape.one_each) if shape else (rows, False))
        self._turn_host = (self._turn_host + 1) % len(self._turns)
        step = DeviceStep(plan, rows, plan.max_drafts, self._first_slots[rows])
        slots = plan.per_logit_row(plan.slots)
        step.logit_rows = self._logit_rows(slots, len(slots))
        step.tokens = self._newest(rows, plan.max_drafts)
        return step

    def _newest(self, rows: int, drafts: int) -> torch.Tensor:
        """Return the tokens of the newest step, in the ring."""
        tokens = self._turns[self._turn_host][rows]
        return tokens if tokens.shape[1] == 1 + drafts else tokens[:, : 1 + drafts]

    def padded(self, shape: StepShape) -> DeviceStep:
        """Return a step that serves every header of its shape, for capture: nothing in it depends on the host."""
        step = DeviceStep(None, shape.rows, shape.drafts, self._first_slots[shape.rows], shape=shape)
        step.logit_rows = self._logit_rows(_UNKNOWN, shape.logit_rows)
        return step

    def _logit_rows(self, slots_host: np.ndarray, count: int) -> LogitRows:
        return LogitRows(slots_host, self._first_logit_slots[count], self._first_lengths[count])

    def _send(self, content: np.ndarray, staging: Staging, rows: int, one_each: bool) -> None:
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

    def prepare(self, step: DeviceStep) -> None:
        if step.plan is not None:
            bounds = BatchBounds.of_plan(step.plan)
        else:
            assert step.shape is not None
            bounds = BatchBounds.of_shape(step.shape, self._state.max_len)
        self._propose(bounds)
        step.batch = self._batch(bounds)

    def _propose(self, bounds: BatchBounds) -> None:
        """Write the draft tokens of a step behind the known ones."""
        if bounds.drafts:
            header = self._header[: bounds.rows]
            counts = (header[:, HeaderColumn.SAMPLES] - 1).clamp_(min=0)
            # Prompts in the step may have more known tokens than `seq_lens`, which counts those up to their chunk.
            self.parts.drafter.propose(
                DraftRows(header[:, HeaderColumn.SLOT], counts, bounds.drafts, self._state.max_len)
            )

    def _batch(self, bounds: BatchBounds) -> ForwardBatch:
        """Fill the buffers from the header, and return the part of them that the step uses."""
        parts, state = self.parts, self._state
        rows, tokens, logits, drafts = bounds.rows, bounds.tokens, bounds.logit_rows, bounds.drafts
        header = self._header[:rows]
        batch = ForwardBatch(
            input_ids=self._input_ids[:tokens],
            positions=self._positions[:tokens],
            kv_slots=self._kv_slots[0, :tokens],
            query_start=self._query_start[: rows + 1],
            seq_lens=self._seq_lens[:rows],
            block_table=state.block_tables[0],
            slots=self._slots[:rows],
            logit_index=self._logit_index[:logits],
            kv=parts.kv,
            num_tokens=bounds.counts,
            seq_bounds=bounds.seq_lens,
            block_size=parts.block_size,
            wanted=None if logits == tokens or bounds.keeps_hidden else self._logit_index[:logits],
            shared=header[:, HeaderColumn.SHARED_TOKENS] if bounds.shares else None,
            group_of=parts.group_of,
            decode_tokens=self._ring.shape[2] if drafts else 1,  # one kernel for every depth
            decodes_only=bounds.decodes_only,
            brief=bounds.brief,
        )
        for table, kv_slots in zip(state.block_tables[1:], self._kv_slots[1:]):
            batch.add_group(table, kv_slots[:tokens])
        self._kernels.prepare(
            self._header, rows, tokens, rows == tokens, state.tokens, state.num_tokens, state.num_computed,
            state.block_tables, parts.block_size, self._turn, self._ring.shape[0], state.dummy, batch.input_ids,
            batch.positions, self._kv_slots, batch.query_start, batch.seq_lens, batch.slots, batch.logit_index,
            self._logit_slots[:logits], self._lengths[:logits], self._first_logits,
        )  # fmt: skip
        verified = header[:, HeaderColumn.SAMPLES] - 1 if drafts else None
        parts.states.attach(batch, state.num_computed, verified)
        batch.plan(parts.backend)
        if bounds.has_prompts:
            parts.drafter.follow(batch)
        return batch

    def count(self, step: DeviceStep) -> None:
        state, header = self._state, self._header[: step.rows]
        if state.keeps_kv:  # padding rows have no entries
            slots, counts = header[:, HeaderColumn.SLOT], header[:, HeaderColumn.NEW_TOKENS]
            state.num_computed.index_add_(0, slots.long(), counts.masked_fill(slots == state.dummy, 0))

    def on_device(self, step: DeviceStep) -> torch.Tensor:
        # Copied in one piece, because the host must not touch what a kernel has yet to write.
        newest = self._ring[self._turn_host, : step.rows].to(self._header.device, non_blocking=True)
        return newest[:, : 1 + step.max_drafts]

    def recover(self) -> None:
        self._turn.fill_(self._turn_host)
        self._sent = b""
        self._source.forget()

    def advance(self, step: DeviceStep, tokens: torch.Tensor) -> torch.Tensor:
        state, rows, slots, drafts = self._state, step.rows, step.slots, step.max_drafts
        before = state.num_computed.index_select(0, slots) if drafts else None
        self._kernels.advance(
            self._header, rows, bool(drafts), tokens, self._first_logits, state.tokens, state.num_tokens,
            state.num_computed, self._turn, self._ring, state.dummy, state.keeps_kv,
        )  # fmt: skip
        if before is not None:
            verifies = self._header[:rows, HeaderColumn.SAMPLES] > 1
            after = state.num_computed.index_select(0, slots)
            self.parts.states.accept(slots, verifies, after - before)
        return self._newest(rows, drafts)


_UNKNOWN = np.empty(0, np.int32)  # slots that only the device knows
