"""Routers: the choice of a replica for a prompt.

`PrefixRouter` weighs the prompt tokens that a replica would have to compute against the requests that it already runs.
The tokens count up to a limit only, so that one popular prefix spreads over all replicas once it pays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from quire.serve.replicas.job import EngineJob
from quire.serve.replicas.replica import Replica
from quire.serve.settings import RoutingPolicy

_REQUEST_TOKENS = 64  # prompt tokens whose computation delays others as much as one more request in the batch
_MOST_MISSING = 2048  # uncached prompt tokens beyond which a detour is not worth more


class ReplicaRouter(Protocol):
    """The choice of a replica."""

    reads_names: bool  # whether `choose` reads `EngineJob.names`

    def choose(self, job: EngineJob, replicas: Sequence[Replica]) -> Replica:
        """Return one of `replicas`, all of which have room for the job."""
        ...


class PrefixRouter:
    """A router that prefers the replica with the longest cached prefix, unless it is too busy."""

    reads_names = True

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def choose(self, job: EngineJob, replicas: Sequence[Replica]) -> Replica:
        return min(replicas, key=lambda replica: self._cost(job, replica))

    def _cost(self, job: EngineJob, replica: Replica) -> tuple[float, int]:
        """Return the tokens of work before the job's first token, as an estimate, and the number of the replica."""
        missing = job.prompt_tokens - replica.cached_blocks(job.names) * self._block_size
        return min(missing, _MOST_MISSING) + _work(replica), replica.sent


class LoadRouter:
    """A router that picks the least loaded replica."""

    reads_names = False

    def choose(self, job: EngineJob, replicas: Sequence[Replica]) -> Replica:
        return min(replicas, key=lambda replica: (_work(replica), replica.sent))


class RoundRobin:
    """A router that takes the replicas in turn, to compare others with."""

    reads_names = False

    def __init__(self) -> None:
        self._last = -1

    def choose(self, job: EngineJob, replicas: Sequence[Replica]) -> Replica:
        found = next((r for r in replicas if r.number > self._last), replicas[0])
        self._last = found.number
        return found


def _work(replica: Replica) -> float:
    return replica.num_open * _REQUEST_TOKENS + replica.load.waiting_tokens


_ROUTERS: dict[str, Callable[[int], ReplicaRouter]] = {
    "prefix": PrefixRouter,
    "load": lambda block_size: LoadRouter(),
    "round-robin": lambda block_size: RoundRobin(),
}


def make_router(routing: RoutingPolicy, block_size: int, prefix_caching: bool) -> ReplicaRouter:
    """Return the router called `routing`; without a prefix cache `prefix` becomes `load`."""
    return _ROUTERS["load" if routing == "prefix" and not prefix_caching else routing](block_size)
