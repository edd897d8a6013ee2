"""The order in which jobs of several clients leave the API process for the replicas.

Priorities come first. Among clients the one with the fewest open requests per weight is next, and among equals the one
that has been served the fewest tokens per weight: the rule of the scheduler (core/waiting_queue.py), over all replicas.
"""

from __future__ import annotations

import heapq
from collections import Counter

from quire.serve.replicas.job import EngineJob, ExpectedBlocks


class ClientTurns:
    """Waiting jobs by client, and what each client has open on all replicas and has been served."""

    def __init__(self) -> None:
        self._lines: dict[str, list[tuple[int, int, EngineJob]]] = {}  # heaps of (priority, number, job)
        self.expected = ExpectedBlocks()  # of the waiting jobs
        self._waiting: dict[str, EngineJob] = {}  # by the id of each request; jobs not in here were removed
        self._open: Counter[str] = Counter()  # requests on replicas by client; no zeros
        self._weights: dict[str, float] = {}  # of the clients that have requests
        self._served: dict[str, float] = {}  # tokens over weight

    @property
    def num_waiting(self) -> int:
        """Return the number of engine requests that wait."""
        return len(self._waiting)

    def add(self, job: EngineJob) -> None:
        """Let a job wait."""
        client = job.client
        if client not in self._weights:
            self._lift(client)
        self._weights[client] = job.weight
        heapq.heappush(self._lines.setdefault(client, []), (job.priority, job.number, job))
        self._waiting.update((request.id, job) for request in job.requests)
        self.expected.add(job)

    def _lift(self, client: str) -> None:
        """Raise the counter of a client that returns to the lowest of the others: absence earns no credit."""
        others = [self._served.get(name, 0.0) for name in self._weights]
        lowest = min(others) if others else max(self._served.values(), default=0.0)
        self._served[client] = max(self._served.get(client, 0.0), lowest)

    def remove(self, request_id: str) -> EngineJob | None:
        """Remove the job of a request if it waits, and return it."""
        job = self._waiting.get(request_id)
        if job is not None:
            for request in job.requests:
                del self._waiting[request.id]
            self.expected.remove(job)
            self._drop_removed(job.client)
        return job

    def first(self) -> EngineJob | None:
        """Return the job whose turn it is; it keeps waiting until `take`."""
        if not self._lines:
            return None
        if len(self._lines) == 1:
            return next(iter(self._lines.values()))[0][2]
        return min((line[0] for line in self._lines.values()), key=self._key)[2]

    def _key(self, entry: tuple[int, int, EngineJob]) -> tuple[int, float, float, int]:
        priority, number, job = entry
        client = job.client
        return priority, self._open[client] / job.weight, self._served[client], number

    def take(self, job: EngineJob) -> None:
        """Count a job as sent to a replica."""
        self.remove(job.requests[0].id)
        self._open[job.client] += len(job.requests)
        self._served[job.client] += job.prompt_tokens / job.weight

    def end(self, job: EngineJob, requests: int, generated: int) -> None:
        """Count the end of some requests of a job on its replica.

        Args:
            job: the job.
            requests: number of requests that ended.
            generated: tokens generated since the last call for this job.
        """
        client = job.client
        self._served[client] += generated / job.weight
        self._open[client] -= requests
        if not self._open[client]:
            del self._open[client]
        self._forget(client)

    def holds_its_share(self, job: EngineJob, slots: int) -> bool:
        """Return whether the job's client has as many of all `slots` open as its weight entitles it to."""
        return self._open[job.client] >= slots * job.weight / sum(self._weights.values())

    def _drop_removed(self, client: str) -> None:
        line = self._lines[client]
        while line and line[0][2].requests[0].id not in self._waiting:
            heapq.heappop(line)
        if not line:
            del self._lines[client]
            self._forget(client)

    def _forget(self, client: str) -> None:
        """Drop the weight of a client without requests."""
        if client not in self._open and client not in self._lines:
            self._weights.pop(client, None)
