"""The events of a response's stream, and its items as they grow.

created, in_progress, per item (output_item.added, its parts and deltas, output_item.done), completed

message, reasoning   content_part.added, ...delta ..., ...done, content_part.done
function_call        function_call_arguments.delta ..., function_call_arguments.done
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.serve.http.stream import named_event

ResponsesEvent = dict[str, Any]
Item = dict[str, Any]
_NAMES = {"message": "response.output_text", "reasoning": "response.reasoning_text"}
_CALL = "response.function_call_arguments"


class ResponseEvents:
    """The events of one stream. Owns the items, of which only the last may grow, and numbers the events."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._sequence = 0

    def event(self, kind: str, **fields: Any) -> ResponsesEvent:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence - 1, **fields}

    def start(self, item: Item) -> list[ResponsesEvent]:
        """Append an item without content and return the events that open it."""
        self.items.append(item)
        events = [self.event("response.output_item.added", output_index=len(self.items) - 1, item=dict(item))]
        if item["type"] != "function_call":
            events.append(self._item_event("response.content_part.added", part=_part(item, "", ())))
        return events

    def grow(self, text: str, logprobs: Sequence[Any]) -> ResponsesEvent:
        """Return the event for more text of the last item."""
        match self.items[-1]["type"]:
            case "function_call":
                return self._item_event(f"{_CALL}.delta", delta=text)
            case "reasoning":
                return self._item_event("response.reasoning_text.delta", delta=text)
        return self._item_event("response.output_text.delta", delta=text, logprobs=logprobs)

    def end(self, text: str, logprobs: Sequence[Any], status: str) -> list[ResponsesEvent]:
        """Give the last item its whole text and its status, and return the events that close it."""
        item = self.items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            events = [self._item_event(f"{_CALL}.done", name=item["name"], arguments=text)]
        else:
            part = _part(item, text, logprobs)
            item["content"] = [part]
            more = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
            events = [
                self._item_event(f"{_NAMES[item['type']]}.done", text=text, **more),
                self._item_event("response.content_part.done", part=part),
            ]
        done = self.event("response.output_item.done", output_index=len(self.items) - 1, item=item)
        return [*events, done]

    def _item_event(self, kind: str, **fields: Any) -> ResponsesEvent:
        """Return an event about the content of the last item."""
        item = self.items[-1]
        if item["type"] != "function_call":
            fields["content_index"] = 0
        return self.event(kind, item_id=item["id"], output_index=len(self.items) - 1, **fields)


def _part(item: Item, text: str, logprobs: Sequence[Any]) -> dict[str, Any]:
    if item["type"] == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def replay(response: dict[str, Any], after: int) -> bytes:
    """Return the stream of a complete response, each item in one piece.

    Args:
        response: the response, as JSON holds it.
        after: leave out the events up to this sequence number.
    """
    events = ResponseEvents()
    begun = {
        **response,
        "status": "in_progress",
        "output": [],
        "completed_at": None,
        "incomplete_details": None,
    }
    begun = {name: value for name, value in begun.items() if name not in ("usage", "receipt")}
    found = [events.event(f"response.{kind}", response=begun) for kind in ("created", "in_progress")]
    for item in response["output"]:
        is_call = item["type"] == "function_call"
        empty: Item = {"arguments": ""} if is_call else {"content": []}
        found += events.start({**item, **empty, "status": "in_progress"})
        part = {"text": item["arguments"]} if is_call else item["content"][0]
        logprobs = part.get("logprobs", [])
        if part["text"]:
            found.append(events.grow(part["text"], logprobs))
        found += events.end(part["text"], logprobs, item["status"])
    found.append(events.event(f"response.{response['status']}", response=response))
    return b"".join(named_event(event) for event in found if event["sequence_number"] > after)
