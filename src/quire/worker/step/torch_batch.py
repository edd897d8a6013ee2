"""`TorchBatcher`: both ends of a step as PyTorch operations."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from quire.attention.base import ForwardBatch
from quire.sampling.columns import LogitRows
from quire.speculation.drafter import DraftRows
from quire.types import REJECTED, StepPlan
from quire.worker.staging import Staging
from quire.worker.step.batch import BatchParts, DeviceStep


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


@dataclass(slots=True)
class TorchStep(DeviceStep):
    """A step of `TorchBatcher`, with the indices that the host has sent, int64."""

    counts: torch.Tensor = field(init=False)  # [rows]: new tokens of each row
    bounds: torch.Tensor = field(init=False)  # [rows + 1]: first token of each row, and the number of tokens
    slot_of_token: torch.Tensor = field(init=False)  # [tokens]
    offsets: torch.Tensor = field(init=False)  # [tokens]: place of each token in its row
    sampling: torch.Tensor = field(init=False)  # [sampling rows]: indices of these rows
    logit_index: torch.Tensor = field(init=False)  # [logit rows]: the token of each
    drafts: torch.Tensor | None = None  # [rows]: draft tokens of each row, if any row has some
    drafting: torch.Tensor = field(init=False)  # [drafting rows]: indices of these rows
    first_logits: torch.Tensor = field(init=False)  # [rows]: first logit row of each row
    logit_slots: torch.Tensor = field(init=False)  # [logit rows]
    drafts_before: torch.Tensor | None = None  # [logit rows]: draft tokens in front of each


class TorchBatcher:
    """Batcher of about ten small PyTorch operations. The host computes the indices."""

    def __init__(self, parts: BatchParts) -> None:
        self.parts, self._state = parts, parts.state

    def open(self, plan: StepPlan, staging: Staging) -> TorchStep:
        total, rows = plan.total_tokens, len(plan.slots)
        ends = np.cumsum(plan.num_tokens)
        firsts = ends - plan.num_tokens
        row_of_token = np.repeat(np.arange(rows), plan.num_tokens)
        slots, counts, bounds, slot_of_token, offsets, sampling, last_tokens = staging.send(
            plan.slots,
            plan.num_tokens,
            np.append(firsts, total),
            plan.slots[row_of_token],
            np.arange(total) - firsts[row_of_token],
            np.flatnonzero(plan.samples),
            ends - 1,
        )
        step = TorchStep(plan, rows, plan.max_drafts, slots)
        step.counts, step.bounds, step.slot_of_token, step.offsets = counts, bounds, slot_of_token, offsets
        step.sampling, step.logit_slots, step.logit_index = sampling, slots, last_tokens
        if plan.max_drafts:
            self._send_drafts(step, plan, ends, staging)
        return step

    def _send_drafts(self, step: TorchStep, plan: StepPlan, ends: np.ndarray, staging: Staging) -> None:
        """Replace the logit rows of a step by those of its rows with draft tokens."""
        first = plan.first_logit_rows
        slots = plan.per_logit_row(plan.slots)
        before = np.arange(len(slots)) - plan.per_logit_row(first)
        tokens = plan.per_logit_row(ends - 1 - plan.num_drafts) + before
        step.drafts, step.drafting, step.first_logits = staging.send(
            plan.num_drafts, np.flatnonzero(plan.num_drafts), first
        )
        step.logit_slots, step.drafts_before, step.logit_index = staging.send(slots, before, tokens)

    def prepare(self, step: DeviceStep) -> None:
        assert isinstance(step, TorchStep) and step.plan is not None
        parts, state, plan = self.parts, self._state, step.plan
        self._propose(step, plan)
        lengths = state.num_tokens.index_select(0, step.logit_slots)
        if step.drafts_before is not None:
            lengths += step.drafts_before.int()
        step.logit_rows = LogitRows(plan.per_logit_row(plan.slots), step.logit_slots, lengths)
        positions = state.num_computed.index_select(0, step.slot_of_token) + step.offsets
        block, within = positions // parts.block_size, positions % parts.block_size
        entry = step.slot_of_token * state.table_row + block

        def kv_slots(group: int) -> torch.Tensor:
            blocks = state.table_entries.index_select(0, entry + group * state.max_blocks)
            return blocks.long() * parts.block_size + within

        tokens = state.tokens.view(-1).index_select(0, step.slot_of_token * state.token_row + positions)
        reads_all = plan.keeps_hidden or len(step.logit_index) == plan.total_tokens
        batch = step.batch = ForwardBatch(
            input_ids=tokens.long(),
            positions=positions,
            kv_slots=kv_slots(0),
            query_start=step.bounds.int(),
            seq_lens=state.num_computed.index_select(0, step.slots) + step.counts.int(),
            block_table=state.block_tables[0],
            slots=step.slots,
            logit_index=step.logit_index,
            kv=parts.kv,
            num_tokens=plan.num_tokens,
            seq_bounds=plan.starts + plan.num_tokens,
            block_size=parts.block_size,
            wanted=None if reads_all else step.logit_index,
            group_of=parts.group_of,
        )
        parts.states.attach(batch, state.num_computed, step.drafts)
        for group, table in enumerate(state.block_tables[1:], 1):
            batch.add_group(table, kv_slots(group))
        if plan.has_prompts:
            parts.drafter.follow(batch)
        batch.plan(parts.backend)

    def _propose(self, step: TorchStep, plan: StepPlan) -> None:
        """Write the draft tokens of a step behind the known ones."""
        if step.drafts is None:
            return
        slots, counts = (x.index_select(0, step.drafting) for x in (step.slots, step.drafts))
        self.parts.drafter.propose(DraftRows(slots, counts, plan.max_drafts, plan.max_seq_len))

    def count(self, step: DeviceStep) -> None:
        assert isinstance(step, TorchStep)
        if self._state.keeps_kv:
            self._state.num_computed.index_add_(0, step.slots, step.counts.int())

    def on_device(self, step: DeviceStep) -> torch.Tensor:
        return step.tokens

    def recover(self) -> None:
        pass

    def advance(self, step: DeviceStep, tokens: torch.Tensor) -> torch.Tensor:
        assert isinstance(step, TorchStep)
        self.count(step)
        if step.drafts is not None:
            return self._accept(step, step.drafts, tokens)
        state, at, slots, lengths = self._state, step.sampling, step.slots, step.logit_rows.lengths
        result = tokens.unsqueeze(1)
        if len(at) < len(slots):
            slots, tokens, lengths = (x.index_select(0, at) for x in (slots, tokens, lengths))
        # A negative token tells the host of a failure; a step in flight still reads this column, so it needs an id.
        state.tokens.view(-1).index_copy_(0, slots * state.token_row + lengths, tokens.clamp(min=0))
        state.num_tokens.index_copy_(0, slots, lengths + 1)
        return result

    def _accept(self, step: TorchStep, drafts: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Append the tokens of rows with drafts, and take back the KV entries of those that are rejected."""
        state, at = self._state, step.sampling
        columns = torch.arange(1 + step.max_drafts, device=tokens.device)
        behind = columns > drafts.unsqueeze(1)  # [rows, 1 + most drafts]: the row has fewer tokens
        sampled = tokens[(step.first_logits.unsqueeze(1) + columns).masked_fill_(behind, 0)]
        places = state.num_tokens[step.slots].unsqueeze(1) + columns
        places = step.slots.unsqueeze(1) * state.token_row + places.clamp_(max=state.token_row - 1)
        kept = accepted_counts(sampled, state.tokens.view(-1)[places], drafts)
        taken_back = drafts + 1 - kept
        self.parts.states.accept(step.slots, drafts > 0, step.counts - taken_back)
        state.num_computed.index_add_(0, step.slots, -taken_back.int())
        result = sampled.masked_fill(columns >= kept.unsqueeze(1), REJECTED)
        keeps = columns < kept[at].unsqueeze(1)
        state.tokens.view(-1)[places[at][keeps]] = sampled[at][keeps].clamp_(min=0)
        state.num_tokens.index_add_(0, step.slots[at], kept[at].int())
        return result
