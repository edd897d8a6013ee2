"""Slot state: one row of device memory per request slot. Batches are index vectors into these columns.

All columns are parts of one integer array. So the host's decisions, new owners of slots and new blocks, are a list of
(place, value) pairs: one copy and one scatter. Between admissions only the device changes the columns. The last slot is
a dummy for padding. All writes are on the compute stream, in plan order.
"""

from __future__ import annotations

import numpy as np
import torch

from quire.types import StepPlan
from quire.worker.staging import Staging


class SlotState:
    """Columns of `num_slots` request slots and the dummy slot, int32, undefined until `clear`.

    Attributes:
        dummy: index of the dummy slot, which is `num_slots`.
        num_tokens: [slots], known tokens of each slot.
        prompt_len: [slots], tokens of each prompt.
        num_computed: [slots], KV entries written; not counted if `keeps_kv` is off.
        block_table: [slots, max_blocks], block ids.
        tokens: [slots, max_len], prompt and output.
        shape: (num_slots, max_len, max_blocks).
    """

    def __init__(
        self,
        num_slots: int,
        max_len: int,
        max_blocks: int,
        *,
        keeps_kv: bool,
        device: torch.device,
    ) -> None:
        self.max_len, self.max_blocks, self.keeps_kv = max_len, max_blocks, keeps_kv
        self.dummy = num_slots
        slots = num_slots + 1
        sizes = (slots, slots, slots, slots * max_blocks, slots * max_len)
        self._memory = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self.num_tokens, self.prompt_len, self.num_computed, table, tokens = self._memory.split(sizes)
        self.block_table = table.view(slots, max_blocks)
        self.tokens = tokens.view(slots, max_len)
        *self._scalars, self._table, self._tokens = np.cumsum((0, *sizes[:-1])).tolist()
        self.shape = num_slots, max_len, max_blocks

    def clear(self, dummy_block: int) -> None:
        """Clear all slots. The dummy becomes a request of one token, not yet computed, in block `dummy_block`."""
        self._memory.zero_()
        self.block_table[self.dummy] = dummy_block
        self.num_tokens[self.dummy] = 1

    def apply(self, plan: StepPlan, staging: Staging) -> None:
        """Write the new owners of slots and the new blocks of `plan` to the columns."""
        if not (plan.admissions or plan.new_blocks):
            return
        places: list[np.ndarray] = []
        values: list[np.ndarray] = []

        def write(begin: int, column: np.ndarray | list[int]) -> None:
            places.append(np.arange(begin, begin + len(column)))
            values.append(np.asarray(column))

        for slot, first, blocks in plan.new_blocks:
            write(self._table + slot * self.max_blocks + first, blocks)
        for admit in plan.admissions:
            write(self._tokens + admit.slot * self.max_len, np.frombuffer(admit.tokens, np.int32))
            write(self._table + admit.slot * self.max_blocks, admit.blocks)
            places.append(np.array(self._scalars) + admit.slot)
            values.append(np.array((len(admit.tokens), admit.prompt_len, admit.computed)))
        index, value = staging.send(np.concatenate(places), np.concatenate(values))
        self._memory.index_copy_(0, index, value.int())
