"""The store of responses, in memory, with limits per client. The least recently used responses are dropped first.

A response belongs to the client that requested it. No other client can read or displace it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.serve.api.protocol.responses import ResponseObject
from quire.serve.http.auth import ApiClient
from quire.serve.http.wire import encode


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, and the conversation up to its end without instructions. Both are JSON, so their size is known."""

    response: bytes
    conversation: bytes

    @property
    def size(self) -> int:
        return len(self.response) + len(self.conversation)

    def messages(self) -> list[dict[str, Any]]:
        """Decode the conversation, which may take milliseconds."""
        messages: list[dict[str, Any]] = msgspec.json.decode(self.conversation)
        return messages


class _ClientResponses:
    """The responses of one client, least recently used first."""

    def __init__(self) -> None:
        self.stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self.size = 0  # bytes

    def put(self, response_id: str, stored: StoredResponse) -> None:
        self.pop(response_id)
        self.stored[response_id] = stored
        self.size += stored.size

    def pop(self, response_id: str) -> StoredResponse | None:
        stored = self.stored.pop(response_id, None)
        self.size -= stored.size if stored is not None else 0
        return stored

    def drop_oldest(self) -> None:
        self.pop(next(iter(self.stored)))


class ResponseStore:
    """The responses of all clients. Owns them."""

    def __init__(self, max_responses: int, max_bytes: int, total_weight: float = 1.0) -> None:
        """Create an empty store.

        Args:
            max_responses: the limit for each client.
            max_bytes: the limit for all clients together, who share it by weight. Messages that conversations have in
                common count once for each.
            total_weight: the sum of the weights of all clients.
        """
        self._max_responses, self._max_bytes, self._total_weight = max_responses, max_bytes, total_weight
        self._by_client: dict[str, _ClientResponses] = {}

    def __len__(self) -> int:
        return sum(len(shelf.stored) for shelf in self._by_client.values())

    @property
    def size(self) -> int:
        """Bytes of all responses."""
        return sum(shelf.size for shelf in self._by_client.values())

    def put(self, client: ApiClient, response: ResponseObject, messages: Sequence[dict[str, Any]]) -> None:
        """Store a response; older ones of the same client make room for it."""
        shelf = self._by_client.setdefault(client.name, _ClientResponses())
        shelf.put(response.id, StoredResponse(encode(response), encode(messages)))
        share = self._max_bytes * min(1.0, client.weight / self._total_weight)
        while len(shelf.stored) > self._max_responses or shelf.size > share:
            shelf.drop_oldest()

    def get(self, client: ApiClient, response_id: str) -> StoredResponse | None:
        """Return a response of this client and mark it as used; None if there is none."""
        shelf = self._by_client.get(client.name)
        stored = shelf.stored.get(response_id) if shelf is not None else None
        if shelf is not None and stored is not None:
            shelf.stored.move_to_end(response_id)
        return stored

    def delete(self, client: ApiClient, response_id: str) -> bool:
        """Delete a response of this client; return whether there was one."""
        shelf = self._by_client.get(client.name)
        return shelf is not None and shelf.pop(response_id) is not None
