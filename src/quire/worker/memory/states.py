"""The states of requests: what layers with a recurrence keep of each request, in rows of one fixed size.

The first rows hold snapshots, which only `save` writes and `restore` reads. Behind them each request slot has its row.
So a state stays at one address while its request runs, and captured steps find it through the slot. The last row is
that of the dummy slot, which padding rows use.
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

    Attributes:
        layers: the tensors [rows, *shape] of each layer, by index; empty for layers without a state.
        shape: (num_slots, num_snapshots).
    """

    def __init__(
        self, layouts: Sequence[StateLayout], num_slots: int, num_snapshots: int, device: torch.device
    ) -> None:
        self.shape = num_slots, num_snapshots
        self._first_slot = num_snapshots
        rows = num_snapshots + num_slots + 1
        count = Counter(tensor for layout in layouts for tensor in layout.tensors)
        self._memory = {
            tensor: zeros((layers, rows, *tensor.shape), getattr(torch, tensor.dtype), device)
            for tensor, layers in count.items()
        }
        unused = {tensor: iter(memory) for tensor, memory in self._memory.items()}
        self.layers: list[States] = [
            tuple(next(unused[tensor]) for tensor in layout.tensors) for layout in layouts
        ]

    def attach(self, batch: ForwardBatch, num_computed: torch.Tensor) -> None:
        """Give a batch the states, and mark its rows of which nothing is computed.

        Args:
            batch: a step, before the model runs.
            num_computed: int32 [slots], KV entries of each slot.
        """
        if self._memory:
            batch.states, batch.state_rows = self.layers, batch.slots + self._first_slot
            batch.fresh = num_computed.index_select(0, batch.slots) == 0

    def restore(self, slot: int, snapshot: int) -> None:
        """Give a slot the states of a snapshot."""
        for memory in self._memory.values():
            memory[:, self._first_slot + slot].copy_(memory[:, snapshot])

    def save(self, slot: int, snapshot: int) -> None:
        """Keep the present states of a slot as a snapshot."""
        for memory in self._memory.values():
            memory[:, snapshot].copy_(memory[:, self._first_slot + slot])

    def clear(self) -> None:
        """Set all states to zero."""
        for memory in self._memory.values():
            memory.zero_()


NO_STATES = StateMemory((), 0, 0, torch.device("cpu"))  # of a model without recurrence
