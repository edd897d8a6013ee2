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
        block_tables: for each group of layers [slots, max_blocks], block ids; parts of rows of `table_row` ids.
        table_entries: the same ids, [slots * table_row].
        tokens: [slots, token_row], prompt and output. One token more than `max_len` fits: an embedding of a full
            context samples a token too, which nothing reads.
        shape: (num_slots, max_len, max_blocks, num_groups).
    """

    def __init__(
        self,
        num_slots: int,
        max_len: int,
        max_blocks: int,
        num_groups: int = 1,
        *,
        keeps_kv: bool,
        device: torch.device,
    ) -> None:
        self.max_len, self.max_blocks, self.keeps_kv = max_len, max_blocks, keeps_kv
        self.dummy = num_slots
        slots = num_slots + 1
        self.table_row = num_groups * max_blocks
        self.token_row = max_len + 1
        sizes = (slots, slots, slots, slots * self.table_row, slots * self.token_row)
        self._memory = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self.num_tokens, self.prompt_len, self.num_computed, self.table_entries, tokens = self._memory.split(
            sizes
        )
        self.block_tables = self.table_entries.view(slots, num_groups, max_blocks).unbind(1)
        self.tokens = tokens.view(slots, self.token_row)
        *self._scalars, self._table, self._tokens = np.cumsum((0, *sizes[:-1])).tolist()
        self._strides = np.array(
            (self.table_row, max_blocks, 1)
        )  # of slots, groups and places in block tables
        self.shape = num_slots, max_len, max_blocks, num_groups

    def clear(self, dummy_block: int) -> None:
        """Clear all slots. The dummy becomes a request of one token, not yet computed, in block `dummy_block`."""
        self._memory.zero_()
        for table in self.block_tables:
            table[self.dummy] = dummy_block
        self.num_tokens[self.dummy] = 1

    def apply(self, plan: StepPlan, staging: Staging) -> None:
        """Write the new owners of slots and the new blocks of `plan` to the columns."""
        if not (plan.admissions or len(plan.new_blocks)):
            return
        places: list[np.ndarray] = []
        values: list[np.ndarray] = []

        def write(begin: int, column: np.ndarray | list[int]) -> None:
            places.append(np.arange(begin, begin + len(column)))
            values.append(np.asarray(column, np.int64))

        if len(plan.new_blocks):
            places.append(plan.new_blocks[:, :3] @ self._strides + self._table)
            values.append(plan.new_blocks[:, 3])
        for admit in plan.admissions:
            write(self._tokens + admit.slot * self.token_row, np.frombuffer(admit.tokens, np.int32))
            for group, blocks in enumerate(admit.blocks):
                write(self._table + admit.slot * self.table_row + group * self.max_blocks, blocks)
            places.append(np.array(self._scalars) + admit.slot)
            values.append(np.array((len(admit.tokens), admit.prompt_len, admit.computed)))
        staging.write(self._memory, places, values)
