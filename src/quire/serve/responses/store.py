"""What is kept of responses, in memory and within bounds: those not used for the longest time go first.

A response belongs to the client that asked for it; nobody else finds it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.serve.auth import Client
from quire.serve.protocol.responses import ResponseObject
from quire.serve.wire import encode


@dataclass(frozen=True, slots=True)
class Stored:
    response: ResponseObject
    messages: tuple[dict[str, Any], ...]  # the conversation to its end, without instructions
    size: int  # bytes of both, as JSON


class ResponseStore:
    """Owns the responses of all clients: at most `most`, of `max_bytes` in all. Messages that conversations have in
    common are counted for each, so that the bound holds whichever of them are dropped."""

    def __init__(self, most: int, max_bytes: int) -> None:
        self._most, self._max_bytes = most, max_bytes
        self._stored: OrderedDict[tuple[str, str], Stored] = OrderedDict()  # the next to go first
        self.size = 0  # bytes

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, client: Client, response: ResponseObject, messages: Sequence[dict[str, Any]]) -> None:
        self.delete(client, response.id)
        stored = Stored(response, tuple(messages), len(encode(response)) + len(encode(messages)))
        self._stored[client.name, response.id] = stored
        self.size += stored.size
        while len(self._stored) > self._most or self.size > self._max_bytes:
            _, oldest = self._stored.popitem(last=False)
            self.size -= oldest.size

    def get(self, client: Client, response_id: str) -> Stored | None:
        found = self._stored.get((client.name, response_id))
        if found is not None:
            self._stored.move_to_end((client.name, response_id))
        return found

    def delete(self, client: Client, response_id: str) -> bool:
        """Whether it was there."""
        found = self._stored.pop((client.name, response_id), None)
        self.size -= found.size if found is not None else 0
        return found is not None
