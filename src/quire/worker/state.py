"""Slot state: one row of device memory per request slot. Batches are index vectors into these columns.

A slot's columns are overwritten as a whole on admission; between admissions only the device changes
them. The last slot is a dummy for padding. All writes are on the compute stream, in plan order.
"""

from __future__ import annotations

import numpy as np
import torch

from quire.types import StepPlan
from quire.worker.staging import Staging


class SlotState:
    """Columns of `num_slots` requests (plus the dummy), each up to `max_len` tokens in `max_blocks` pages."""

    def __init__(
        self,
        num_slots: int,
        max_len: int,
        max_blocks: int,
        num_blocks: int,
        keeps_kv: bool,
        device: torch.device,
    ) -> None:
        def column(*shape: int) -> torch.Tensor:
            return torch.zeros(num_slots + 1, *shape, dtype=torch.int32, device=device)

        self.max_len, self.max_blocks, self.keeps_kv = max_len, max_blocks, keeps_kv
        self.dummy = num_slots
        self.tokens = column(max_len)  # prompt and output
        self.num_tokens = column()  # how many of `tokens` are known
        self.prompt_len = column()
        self.num_computed = column()  # KV entries written
        self.block_table = column(max_blocks)
        self.block_table[self.dummy] = num_blocks  # a page of its own, beyond those of requests
        self.reset_dummy()

    def reset_dummy(self) -> None:
        """The dummy is a request of one token, none computed; padding rows must not make it grow."""
        self.num_tokens[self.dummy :].fill_(1)  # fills, because a captured graph takes nothing from the host
        self.num_computed[self.dummy :].fill_(0)

    def apply(self, plan: StepPlan, staging: Staging) -> None:
        """Bring in what the host decided: new owners of slots, and new pages. One packed copy each."""
        if plan.admits:
            self._admit(plan, staging)
        if plan.new_blocks:
            index = [
                np.arange(len(blocks)) + (slot * self.max_blocks + first)
                for slot, first, blocks in plan.new_blocks
            ]
            values = [blocks for _, _, blocks in plan.new_blocks]
            flat, blocks = staging.send(np.concatenate(index), np.concatenate(values))
            self.block_table.view(-1).index_copy_(0, flat, blocks.int())

    def _admit(self, plan: StepPlan, staging: Staging) -> None:
        admits = plan.admits
        slots = np.array([a.slot for a in admits])
        lengths = np.array([len(a.tokens) for a in admits])
        token_index = np.concatenate([np.arange(n) + s * self.max_len for s, n in zip(slots, lengths)])
        tokens = np.concatenate([np.frombuffer(a.tokens, np.int32) for a in admits])
        block_index = np.concatenate([np.arange(len(a.blocks)) + a.slot * self.max_blocks for a in admits])
        blocks = np.concatenate([a.blocks for a in admits])
        prompts = np.array([a.prompt_len for a in admits])
        computed = np.array([a.computed for a in admits])
        d_slots, d_lengths, d_prompts, d_computed, d_ti, d_tokens, d_bi, d_blocks = staging.send(
            slots, lengths, prompts, computed, token_index, tokens, block_index, blocks
        )
        self.num_tokens.index_copy_(0, d_slots, d_lengths.int())
        self.prompt_len.index_copy_(0, d_slots, d_prompts.int())
        self.num_computed.index_copy_(0, d_slots, d_computed.int())
        self.tokens.view(-1).index_copy_(0, d_ti, d_tokens.int())
        self.block_table.view(-1).index_copy_(0, d_bi, d_blocks.int())

    def advance(
        self,
        slots: torch.Tensor,
        num_tokens: torch.Tensor,
        sampling_slots: torch.Tensor,
        sampled: torch.Tensor,
    ) -> None:
        """After a step: the rows' KV is written, and each sampling row has one more token."""
        if self.keeps_kv:
            self.num_computed.index_add_(0, slots, num_tokens)
        if sampling_slots.shape[0]:
            lengths = self.num_tokens.index_select(0, sampling_slots)
            self.tokens.view(-1).index_copy_(0, sampling_slots * self.max_len + lengths, sampled)
            self.num_tokens.index_copy_(0, sampling_slots, lengths + 1)
