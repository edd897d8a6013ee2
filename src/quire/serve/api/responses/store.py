"""The store of responses and conversations, in memory, with limits per client. The least recently used are dropped.

What a client stores belongs to it. No other client can read or displace it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from quire.serve.api.responses.items import StoredItem
from quire.serve.http.auth import ApiClient


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as JSON, with the conversation up to its end, without instructions."""

    id: str
    response: bytes
    context: tuple[StoredItem, ...]  # its input, and what preceded that
    output: tuple[StoredItem, ...]  # complete items only

    @property
    def size(self) -> int:
        return len(self.response) + sum(len(item.data) for item in self.items)

    @property
    def items(self) -> tuple[StoredItem, ...]:
        return (*self.context, *self.output)


@dataclass(frozen=True, slots=True)
class StoredConversation:
    """A conversation, which is replaced whenever it changes."""

    id: str
    created_s: int
    metadata: dict[str, str]
    items: tuple[StoredItem, ...] = ()

    @property
    def size(self) -> int:
        pairs = self.metadata.items()
        return sum(len(key) + len(value) for key, value in pairs) + sum(len(item.data) for item in self.items)


Stored: TypeAlias = StoredResponse | StoredConversation
Kind = TypeVar("Kind", StoredResponse, StoredConversation)


class _Shelf:
    """What one client stores, least recently used first."""

    def __init__(self) -> None:
        self.stored: OrderedDict[str, Stored] = OrderedDict()
        self.size = 0  # bytes

    def put(self, stored: Stored) -> None:
        self.pop(stored.id)
        self.stored[stored.id] = stored
        self.size += stored.size

    def pop(self, stored_id: str) -> None:
        stored = self.stored.pop(stored_id, None)
        self.size -= stored.size if stored is not None else 0

    def drop_oldest(self) -> None:
        self.pop(next(iter(self.stored)))


class ResponseStore:
    """The responses and conversations of all clients. Owns them."""

    def __init__(self, max_stored: int, max_bytes: int, total_weight: float = 1.0) -> None:
        """Create an empty store.

        Args:
            max_stored: the limit of responses and conversations for each client.
            max_bytes: the limit for all clients together, who share it by weight. Items that responses have in common
                count once for each.
            total_weight: the sum of the weights of all clients.
        """
        self._max_stored, self._max_bytes, self._total_weight = max_stored, max_bytes, total_weight
        self._by_client: dict[str, _Shelf] = {}

    def __len__(self) -> int:
        return sum(len(shelf.stored) for shelf in self._by_client.values())

    @property
    def size(self) -> int:
        """Return the size of everything stored in bytes."""
        return sum(shelf.size for shelf in self._by_client.values())

    def put(self, client: ApiClient, stored: Stored) -> None:
        """Store a response or a conversation, in place of one with the same id; older ones of the client make room."""
        shelf = self._by_client.setdefault(client.name, _Shelf())
        shelf.put(stored)
        share = self._max_bytes * min(1.0, client.weight / self._total_weight)
        while len(shelf.stored) > self._max_stored or shelf.size > share:
            shelf.drop_oldest()

    def get(self, client: ApiClient, stored_id: str, kind: type[Kind]) -> Kind | None:
        """Return a response or a conversation of this client and mark it as used; None if there is none."""
        shelf = self._by_client.get(client.name)
        stored = shelf.stored.get(stored_id) if shelf is not None else None
        if shelf is None or not isinstance(stored, kind):
            return None
        shelf.stored.move_to_end(stored_id)
        return stored

    def delete(self, client: ApiClient, stored_id: str, kind: type[Kind]) -> bool:
        """Delete a response or a conversation of this client; return whether there was one."""
        if self.get(client, stored_id, kind) is None:
            return False
        self._by_client[client.name].pop(stored_id)
        return True

    def all_of(self, client: ApiClient) -> list[Stored]:
        """Return what a client stores, the most recently used first."""
        shelf = self._by_client.get(client.name)
        return list(reversed(shelf.stored.values())) if shelf is not None else []
