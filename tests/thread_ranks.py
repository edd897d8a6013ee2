"""Ranks that are threads of one process, for tests of sharded models."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from quire.parallel.ranks import Parallel

T = TypeVar("T")


class Meeting:
    """A place where the threads of all ranks exchange tensors."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=20)
        self.tensors: list[torch.Tensor] = [torch.empty(0)] * size
        self.calls = 0

    def exchange(self, rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors that the ranks pass to this call, in the order of ranks."""
        self.tensors[rank] = x.clone()
        self.barrier.wait()
        everything = list(self.tensors)
        self.barrier.wait()
        self.calls += rank == 0
        return everything


class ThreadCommunicator:
    """Communicator of one rank in a `Meeting`."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank = meeting, rank

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.meeting.exchange(self.rank, x)).sum(0)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.meeting.exchange(self.rank, x))

    def all_to_all(self, x: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        parts = self.meeting.exchange(self.rank, x)
        counts = [part.tolist() for part in self.meeting.exchange(self.rank, torch.tensor(sent))]
        mine = [part.split(count)[self.rank] for part, count in zip(parts, counts)]
        assert [len(part) for part in mine] == received
        return torch.cat(mine)


def on_ranks(size: int, work: Callable[[Parallel], T]) -> list[T]:
    """Return the results of `work`, run in one thread for each of `size` ranks."""
    meeting = Meeting(size)

    def run(rank: int) -> T:
        try:
            return work(Parallel(rank, size, ThreadCommunicator(meeting, rank)))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
        errors = [future.exception() for future in futures]
    for error in errors:  # a broken barrier is a consequence of another rank's error
        if error is not None and not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]
