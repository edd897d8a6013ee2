"""The ragged batch builder: from a plan's index vectors to the tensors a model reads.

Input ids, positions and KV addresses are derived on the device from the slot columns, so the host never
needs a token to build the next step. Results go into one set of static buffers (graphs replay on them).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from quire.attention.base import KV, AttentionBackend, ForwardBatch
from quire.types import StepPlan
from quire.worker.staging import Staging
from quire.worker.state import SlotState


@dataclass(slots=True)
class Step:
    """A plan with its device-side index vectors."""

    plan: StepPlan
    batch: ForwardBatch
    slots: torch.Tensor  # int64 [rows]
    num_tokens: torch.Tensor  # int32 [rows]
    sampling_slots: torch.Tensor  # int64 [sampling rows]
    sampling_slots_host: np.ndarray  # int32 [sampling rows]


class BatchBuilder:
    def __init__(
        self,
        state: SlotState,
        backend: AttentionBackend,
        kv: list[KV],
        block_size: int,
        max_tokens: int,
        max_rows: int,
        device: torch.device,
    ) -> None:
        def buffer(size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self._state, self._backend, self._kv, self._block_size = state, backend, kv, block_size
        self._input_ids, self._positions, self._kv_slots = (buffer(max_tokens) for _ in range(3))
        self._query_start = buffer(max_rows + 1, torch.int32)
        self._seq_lens = buffer(max_rows, torch.int32)

    def build(self, plan: StepPlan, staging: Staging) -> Step:
        state, total, rows = self._state, plan.total_tokens, len(plan.slots)
        ends = np.cumsum(plan.num_tokens)
        firsts = ends - plan.num_tokens
        row_of_token = np.repeat(np.arange(rows), plan.num_tokens)
        sampling = np.flatnonzero(plan.samples)
        host_slots = plan.slots[sampling]
        slots, counts, starts, slot_of_token, offset, logit_index, sampling_slots = staging.send(
            plan.slots,
            plan.num_tokens,
            np.append(firsts, total),
            plan.slots[row_of_token],
            np.arange(total) - firsts[row_of_token],
            ends[sampling] - 1,
            host_slots,
        )
        positions = torch.add(
            state.num_computed.index_select(0, slot_of_token), offset, out=self._positions[:total]
        )
        input_ids = self._input_ids[:total]
        input_ids.copy_(state.tokens.view(-1).index_select(0, slot_of_token * state.max_len + positions))
        block, within = positions // self._block_size, positions % self._block_size
        pages = state.block_table.view(-1).index_select(0, slot_of_token * state.max_blocks + block)
        kv_slots = torch.add(pages.long() * self._block_size, within, out=self._kv_slots[:total])
        num_tokens = counts.int()
        seq_lens = torch.add(state.num_computed.index_select(0, slots), num_tokens, out=self._seq_lens[:rows])
        query_start = self._query_start[: rows + 1]
        query_start.copy_(starts)
        batch = ForwardBatch(
            input_ids=input_ids,
            positions=positions,
            kv_slots=kv_slots,
            query_start=query_start,
            seq_lens=seq_lens,
            block_table=state.block_table.index_select(0, slots)[
                :, : -(-plan.max_seq_len // self._block_size)
            ],
            logit_index=logit_index,
            kv=self._kv,
            num_tokens=plan.num_tokens,
            seq_bounds=plan.starts + plan.num_tokens,
            block_size=self._block_size,
        )
        batch.attn = self._backend.plan(batch)
        return Step(plan, batch, slots, num_tokens, sampling_slots, host_slots)

    def build_single(self, slots: torch.Tensor) -> ForwardBatch:
        """The batch of rows with one token each, all sampling, from slots int64 [rows] on the device alone:
        nothing here depends on the host, so it can be part of a captured graph."""
        state, rows = self._state, slots.shape[0]
        computed = state.num_computed.index_select(0, slots)
        positions = computed.long()
        table = state.block_table.index_select(0, slots)
        pages = table.gather(1, (positions // self._block_size).unsqueeze(1)).squeeze(1)
        every = torch.arange(rows + 1, device=slots.device)
        batch = ForwardBatch(
            input_ids=state.tokens.view(-1).index_select(0, slots * state.max_len + positions).long(),
            positions=positions,
            kv_slots=pages.long() * self._block_size + positions % self._block_size,
            query_start=every.int(),
            seq_lens=computed + 1,
            block_table=table,
            logit_index=every[:rows],
            kv=self._kv,
            num_tokens=np.ones(rows, np.int32),
            seq_bounds=np.full(rows, state.max_len, np.int32),
            block_size=self._block_size,
        )
        batch.attn = self._backend.plan(batch)
        return batch
