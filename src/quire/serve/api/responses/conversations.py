"""/v1/conversations: conversations that the server keeps, and their items."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.serve.api.context import client_of, read_request, server_of
from quire.serve.api.protocol.responses import (
    ConversationItems,
    ConversationObject,
    ConversationRequest,
    ConversationUpdate,
)
from quire.serve.api.responses.input import checked_metadata, messages_of
from quire.serve.api.responses.items import StoredItem, page_of, store_item
from quire.serve.api.responses.store import StoredConversation
from quire.serve.http.errors import ApiError, bad_request
from quire.serve.http.wire import json_response

_MAX_ITEMS = 20  # of one request, as in OpenAI's API


def _conversation(request: Request) -> StoredConversation:
    name = request.path_params["conversation_id"]
    found = server_of(request).responses.get(client_of(request), name, StoredConversation)
    if found is None:
        message = f"the conversation {name[:128]!r} does not exist or is no longer stored"
        raise ApiError(404, message, code="not_found")
    return found


def _described(conversation: StoredConversation) -> Response:
    return json_response(
        ConversationObject(
            id=conversation.id, created_at=conversation.created_s, metadata=conversation.metadata
        )
    )


async def _checked_items(
    request: Request, items: Sequence[dict[str, Any]], known: Sequence[StoredItem]
) -> list[StoredItem]:
    """Return new items of a conversation as they are stored. Raise ApiError 400 if Quire does not support one."""
    if len(items) > _MAX_ITEMS:
        raise bad_request(f"items must hold at most {_MAX_ITEMS} items, got {len(items)}", "items")

    def check() -> list[StoredItem]:
        try:
            messages_of(items, [item.decoded() for item in known])
        except ApiError as error:
            message = error.message.replace("input[", "items[", 1)
            raise bad_request(message, "items") from None
        return [store_item(item) for item in items]

    return await server_of(request).engine.in_thread(client_of(request), check)


async def create_conversation(request: Request) -> Response:
    """Create a conversation, whose items responses read and extend."""
    server, client = server_of(request), client_of(request)
    body, _ = await read_request(request, ConversationRequest)
    if server.settings.max_stored_responses < 1:
        raise bad_request("conversations are not stored: the server runs with --max-stored-responses 0")
    metadata = checked_metadata(body.metadata)
    items = await _checked_items(request, body.items or (), ())
    found = StoredConversation(f"conv_{uuid.uuid4().hex}", int(time.time()), metadata, tuple(items))
    server.responses.put(client, found)
    return _described(found)


async def get_conversation(request: Request) -> Response:
    """Return a conversation without its items."""
    return _described(_conversation(request))


async def update_conversation(request: Request) -> Response:
    """Replace the metadata of a conversation."""
    body, _ = await read_request(request, ConversationUpdate)
    changed = replace(_conversation(request), metadata=checked_metadata(body.metadata))
    server_of(request).responses.put(client_of(request), changed)
    return _described(changed)


async def delete_conversation(request: Request) -> Response:
    """Delete a conversation and its items."""
    found = _conversation(request)
    server_of(request).responses.delete(client_of(request), found.id, StoredConversation)
    return json_response({"id": found.id, "object": "conversation.deleted", "deleted": True})


async def list_items(request: Request) -> Response:
    """Return a page of the items of a conversation."""
    return json_response(page_of(_conversation(request).items, request.query_params))


async def add_items(request: Request) -> Response:
    """Append at most 20 items to a conversation."""
    body, _ = await read_request(request, ConversationItems)
    new = await _checked_items(request, body.items, _conversation(request).items)
    current = _conversation(request)  # it may have changed while the items were checked
    changed = replace(current, items=(*current.items, *new))
    server_of(request).responses.put(client_of(request), changed)
    return json_response(page_of(new, {"order": "asc"}))


def _item(request: Request) -> tuple[StoredConversation, StoredItem]:
    conversation, item_id = _conversation(request), request.path_params["item_id"]
    item = next((item for item in conversation.items if item.id == item_id), None)
    if item is None:
        raise ApiError(404, f"the conversation has no item {item_id[:128]!r}", code="not_found")
    return conversation, item


async def get_item(request: Request) -> Response:
    """Return one item of a conversation."""
    return Response(_item(request)[1].data, media_type="application/json")


async def delete_item(request: Request) -> Response:
    """Delete an item of a conversation; return the conversation."""
    conversation, item = _item(request)
    changed = replace(conversation, items=tuple(other for other in conversation.items if other is not item))
    server_of(request).responses.put(client_of(request), changed)
    return _described(changed)
