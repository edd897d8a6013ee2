"""Items of the Responses API as they are stored and listed: with an id, a status, and content in parts."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from quire.serve.api.protocol.responses import ItemList
from quire.serve.http.errors import bad_request
from quire.serve.http.wire import encode

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}
_MAX_ID_CHARS = 128
_MOST, _DEFAULT = 100, 20  # items of a page, as in OpenAI's API


class StoredItem(NamedTuple):
    """An item as JSON, so that its size is known."""

    id: str
    data: bytes

    def decoded(self) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.json.decode(self.data)
        return found


def store_item(item: dict[str, Any]) -> StoredItem:
    """Return an item of a request, which has been checked, in the form of items of answers."""
    kind = item.get("type", "message")
    given = item.get("id")
    is_id = isinstance(given, str) and 0 < len(given) <= _MAX_ID_CHARS
    item_id = given if is_id else f"{_PREFIXES.get(kind, 'item')}_{uuid.uuid4().hex}"
    whole = {"status": "completed", **item, "type": kind, "id": item_id}
    if whole["status"] is None:
        whole["status"] = "completed"
    if kind == "message":
        whole["content"] = _parts(item["content"], item["role"])
    elif kind == "reasoning":
        whole.setdefault("summary", [])
    return StoredItem(str(item_id), encode(whole))


def _parts(content: Any, role: str) -> list[dict[str, Any]]:
    if role != "assistant":
        kinds = {"type": "input_text"}
        return [kinds | {"text": content}] if isinstance(content, str) else content
    parts = [{"type": "output_text", "text": content}] if isinstance(content, str) else content
    return [
        {"annotations": [], "logprobs": [], **part} if part["type"] == "output_text" else part
        for part in parts
    ]


def page_of(items: Sequence[StoredItem], query: Mapping[str, str]) -> ItemList:
    """Return the page of `items` that the parameters `limit`, `order` and `after` of a URL ask for.

    Raises:
        ApiError: 400 for a parameter out of range.
    """
    limit_text, order, after = (
        query.get("limit", str(_DEFAULT)),
        query.get("order", "desc"),
        query.get("after"),
    )
    if not limit_text.isascii() or not limit_text.isdigit() or not 1 <= int(limit_text[:9]) <= _MOST:
        raise bad_request(f"limit must be between 1 and {_MOST}, got {limit_text[:16]!r}", "limit")
    if order not in ("asc", "desc"):
        raise bad_request(f"order must be asc or desc, got {order[:16]!r}", "order")
    ordered = list(items) if order == "asc" else list(reversed(items))
    start = 0
    if after is not None:
        start = next((i + 1 for i, item in enumerate(ordered) if item.id == after), -1)
        if start < 0:
            raise bad_request(f"after names {after[:64]!r}, which is not one of the items", "after")
    page = ordered[start : start + int(limit_text)]
    return ItemList(
        data=[msgspec.Raw(item.data) for item in page],
        first_id=page[0].id if page else "",
        last_id=page[-1].id if page else "",
        has_more=start + len(page) < len(ordered),
    )
