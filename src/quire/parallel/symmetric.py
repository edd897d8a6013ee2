"""The communicator of GPUs that can write each other's memory: Quire's kernels for few bytes, PyTorch's for more.

All memory is reached peer to peer. NVLink multicast is never used, because not every machine allows it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from quire.kernels import collective, two_trip
from quire.parallel.communicator import Communicator
from quire.parallel.sum_limits import MEASURED, SumLimits

log = logging.getLogger("quire")


class SymmetricCommunicator:
    """Communicator over memory that all ranks can write. `wider` is for what this one does not take.

    Args:
        group: the process group of the ranks.
        device: of this rank.
        wider: the communicator for large tensors and for `all_gather`.
        limits: say which method sums which size.

    Raises:
        RuntimeError: if the GPUs cannot reach each other's memory.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        wider: Communicator,
        limits: SumLimits = MEASURED,
    ) -> None:
        self._rank, self._size, self._wider = group.rank(), group.size(), wider
        self._name, self._is_muted, self._limits = group.group_name, False, limits
        first, second = collective.buffer_bytes(self._size), two_trip.buffer_bytes(self._size)
        second = second if limits.two_trips else 0
        self._words = symm_mem.empty((first + second) // 8, dtype=torch.int64, device=device)
        self._words.zero_()
        self._large = symm_mem.empty(limits.two_shots, dtype=torch.uint8, device=device)
        words = symm_mem.rendezvous(self._words, self._name)
        symm_mem.rendezvous(self._large, self._name)
        self._addresses = torch.tensor(words.buffer_ptrs, dtype=torch.int64, device=device)
        self._second_addresses = self._addresses + first
        self._calls = torch.zeros(collective.MAX_BLOCKS, dtype=torch.int32, device=device)
        self._second_calls = torch.zeros(two_trip.MAX_BLOCKS, dtype=torch.int32, device=device)
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
        rank, size = self._rank, self._size
        method = self._limits.pick(x.nbytes, size)
        if method == "one trip" and collective.takes(x):
            return collective.all_reduce(x, self._addresses, self._calls, rank, size)
        if method == "two trips" and two_trip.takes(x, size):
            return two_trip.all_reduce(x, self._second_addresses, self._second_calls, rank, size)
        # What a kernel does not take is rare: an odd number of 16-bit numbers, or another type.
        if self._is_muted or method != "two shots":
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
