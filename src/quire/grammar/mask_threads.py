"""Threads that compute masks, so that the step loop can stop waiting for a slow one.

The library cannot be interrupted, but it releases the GIL. A job that is not done in time continues in the background.
Jobs of the step loop and background jobs have separate threads, and a step-loop thread that is stuck in one job is
replaced. All threads have the priority of the step loop, which would otherwise wait for a thread of lower priority
that is about to take the GIL.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol, TypeVar

_STACK_BYTES = 64 << 20  # address space only: a grammar that passed the helper process needs less than 2 MiB
_STUCK_S = 0.010  # time in one job after which a thread is replaced


def start_thread(target: Callable[[], None], name: str) -> threading.Thread:
    """Start a daemon thread with a stack that the library cannot overflow."""
    before = threading.stack_size(_STACK_BYTES)
    try:
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread
    finally:
        threading.stack_size(before)


class MaskJob(Protocol):
    """A job that one thread works on at a time."""

    def work(self) -> None:
        """Do the job. Must not raise."""
        ...


J = TypeVar("J", bound=MaskJob)


@dataclass(slots=True, eq=False)
class _MaskTicket:
    """A queued job. If `late`, no `run` waits for it, and `finished` returns it."""

    job: MaskJob
    late: bool
    done: bool = False


@dataclass(slots=True, eq=False)
class _MaskWorker:
    """The state of one thread."""

    began_s: float = math.inf  # start of its job on the monotonic clock; infinity without a job
    replaced: bool = False


class MaskThreads:
    """The threads that compute masks, and their queues. Threads start with the first job.

    Args:
        wakeup: an event to set when a background job is done.
        patience_s: longest wait of `run`, in seconds.
    """

    def __init__(self, wakeup: threading.Event, patience_s: float) -> None:
        self.patience_s = patience_s
        self._wakeup = wakeup
        cores = os.cpu_count() or 1
        self._max_replaced = min(16, cores)  # bounds the stuck threads, which compete with the step loop
        self._counts = {"quick": max(1, min(8, cores // 2)), "slow": max(1, min(4, cores // 4))}
        self._queues: dict[str, SimpleQueue[_MaskTicket | None]] = {
            name: SimpleQueue() for name in self._counts
        }
        self._changed = threading.Condition()  # guards what follows
        self._workers: list[_MaskWorker] = []  # threads of the queue "quick"
        self._unfinished = 0  # jobs that `run` waits for
        self._finished: list[MaskJob] = []
        self._started = False

    def run(self, jobs: Sequence[J]) -> list[J]:
        """Do jobs in parallel. Return those not done after `patience_s`, which continue in the background."""
        self._start()
        tickets = [_MaskTicket(job, late=False) for job in jobs]
        deadline_s = time.monotonic() + self.patience_s
        with self._changed:
            self._unfinished = len(tickets)
            for ticket in tickets:
                self._queues["quick"].put(ticket)
            while self._unfinished and (left_s := deadline_s - time.monotonic()) > 0:
                self._changed.wait(min(left_s, _STUCK_S))
                self._replace_stuck()
            late = [ticket for ticket in tickets if not ticket.done]
            for ticket in late:
                ticket.late = True
            self._unfinished = 0
        return [job for job, ticket in zip(jobs, tickets) if ticket.late]

    def submit(self, job: MaskJob) -> None:
        """Do a job in the background."""
        self._start()
        self._queues["slow"].put(_MaskTicket(job, late=True))

    def finished(self) -> list[MaskJob]:
        """Return the background jobs done since the last call."""
        if not self._started:
            return []
        with self._changed:
            self._replace_stuck()
            finished, self._finished = self._finished, []
            return finished

    def close(self) -> None:
        """Let the threads end after their current jobs. Does not wait for them."""
        for name, queue in self._queues.items():
            for _ in range(self._counts[name] + self._max_replaced):
                queue.put(None)

    def _start(self) -> None:
        if not self._started:
            self._started = True
            for _ in range(self._counts["quick"]):
                self._add_quick()
            for i in range(self._counts["slow"]):
                start_thread(lambda: self._serve("slow", _MaskWorker()), f"quire-slow-masks-{i}")

    def _add_quick(self) -> None:
        worker = _MaskWorker()
        self._workers.append(worker)
        start_thread(lambda: self._serve("quick", worker), "quire-masks")

    def _replace_stuck(self) -> None:
        """Start a replacement for each stuck thread. The caller holds the lock."""
        now_s = time.monotonic()
        for worker in list(self._workers):
            if now_s - worker.began_s > _STUCK_S and not worker.replaced:
                if sum(other.replaced for other in self._workers) >= self._max_replaced:
                    return
                worker.replaced = True
                self._add_quick()

    def _serve(self, name: str, worker: _MaskWorker) -> None:
        while not worker.replaced and (ticket := self._queues[name].get()) is not None:
            worker.began_s = time.monotonic()
            ticket.job.work()
            with self._changed:
                worker.began_s = math.inf
                self._complete(ticket)
                if worker.replaced:
                    self._workers.remove(worker)

    def _complete(self, ticket: _MaskTicket) -> None:
        ticket.done = True
        if ticket.late:
            self._finished.append(ticket.job)
            self._wakeup.set()
        else:
            self._unfinished -= 1
            if not self._unfinished:
                self._changed.notify_all()
