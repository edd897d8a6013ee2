"""The communicator of GPUs that can write each other's memory: Quire's kernel for few bytes, PyTorch's for more.

All memory is reached peer to peer. NVLink multicast is never used, because not every machine allows it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from quire.kernels import collective
from quire.parallel.communicator import Communicator

log = logging.getLogger("quire")

# Bytes up to which each method is the fastest (docs/SCALING.md has the figures); NCCL sums larger tensors. In one trip
# every rank sends everything to every other one, so the limit is shared by the ranks.
ONE_TRIP_BYTES = 2 << 20  # divided by the number of ranks
TWO_SHOT_BYTES = 32 << 20


class SymmetricCommunicator:
    """Communicator over memory that all ranks can write. `wider` is for what this one does not take.

    Args:
        group: the process group of the ranks.
        device: of this rank.
        wider: the communicator for large tensors and for `all_gather`.

    Raises:
        RuntimeError: if the GPUs cannot reach each other's memory.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, wider: Communicator) -> None:
        self._rank, self._size, self._wider = group.rank(), group.size(), wider
        self._name, self._is_muted = group.group_name, False
        self._words = symm_mem.empty(
            collective.buffer_bytes(self._size) // 8, dtype=torch.int64, device=device
        )
        self._words.zero_()
        self._large = symm_mem.empty(TWO_SHOT_BYTES, dtype=torch.uint8, device=device)
        words = symm_mem.rendezvous(self._words, self._name)
        symm_mem.rendezvous(self._large, self._name)
        self._addresses = torch.tensor(words.buffer_ptrs, dtype=torch.int64, device=device)
        self._calls = torch.zeros(collective.MAX_BLOCKS, dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)
        words.barrier(channel=0)  # no rank writes to another's buffer before it is zero
        torch.cuda.synchronize(device)

    @contextmanager
    def muted(self) -> Iterator[None]:
        self._is_muted = True
        try:
            with self._wider.muted():
                yield
        finally:
            self._is_muted = False

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        if x.nbytes <= ONE_TRIP_BYTES // self._size and collective.takes(x):
            return collective.all_reduce(x, self._addresses, self._calls, self._rank, self._size)
        if self._is_muted or x.nbytes > TWO_SHOT_BYTES or x.nbytes % (16 * self._size):
            return self._wider.all_reduce(x)
        shared = self._large[: x.nbytes].view(x.dtype).view(x.shape)
        shared.copy_(x)
        torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", self._name)
        return x.copy_(shared)

    def all_to_all(self, x: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        return self._wider.all_to_all(x, sent, received)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return self._wider.all_gather(x)


def symmetric_or(wider: Communicator, group: dist.ProcessGroup, device: torch.device) -> Communicator:
    """Return a `SymmetricCommunicator`, or `wider` if the GPUs cannot reach each other's memory."""
    reachable = all(
        other == device.index or torch.cuda.can_device_access_peer(device.index or 0, other)
        for other in range(torch.cuda.device_count())
    )
    flags = [torch.tensor([int(reachable)], device=device)]
    dist.all_reduce(flags[0], dist.ReduceOp.MIN, group=group)
    if not int(flags[0]):
        log.warning("GPUs without access to each other's memory: sums go through NCCL, which is slower")
        return wider
    return SymmetricCommunicator(group, device, wider)
