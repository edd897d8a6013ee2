"""Stored responses, in memory and within bounds of each client. Those not used for the longest time are dropped first.

A response belongs to the client that asked for it; no other client finds it, and none can displace it.
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
    """A response and its conversation to its end, without instructions, both as JSON: what is counted is what is held."""

    response: bytes
    conversation: bytes

    @property
    def size(self) -> int:
        return len(self.response) + len(self.conversation)

    def messages(self) -> list[dict[str, Any]]:
        """Decode the conversation. May take milliseconds."""
        found: list[dict[str, Any]] = msgspec.json.decode(self.conversation)
        return found


class _Shelf:
    """The responses of one client, the next to be dropped first."""

    def __init__(self) -> None:
        self.stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self.size = 0  # bytes

    def put(self, response_id: str, stored: StoredResponse) -> None:
        self.pop(response_id)
        self.stored[response_id] = stored
        self.size += stored.size

    def pop(self, response_id: str) -> StoredResponse | None:
        found = self.stored.pop(response_id, None)
        self.size -= found.size if found is not None else 0
        return found

    def drop_oldest(self) -> None:
        self.pop(next(iter(self.stored)))


class ResponseStore:
    """Owns the responses of all clients."""

    def __init__(self, most: int, max_bytes: int, total_weight: float = 1.0) -> None:
        """Keep at most `most` responses for each client, and `max_bytes` for all: each client has its share by weight.

        Messages that conversations have in common are counted for each.
        """
        self._most, self._max_bytes, self._total_weight = most, max_bytes, total_weight
        self._shelves: dict[str, _Shelf] = {}

    def __len__(self) -> int:
        return sum(len(shelf.stored) for shelf in self._shelves.values())

    @property
    def size(self) -> int:
        """Bytes of all responses."""
        return sum(shelf.size for shelf in self._shelves.values())

    def put(self, client: ApiClient, response: ResponseObject, messages: Sequence[dict[str, Any]]) -> None:
        """Keep a response; older ones of the same client make room for it."""
        shelf = self._shelves.setdefault(client.name, _Shelf())
        shelf.put(response.id, StoredResponse(encode(response), encode(messages)))
        share = self._max_bytes * min(1.0, client.weight / self._total_weight)
        while len(shelf.stored) > self._most or shelf.size > share:
            shelf.drop_oldest()

    def get(self, client: ApiClient, response_id: str) -> StoredResponse | None:
        """Return a response of this client, or None; it then counts as just used."""
        shelf = self._shelves.get(client.name)
        found = shelf.stored.get(response_id) if shelf is not None else None
        if shelf is not None and found is not None:
            shelf.stored.move_to_end(response_id)
        return found

    def delete(self, client: ApiClient, response_id: str) -> bool:
        """Delete a response of this client; return whether there was one."""
        shelf = self._shelves.get(client.name)
        return shelf is not None and shelf.pop(response_id) is not None
