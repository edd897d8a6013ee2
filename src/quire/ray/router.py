"""The request router of the Ray Serve deployment: prompts go where their beginning went before (affinity.py)."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ray.serve.request_router import (
    FIFOMixin,
    PendingRequest,
    ReplicaID,
    ReplicaResult,
    RequestRouter,
    RunningReplica,
)

from quire.ray.affinity import PrefixAffinity


class PrefixRequestRouter(FIFOMixin, RequestRouter):
    """A router of Ray Serve that prefers replicas with the prompt's prefix, unless they are too busy.

    The first argument of a request is the list of its prompt's pieces. Requests of one conversation come one after the
    other, so the requests that this router has open are load enough to know.
    """

    def initialize_state(self, **settings: Any) -> None:
        """Start without knowledge; called by Ray Serve."""
        self._affinity = PrefixAffinity()
        self._loads: Counter[ReplicaID] = Counter()
        self._places: dict[str, ReplicaID] = {}  # of open requests

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas in the order in which to try them."""
        replicas = {replica.replica_id: replica for replica in candidate_replicas}
        self._affinity.keep(replicas)
        pieces = _pieces(pending_request)
        ranked = self._affinity.rank(pieces, {name: self._loads[name] for name in replicas})
        return [[replicas[name]] for name in ranked]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult
    ) -> None:
        """Remember where a request went."""
        self._affinity.note(_pieces(pending_request), replica_id)
        self._places[pending_request.metadata.internal_request_id] = replica_id
        self._loads[replica_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Count the end of a request."""
        if (place := self._places.pop(internal_request_id, None)) is not None:
            self._loads[place] -= 1
            if not self._loads[place]:
                del self._loads[place]


def _pieces(request: PendingRequest | None) -> list[bytes]:
    found = request.args[0] if request is not None and request.args else []
    return found if isinstance(found, list) else []
