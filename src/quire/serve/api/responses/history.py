"""The items that precede a request of the Responses API, and what is kept of it and its answer.

previous_response_id   the context and the output of that response
conversation           its items; input and output are appended to it when the answer is complete
item_reference         an item of any response or conversation that is stored
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.serve.api.protocol.chat import ChatRequest
from quire.serve.api.protocol.responses import InputTokensRequest, ResponseObject
from quire.serve.api.responses.input import chat_of, conversation_id, input_items
from quire.serve.api.responses.items import StoredItem, store_item
from quire.serve.api.responses.store import ResponseStore, Stored, StoredConversation, StoredResponse
from quire.serve.http.auth import ApiClient
from quire.serve.http.errors import ApiError, bad_request
from quire.serve.http.wire import encode


@dataclass(slots=True)
class RequestHistory:
    """The stored items that a request of `client` continues or refers to."""

    store: ResponseStore
    client: ApiClient
    conversation: str | None  # its id
    items: tuple[StoredItem, ...]
    referable: list[Stored]  # the most recently used first

    def chat(self, request: InputTokensRequest) -> tuple[ChatRequest, list[str]]:
        """Return the chat of a request and its warnings; decoding the history may take milliseconds."""
        if isinstance(request.input, list):
            request.input = self._resolved(request.input)
        return chat_of(request, [item.decoded() for item in self.items])

    def _resolved(self, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return `items` with the stored items instead of references to them."""
        if not any(item.get("type") == "item_reference" for item in items):
            return items
        known = {item.id: item for stored in reversed(self.referable) for item in stored.items}
        found = []
        for i, item in enumerate(items):
            if item.get("type") == "item_reference":
                wanted = str(item.get("id"))
                if wanted not in known:
                    raise bad_request(
                        f"input[{i}] is an item_reference to {wanted[:64]!r}, which is not or no longer stored",
                        "input",
                    )
                item = known[wanted].decoded()
            found.append(item)
        return found

    def keep(self, given: Sequence[StoredItem], response: ResponseObject, stored: bool) -> None:
        """Store a complete response if `stored`, and append its input and output to the conversation."""
        output = tuple(
            StoredItem(item["id"], encode(item)) for item in response.output if item["status"] == "completed"
        )
        if stored:
            context = (*self.items, *given)
            self.store.put(self.client, StoredResponse(response.id, encode(response), context, output))
        if self.conversation is not None:
            current = self.store.get(self.client, self.conversation, StoredConversation)
            if current is not None:  # it may have been deleted meanwhile
                items = (*current.items, *given, *output)
                self.store.put(self.client, replace(current, items=items))


def history_of(store: ResponseStore, client: ApiClient, request: InputTokensRequest) -> RequestHistory:
    """Find the items that a request continues.

    Raises:
        ApiError: 400 for a response or a conversation that is not stored.
    """
    conversation, previous_id = conversation_id(request), request.previous_response_id
    items: tuple[StoredItem, ...] = ()
    if conversation is not None:
        known = store.get(client, conversation, StoredConversation)
        if known is None:
            message = f"conversation: {conversation[:128]!r} does not exist or is no longer stored"
            raise ApiError(400, message, "conversation", "conversation_not_found")
        items = known.items
    elif previous_id is not None:
        previous = store.get(client, previous_id, StoredResponse)
        if previous is None:
            message = f"previous_response_id: the response {previous_id[:128]!r} does not exist or is no longer stored"
            raise ApiError(400, message, "previous_response_id", "previous_response_not_found")
        items = previous.items
    return RequestHistory(store, client, conversation, items, store.all_of(client))


def stored_input(request: InputTokensRequest) -> list[StoredItem]:
    """Return the items of a request that has been checked, as they are stored."""
    return [store_item(item) for item in input_items(request)]
