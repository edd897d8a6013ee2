"""Both ends of a step: the ragged batch that the model reads, and the update of the slot columns with its tokens.

Input ids, positions and KV addresses are computed on the device from the slot columns, so the host never needs a token
to build the next step. `KernelBatcher` fills static buffers with one kernel that reads only a small header from the
host, so that graphs can replay it. `TorchBatcher` does the same with PyTorch operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

import numpy as np
import torch

from quire.attention.base import KV, AttentionBackend, ForwardBatch
from quire.sampling.columns import LogitRows
from quire.speculation.drafter import Drafter, DraftRows, NoDrafter
from quire.types import REJECTED, StepPlan
from quire.worker.memory.states import NO_STATES, StateMemory
from quire.worker.staging import Staging
from quire.worker.state import SlotState
from quire.worker.step_shapes import decodes_only, most_logit_rows


class HeaderColumn(IntEnum):
    """Columns of the batch header, int32 [rows, 4]. The kernels of kernels/batch.py use the same numbers."""

    SLOT = 0
    NEW_TOKENS = 1
    SAMPLES = 2  # most tokens that the row samples: 1 + its draft tokens, or 0
    SHARED_TOKENS = 3  # tokens in blocks that the row shares with other rows


@dataclass(slots=True)
class DeviceStep:
    """A plan whose indices are on the device."""

    plan: StepPlan
    slots: torch.Tensor  # int64 [rows]
    # int32 [rows, 1 + most drafts], pinned: the sampled tokens arrive here if the last kernel of the step writes them
    # to the host.
    tokens_host: torch.Tensor | None = None
    logit_rows: LogitRows = field(init=False)
    # Only from TorchBatcher:
    counts: torch.Tensor | None = None  # int64 [rows]: new tokens of each row
    sampling: torch.Tensor | None = None  # int64 [sampling rows]: indices of these rows
    logit_index: torch.Tensor = field(init=False)  # int64 [logit rows]: the token of each
    drafts: torch.Tensor | None = None  # int64 [rows]: draft tokens of each row
    first_logits: torch.Tensor | None = None  # int64 [rows]: first logit row of each row


class Batcher(Protocol):
    """Builder of batches that also writes sampled tokens back to the slot columns."""

    def build(self, plan: StepPlan, staging: Staging) -> tuple[DeviceStep, ForwardBatch]:
        """Return the step and the batch of `plan`, on the device."""
        ...

    def advance(self, step: DeviceStep, tokens: torch.Tensor) -> torch.Tensor:
        """Update the slot columns after the model has run: count KV entries, append sampled tokens.

        Of a row with draft tokens, the tokens up to the first one that differs from its draft are appended, and the
        KV entries of the rejected drafts are not counted.

        Args:
            tokens: int32 [logit rows]; only those of sampling rows are appended.

        Returns:
            int32 [rows, 1 + most drafts], the appended tokens and REJECTED behind them; undefined for rows that do
            not sample. Valid on the host when the step has ended.
        """
        ...

    def count(self, step: DeviceStep) -> None:
        """Count the KV entries of a step whose tokens are sampled in a later stage of the pipeline."""
        ...

    def on_device(self, step: DeviceStep, tokens: torch.Tensor | None) -> torch.Tensor:
        """Return the result of `advance` for the newest step on the device, in stream order."""
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
        header[:, HeaderColumn.SAMPLES] = plan.samples * (1 + plan.num_drafts)
        header[:, HeaderColumn.SHARED_TOKENS] = 0 if plan.shared is None else plan.shared
    return header


def accepted_counts(sampled: torch.Tensor, drafted: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
    """Return how many of each row's sampled tokens become output, int64 [rows].

    A sampled token is output if every draft token before it equals the token sampled in its place. Because both a
    greedy and a drawn token depend on the seed, the position and the tokens before it only, this is the output of
    decoding one token a step, whatever was drafted.

    Args:
        sampled: int32 [rows, 1 + k]; column j was sampled after j draft tokens.
        drafted: int32 [rows, 1 + k], the draft tokens; column k is not read.
        drafts: int64 [rows], the number of draft tokens of each row, at most k.
    """
    columns = torch.arange(sampled.shape[1], device=sampled.device)
    matches = (sampled == drafted) & (columns < drafts.unsqueeze(1))
    return 1 + matches.int().cumprod(1).sum(1)


class TorchBatcher:
    """Batcher of about ten small PyTorch operations. The host computes the indices."""

    def __init__(
        self,
        state: SlotState,
        backend: AttentionBackend,
        kv: list[KV],
        block_size: int,
        drafter: Drafter | None = None,
        group_of: Sequence[int] = (),
        states: StateMemory = NO_STATES,
    ) -> None:
        """Build batches over the blocks `kv`; `group_of` is the group of each layer, if there are several."""
        self._states = states
        self.kv, self._state, self._backend, self._block_size = kv, state, backend, block_size
        self._drafter, self._group_of = drafter or NoDrafter(), group_of

    def build(self, plan: StepPlan, staging: Staging) -> tuple[DeviceStep, ForwardBatch]:
        state, total, rows = self._state, plan.total_tokens, len(plan.slots)
        if most := plan.max_drafts:
            drafting = np.flatnonzero(plan.num_drafts)
            draft_slots, counts = staging.send(plan.slots[drafting], plan.num_drafts[drafting])
            self._drafter.propose(DraftRows(draft_slots, counts, most, plan.max_seq_len))
        ends = np.cumsum(plan.num_tokens)
        firsts = ends - plan.num_tokens
        row_of_token = np.repeat(np.arange(rows), plan.num_tokens)
        slots, counts, starts, slot_of_token, offset, sampling = staging.send(
            plan.slots,
            plan.num_tokens,
            np.append(firsts, total),
            plan.slots[row_of_token],
            np.arange(total) - firsts[row_of_token],
            np.flatnonzero(plan.samples),
        )
        step = self._with_logits(DeviceStep(plan, slots, counts=counts, sampling=sampling), ends, staging)
        positions = state.num_computed.index_select(0, slot_of_token) + offset
        block, within = positions // self._block_size, positions % self._block_size
        entry = slot_of_token * state.table_row + block

        def kv_slots(group: int) -> torch.Tensor:
            blocks = state.table_entries.index_select(0, entry + group * state.max_blocks)
            return blocks.long() * self._block_size + within

        batch = ForwardBatch(
            input_ids=state.tokens.view(-1)
            .index_select(0, slot_of_token * state.token_row + positions)
            .long(),
            positions=positions,
            kv_slots=kv_slots(0),
            query_start=starts.int(),
            seq_lens=state.num_computed.index_select(0, slots) + counts.int(),
            block_table=state.block_tables[0],
            slots=slots,
            logit_index=step.logit_index,
            kv=self.kv,
            num_tokens=plan.num_tokens,
            seq_bounds=plan.starts + plan.num_tokens,
            block_size=self._block_size,
            wanted=None if plan.keeps_hidden or len(step.logit_index) == total else step.logit_index,
            group_of=self._group_of,
        )
        self._states.attach(batch, state.num_computed, step.drafts)
        for group, table in enumerate(state.block_tables[1:], 1):
            batch.add_group(table, kv_slots(group))
        if plan.has_prompts:
            self._drafter.follow(batch)
        batch.plan(self._backend)
        return step, batch

    def _with_logits(self, step: DeviceStep, ends: np.ndarray, staging: Staging) -> DeviceStep:
        """Add the rows of logits of a step, whose rows end at the tokens `ends`."""
        plan, known = step.plan, self._state.num_tokens
        if not plan.max_drafts:
            (step.logit_index,) = staging.send(ends - 1)
            step.logit_rows = LogitRows(plan.slots, step.slots, known.index_select(0, step.slots))
            return step
        logits = 1 + plan.num_drafts
        first = np.cumsum(logits) - logits
        slots_host = plan.per_logit_row(plan.slots)
        before = np.arange(len(slots_host)) - plan.per_logit_row(first)
        slots, drafts_before, step.drafts, step.first_logits, step.logit_index = staging.send(
            slots_host, before, plan.num_drafts, first, plan.per_logit_row(ends - logits) + before
        )
        lengths = known.index_select(0, slots) + drafts_before.int()
        step.logit_rows = LogitRows(slots_host, slots, lengths)
        return step

    def count(self, step: DeviceStep) -> None:
        if self._state.keeps_kv:
            assert step.counts is not None
            self._state.num_computed.index_add_(0, step.slots, step.counts.int())

    def on_device(self, step: DeviceStep, tokens: torch.Tensor | None) -> torch.Tensor:
        assert tokens is not None
        return tokens

    def recover(self) -> None:
        pass

    def advance(self, step: DeviceStep, tokens: torch.Tensor) -> torch.Tensor:
        state, slots = self._state, step.slots
        assert step.counts is not None and step.sampling is not None
        self.count(step)
        if step.plan.max_drafts:
            return self._accept(step, tokens)
        result, lengths = tokens.unsqueeze(1), step.logit_rows.lengths
        if not step.plan.samples.all():
            at = step.sampling
            slots, tokens, lengths = (x.index_select(0, at) for x in (slots, tokens, lengths))
        # A negative token tells the host of a failure; a step in flight still reads this column, so it needs an id.
        state.tokens.view(-1).index_copy_(0, slots * state.token_row + lengths, tokens.clamp(min=0))
        state.num_tokens.index_copy_(0, slots, lengths + 1)
        return result

    def _accept(self, step: DeviceStep, tokens: torch.Tensor) -> torch.Tensor:
        """Append the tokens of rows with drafts, and take back the KV entries of those that are rejected."""
        state, drafts = self._state, step.drafts
        assert drafts is not None and step.first_logits is not None
        assert step.sampling is not None and step.counts is not None
        columns = torch.arange(1 + step.plan.max_drafts, device=tokens.device)
        behind = columns > drafts.unsqueeze(1)  # [rows, 1 + most drafts]: the row has fewer tokens
        sampled = tokens[(step.first_logits.unsqueeze(1) + columns).masked_fill_(behind, 0)]
        places = state.num_tokens[step.slots].unsqueeze(1) + columns
        places = step.slots.unsqueeze(1) * state.token_row + places.clamp_(max=state.token_row - 1)
        kept = accepted_counts(sampled, state.tokens.view(-1)[places], drafts)
        taken_back = drafts + 1 - kept
        self._states.accept(step.slots, drafts > 0, step.counts - taken_back)
        state.num_computed.index_add_(0, step.slots, -taken_back.int())
        result = sampled.masked_fill(columns >= kept.unsqueeze(1), REJECTED)
        at = step.sampling
        keeps = columns < kept[at].unsqueeze(1)
        state.tokens.view(-1)[places[at][keeps]] = sampled[at][keeps].clamp_(min=0)
        state.num_tokens.index_add_(0, step.slots[at], kept[at].int())
        return result


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
        drafter: Drafter | None = None,
        max_drafts: int = 0,
        states: StateMemory = NO_STATES,
    ) -> None:
        """Allocate buffers for `max_tokens` tokens in `max_rows` rows, and a ring of `turns` rows.

        Args:
            group_of: the group of each layer, if there are several.
            drafter: proposes draft tokens at the beginning of a step; None: no step has any.
            max_drafts: most draft tokens of a row.
        """
        # Imported here: an installation for CPUs has no Triton.
        from quire.kernels import batch as kernels

        def buffer(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._kernels, self._states = kernels, states
        self.kv, self._state, self._backend, self._block_size = kv, state, backend, block_size
        self._header = buffer(max_rows, len(HeaderColumn), dtype=torch.int32)
        self._sent = b""  # content of the header on the device
        self._group_of = group_of
        self._input_ids, self._positions = (buffer(max_tokens) for _ in range(2))
        self._kv_slots = buffer(len(state.block_tables), max_tokens)
        self._drafter = drafter or NoDrafter()
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

    def build(self, plan: StepPlan, staging: Staging) -> tuple[DeviceStep, ForwardBatch]:
        rows = len(plan.slots)
        self.load(plan_header(plan), staging, rows)
        bounds = plan.starts + plan.num_tokens
        shares = plan.shared is not None
        logits = rows + int(plan.num_drafts.sum())
        batch = self._batch(rows, plan.total_tokens, logits, plan.num_tokens, bounds, shares, plan.max_drafts)
        if plan.has_prompts:
            self._drafter.follow(batch)
        if plan.keeps_hidden:
            batch.wanted = None
        return self.step(plan), batch

    def bounded(self, rows: int, tokens: int, shares: bool, drafts: int = 0) -> ForwardBatch:
        """Return a batch that serves every header of its shape, for capture: nothing in it depends on the host.

        Args:
            rows: rows of the header, padding included.
            tokens: most tokens of all rows together; if equal to `rows`, each row has one token.
            shares: rows may share blocks.
            drafts: most draft tokens of a row.
        """
        state = self._state
        counts = np.ones(rows, np.int32) if rows == tokens else None
        bounds = np.full(rows, state.max_len, np.int32)
        logits = most_logit_rows(rows, tokens, drafts)
        batch = self._batch(rows, tokens, logits, counts, bounds, shares, drafts)
        if not batch.decodes_only:
            self._drafter.follow(batch)
        return batch

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
        logits: int,
        counts: np.ndarray | None,
        bounds: np.ndarray,
        shares: bool,
        drafts: int,
    ) -> ForwardBatch:
        state = self._state
        slots = self._slots[:rows]
        if drafts:
            columns = self._header[:rows]
            counts_of = (columns[:, HeaderColumn.SAMPLES] - 1).clamp_(min=0)
            # Prompts in the step may have more known tokens than `bounds`, which counts those up to their chunk.
            rows_to_draft = DraftRows(columns[:, HeaderColumn.SLOT], counts_of, drafts, state.max_len)
            self._drafter.propose(rows_to_draft)
        batch = ForwardBatch(
            input_ids=self._input_ids[:tokens],
            positions=self._positions[:tokens],
            kv_slots=self._kv_slots[0, :tokens],
            query_start=self._query_start[: rows + 1],
            seq_lens=self._seq_lens[:rows],
            block_table=state.block_tables[0],
            slots=slots,
            logit_index=self._logit_index[:logits],
            kv=self.kv,
            num_tokens=counts,
            seq_bounds=bounds,
            block_size=self._block_size,
            wanted=None if logits == tokens else self._logit_index[:logits],
            shared=self._header[:rows, HeaderColumn.SHARED_TOKENS] if shares else None,
            group_of=self._group_of,
            decode_tokens=self._ring.shape[2] if drafts else 1,  # one kernel for every depth
            decodes_only=decodes_only(rows, tokens, drafts) if counts is None else max(counts) <= 1 + drafts,
        )
        for table, kv_slots in zip(state.block_tables[1:], self._kv_slots[1:]):
            batch.add_group(table, kv_slots[:tokens])
        self._kernels.prepare(
            self._header, rows, tokens, rows == tokens, state.tokens, state.num_tokens, state.num_computed,
            state.block_tables, self._block_size, self._turn, self._ring.shape[0], state.dummy, batch.input_ids,
            batch.positions, self._kv_slots, batch.query_start, batch.seq_lens, slots, batch.logit_index,
            self._logit_slots[:logits], self._lengths[:logits], self._first_logits,
        )  # fmt: skip
        self._states.attach(
            batch, state.num_computed, self._header[:rows, HeaderColumn.SAMPLES] - 1 if drafts else None
        )
        batch.plan(self._backend)
        return batch

    def logits_at(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return slots int64 and lengths int32 (see `LogitRows`) of the first `count` logit rows of a step."""
        return self._logit_slots[:count], self._lengths[:count]

    def step(self, plan: StepPlan) -> DeviceStep:
        """Return the step of `plan`, whose header has been loaded."""
        rows, width = len(plan.slots), 1 + plan.max_drafts
        step = DeviceStep(plan, self._slots[:rows], self._ring[self._turn_host, :rows, :width])
        slots_host = plan.per_logit_row(plan.slots)
        step.logit_rows = LogitRows(slots_host, *self.logits_at(len(slots_host)))
        return step

    def count(self, step: DeviceStep) -> None:
        self.count_rows(len(step.plan.slots))

    def count_rows(self, rows: int) -> None:
        """Count the KV entries of the header's first `rows` rows; those of padding rows are none."""
        state, header = self._state, self._header[:rows]
        if state.keeps_kv:
            slots, counts = header[:, HeaderColumn.SLOT], header[:, HeaderColumn.NEW_TOKENS]
            state.num_computed.index_add_(0, slots.long(), counts.masked_fill(slots == state.dummy, 0))

    def on_device(self, step: DeviceStep, tokens: torch.Tensor | None) -> torch.Tensor:
        # Copied in one piece, because the host must not touch what a kernel has yet to write.
        rows, width = len(step.plan.slots), 1 + step.plan.max_drafts
        return self._ring[self._turn_host, :rows].to(self._header.device, non_blocking=True)[:, :width]

    def recover(self) -> None:
        self._turn.fill_(self._turn_host)
        self._sent = b""

    def advance(self, step: DeviceStep, tokens: torch.Tensor) -> torch.Tensor:
        self.advance_rows(len(step.plan.slots), tokens, step.plan.max_drafts)
        assert step.tokens_host is not None
        return step.tokens_host

    def advance_rows(self, rows: int, tokens: torch.Tensor, drafts: int = 0) -> None:
        """Do the same as `advance` for the header's first `rows` rows, which have up to `drafts` draft tokens."""
        state, slots = self._state, self._slots[:rows]
        before = state.num_computed.index_select(0, slots) if drafts else None
        self._kernels.advance(
            self._header, rows, bool(drafts), tokens, self._first_logits, state.tokens, state.num_tokens,
            state.num_computed, self._turn, self._ring, state.dummy, state.keeps_kv,
        )  # fmt: skip
        if before is not None:
            verifies = self._header[:rows, HeaderColumn.SAMPLES] > 1
            self._states.accept(slots, verifies, state.num_computed.index_select(0, slots) - before)
