"""Communication between the ranks of an engine: sums and concatenations of tensors.

Every rank makes the same calls in the same order. A call returns when its result is there (CPU), or has been queued on
the current stream (GPU), where CUDA graphs can capture it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d


class Communicator(Protocol):
    """A connection to the other ranks."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' tensors `x`. It may replace the contents of `x`."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return the ranks' tensors `x`, stacked in the order of ranks: [size, *x.shape]."""
        ...

    def all_to_all(self, x: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """Send `sent[r]` consecutive rows of `x` to each rank r. Return the `received[r]` rows from each, in order."""
        ...

    def muted(self) -> AbstractContextManager[object]:
        """Return a context in which calls exchange nothing, for steps that only compile kernels."""
        ...


class Alone:
    """The communicator of a single rank."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x.unsqueeze(0)

    def all_to_all(self, x: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        return x

    def muted(self) -> AbstractContextManager[object]:
        return nullcontext()


ALONE = Alone()


class GroupCommunicator:
    """Communicator over a process group of torch: gloo on CPUs, NCCL on GPUs."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._size = group, group.size()
        self._sum, self._gather = dist.AllreduceOptions(), c10d.AllgatherOptions()
        self._sum.asyncOp = self._gather.asyncOp = False
        self._is_muted = False

    @contextmanager
    def muted(self) -> Iterator[None]:
        self._is_muted = True
        try:
            yield
        finally:
            self._is_muted = False

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        if self._is_muted:
            return x
        _wait(self._group.allreduce([x], self._sum))
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        if self._is_muted:
            return x.repeat(self._size, *(1 for _ in x.shape[1:])).view(self._size, *x.shape)
        out = x.new_empty(self._size * x.shape[0], *x.shape[1:])
        _wait(self._group._allgather_base(out, x.contiguous(), self._gather))
        return out.view(self._size, *x.shape)

    def all_to_all(self, x: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        out = x.new_zeros(sum(received), *x.shape[1:])
        if not self._is_muted:
            _wait(self._group.alltoall_base(out, x.contiguous(), received, sent))
        return out


def _wait(work: dist.Work | None) -> None:
    if work is not None:  # None: queued on the current stream
        work.wait()
