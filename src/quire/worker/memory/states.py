"""The states of requests: what layers with a recurrence keep of each request, in rows of one fixed size.

The first rows hold snapshots, which only `save` writes and `restore` reads. Behind them each request slot has its row.
So a state stays at one address while its request runs, and captured steps find it through the slot. The last row is
that of the dummy slot, which padding rows use.

With up to k draft tokens a slot has 1 + k rows, used in turn. A row of the batch that verifies drafts reads the slot's
present row and writes the state after each of its tokens to the rows behind it. The number of accepted tokens then says
which of them is the present one. Steps without drafts update the present row in place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from quire.attention.base import ForwardBatch, States
from quire.types import StateLayout
from quire.worker.memory.kv_cache import zeros


class StateMemory:
    """The states of all slots and snapshots, or of none if no layer keeps a state.

    Layers with equal tensors share one allocation, so that copying a row takes few operations, however many layers
    there are.

    Args:
        layouts: the state of each layer, by index.
        num_slots: number of request slots, without the dummy.
        num_snapshots: number of rows for snapshots.
        device: where they are.
        drafts: most draft tokens of a row.

    Attributes:
        layers: the tensors [rows, *shape] of each layer, by index; empty for layers without a state.
        shape: (num_slots, num_snapshots).
    """

    def __init__(
        self,
        layouts: Sequence[StateLayout],
        num_slots: int,
        num_snapshots: int,
        device: torch.device,
        drafts: int = 0,
    ) -> None:
        self.shape = num_slots, num_snapshots
        self._first_slot, self._per_slot = num_snapshots, 1 + drafts
        rows = num_snapshots + num_slots * self._per_slot + 1
        # int64 [slots]: which of a slot's rows is the present one; always 0 for the dummy slot.
        self.turn = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        count = Counter(tensor for layout in layouts for tensor in layout.tensors)
        self._memory = {
            tensor: zeros((layers, rows, *tensor.shape), getattr(torch, tensor.dtype), device)
            for tensor, layers in count.items()
        }
        unused = {tensor: iter(memory) for tensor, memory in self._memory.items()}
        self.layers: list[States] = [
            tuple(next(unused[tensor]) for tensor in layout.tensors) for layout in layouts
        ]

    def attach(
        self, batch: ForwardBatch, num_computed: torch.Tensor, drafts: torch.Tensor | None = None
    ) -> None:
        """Give a batch the states, and mark its rows of which nothing is computed.

        Args:
            batch: a step, before the model runs.
            num_computed: int32 [slots], KV entries of each slot.
            drafts: [rows], draft tokens of each row; None if no row has any.
        """
        if not self._memory:
            return
        batch.states, batch.state_rows = self.layers, self._present(batch.slots)
        batch.fresh = num_computed.index_select(0, batch.slots) == 0
        if drafts is not None:
            batch.state_targets = self._targets(batch, drafts)

    def _present(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the present rows of int64 `slots`."""
        if self._per_slot == 1:
            return slots + self._first_slot
        return slots * self._per_slot + self._first_slot + self.turn.index_select(0, slots)

    def _targets(self, batch: ForwardBatch, drafts: torch.Tensor) -> torch.Tensor:
        """Return the row for the state after each token, int64 [tokens], -1 for none."""
        ends, rows = batch.query_start[1:].long(), len(batch.slots)
        at = torch.arange(len(batch.input_ids), device=ends.device)
        row = torch.searchsorted(ends, at, right=True).clamp_(max=rows - 1)
        turn = self.turn.index_select(0, batch.slots)[row] + 1 + at - batch.query_start[row]
        verifying = batch.slots[row] * self._per_slot + self._first_slot + turn % self._per_slot
        ending = torch.where(at + 1 == ends[row], batch.state_rows[row], -1)
        targets = torch.where(drafts[row] > 0, verifying, ending)
        return torch.where(at < ends[-1], targets, -1)

    def accept(self, slots: torch.Tensor, verifies: torch.Tensor, tokens: torch.Tensor) -> None:
        """Move slots on to the state behind their last accepted token.

        Args:
            slots: int64 [rows].
            verifies: bool [rows], whether the row had draft tokens.
            tokens: [rows], tokens of the row whose KV entries count: 1 + the accepted drafts.
        """
        if self._memory:
            turn = self.turn.index_select(0, slots)
            self.turn.index_copy_(0, slots, (turn + tokens * verifies) % self._per_slot)

    def snapshots(self) -> list[torch.Tensor]:
        """Return the rows of snapshots of each tensor of each layer, [snapshots, *shape]; none without rows."""
        return [
            layer[: self._first_slot]
            for memory in self._memory.values()
            for layer in memory
            if self._first_slot
        ]

    def restore(self, slot: int, snapshot: int) -> None:
        """Give a slot the states of a snapshot."""
        row = self._present(self._slot_index(slot))
        for memory in self._memory.values():
            # A copy, because torch refuses a source that is part of the target.
            memory.index_copy_(1, row, memory[:, snapshot : snapshot + 1].clone())

    def save(self, slot: int, snapshot: int) -> None:
        """Keep the present states of a slot as a snapshot."""
        row = self._present(self._slot_index(slot))
        for memory in self._memory.values():
            memory[:, snapshot : snapshot + 1].copy_(memory.index_select(1, row))

    def _slot_index(self, slot: int) -> torch.Tensor:
        return torch.full((1,), slot, dtype=torch.int64, device=self.turn.device)

    def clear(self) -> None:
        """Set all states to zero."""
        for memory in self._memory.values():
            memory.zero_()
        self.turn.zero_()


NO_STATES = StateMemory((), 0, 0, torch.device("cpu"))  # of a model without recurrence
