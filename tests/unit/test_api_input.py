"""Requests of the other APIs converted into chats, stored responses, and answers as content blocks."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_chat_template import CALLS, PLAIN, SYSTEM, TEMPLATES, TOOLS, ours, outcome

from quire.frontend.templates.chat import check_messages
from quire.frontend.templates.traits import TemplateTraits
from quire.serve.answer.content_blocks import BlockDelta, BlockEnd, BlockStart, ContentBlocks
from quire.serve.answer.reasoning import ReasoningParser
from quire.serve.answer.reasoning_formats import THINK
from quire.serve.answer.tools.calls import CallOptions
from quire.serve.answer.tools.hermes import HermesParser
from quire.serve.api.anthropic.input import chat_of as chat_of_messages
from quire.serve.api.protocol.messages import MessagesRequest
from quire.serve.api.protocol.responses import ResponsesRequest
from quire.serve.api.responses.input import chat_of as chat_of_items
from quire.serve.api.responses.items import StoredItem
from quire.serve.api.responses.store import ResponseStore, StoredConversation, StoredResponse
from quire.serve.http.auth import ApiClient
from quire.serve.http.errors import ApiError
from quire.types import CompletionOutput, RequestError

WORDS = [
    "user",
    "assistant",
    "system",
    "text",
    "tool_use",
    "tool_result",
    "thinking",
    "message",
    "function_call",
]
WORDS += [
    "function_call_output",
    "reasoning",
    "input_text",
    "output_text",
    "reasoning_text",
    "document",
    "",
    "a",
]
KEYS = [
    "role",
    "content",
    "type",
    "text",
    "id",
    "name",
    "input",
    "tool_use_id",
    "thinking",
    "call_id",
    "output",
]
KEYS += ["tools", "mode", "format", "effort", "arguments", "source", "data", "summary"]
leaf = st.sampled_from(WORDS) | st.none() | st.booleans() | st.integers(0, 3)
value = st.recursive(
    leaf,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5),
    max_leaves=16,
)
thing = st.dictionaries(st.sampled_from(KEYS), value, max_size=6)


@given(st.lists(thing, max_size=4), value, st.lists(thing, max_size=2), thing)
def test_any_messages(
    given: list[dict[str, Any]], system: Any, tools: list[dict[str, Any]], other: dict[str, Any]
) -> None:
    """Random input gives either an error that names the field or messages that templates can read."""
    try:
        chat, _ = chat_of_messages(
            MessagesRequest(
                messages=given,
                max_tokens=1,
                system=system,
                tools=tools,
                tool_choice=other,
                thinking=other,
                output_config=other,
            )
        )
        check_messages(chat.messages, TemplateTraits())
    except (ApiError, RequestError):
        pass


@given(st.lists(thing, max_size=5), st.lists(thing, max_size=2), thing)
def test_any_items(given: list[dict[str, Any]], tools: list[dict[str, Any]], other: dict[str, Any]) -> None:
    try:
        wanted = ResponsesRequest(input=given, tools=tools, tool_choice=other, text=other, reasoning=other)
        chat, _ = chat_of_items(wanted, [])
        check_messages(chat.messages, TemplateTraits())
    except (ApiError, RequestError):
        pass


def test_many_small_pieces_are_put_together_at_once() -> None:
    """The time is linear in the number of neighbours; quadratic time is minutes for a body of megabytes."""
    began = time.process_time()
    says = [{"role": "user", "content": "x" * 20}] * 200_000
    chat, _ = chat_of_messages(MessagesRequest(messages=says, max_tokens=1))
    assert len(chat.messages) == 1 and len(chat.messages[0]["content"]) == 21 * 200_000 - 1
    thinks = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x" * 20}]}
    chat, _ = chat_of_items(ResponsesRequest(input=[thinks] * 200_000), [])
    assert len(chat.messages) == 1 and len(chat.messages[0]["reasoning_content"]) == 20 * 200_000
    assert time.process_time() - began < 20


def as_blocks(chat: list[dict[str, Any]]) -> MessagesRequest:
    """Return a chat of test_chat_template in the form of Anthropic's API."""
    found: list[dict[str, Any]] = []
    for message in [m for m in chat if m["role"] != "system"]:
        content: Any = message["content"]
        role = message["role"]
        if role == "tool":
            role = "user"
            content = [{"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": content}]
        for call in message.get("tool_calls", ()):
            function = call["function"]
            used = {"id": call["id"], "name": function["name"], "input": function["arguments"]}
            content = [{"type": "tool_use", **used}]
        found.append({"role": role, "content": content})
    system = next((m["content"] for m in chat if m["role"] == "system"), None)
    return MessagesRequest(messages=found, system=system, max_tokens=1)


def as_items(chat: list[dict[str, Any]]) -> ResponsesRequest:
    """Return a chat of test_chat_template in the form of OpenAI's Responses API."""
    found: list[dict[str, Any]] = []
    for message in [m for m in chat if m["role"] != "system"]:
        if message["role"] == "tool":
            output = {"call_id": message["tool_call_id"], "output": message["content"]}
            found.append({"type": "function_call_output", **output})
        elif "tool_calls" not in message:
            found.append({"role": message["role"], "content": message["content"]})
        for call in message.get("tool_calls", ()):
            function = call["function"]
            used = {"name": function["name"], "arguments": json.dumps(function["arguments"])}
            found.append({"type": "function_call", "call_id": call["id"], **used})
    instructions = next((m["content"] for m in chat if m["role"] == "system"), None)
    return ResponsesRequest(input=found, instructions=instructions)


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda p: p.stem if p else "absent")
def test_prompts_are_those_of_chats(path: Path | None) -> None:
    if path is None:
        pytest.skip("shared/data/chat_templates is absent")
    source = path.read_text(encoding="utf-8")
    extra = {"functions": "[]", "datetime": "noon"} if "firefunction" in path.stem else {}
    for chat in (PLAIN, SYSTEM, CALLS):
        for tools in (None, TOOLS):
            prompts = [
                outcome(lambda m=messages, t=tools: ours(source, m, tools=t, template_kwargs=extra))
                for messages in (
                    chat,
                    chat_of_messages(as_blocks(chat))[0].messages,
                    chat_of_items(as_items(chat), [])[0].messages,
                )
            ]
            assert prompts[0] == prompts[1] == prompts[2]


def test_the_store_keeps_to_the_bounds_of_each_client() -> None:
    item = StoredItem("msg_1", b"x" * 1000)

    def response(name: str, items: int = 1) -> StoredResponse:
        return StoredResponse(name, b"y" * 1000, (item,) * (items - 1), (item,))

    def ids(client: ApiClient) -> list[str]:
        return [stored.id for stored in store.all_of(client)]

    a, b = ApiClient("a"), ApiClient("b", weight=3.0)
    store = ResponseStore(3, 40_000, total_weight=4.0)
    store.put(b, response("1"))
    for name in "1234":
        store.put(a, response(name))
    assert ids(a) == ["4", "3", "2"] and ids(b) == ["1"]
    found = store.get(a, "2", StoredResponse)
    assert found is not None and found.items == (item,) and ids(a) == ["2", "4", "3"]
    store.put(a, response("4"))  # again
    assert ids(a) == ["4", "2", "3"] and store.size == 8000
    store.put(a, response("5", 7))  # older ones make room
    assert ids(a) == ["5", "4"] and store.size == 12_000
    store.put(a, response("6", 12))  # larger than the client's share
    assert not ids(a) and ids(b) == ["1"]
    store.put(b, response("7", 12))
    assert not store.delete(a, "7", StoredResponse) and store.delete(b, "7", StoredResponse)
    for number in range(50):
        store.put(a, response(f"n{number}"))
    assert ids(b) == ["1"] and len(store) == 4
    assert store.delete(b, "1", StoredResponse) and not store.delete(b, "1", StoredResponse)

    store.put(b, StoredConversation("conv_1", 0, {"who": "me"}, (item, item)))
    assert store.get(b, "conv_1", StoredResponse) is None and not store.delete(b, "conv_1", StoredResponse)
    known = store.get(b, "conv_1", StoredConversation)
    assert known is not None and known.size == 2005
    assert store.delete(b, "conv_1", StoredConversation) and not ids(b)


TEXT = "<think>\nSo\n</think>\n\nHi <tool_call>\n" + '{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def blocks() -> ContentBlocks:
    return ContentBlocks(ReasoningParser(THINK, False, HermesParser(CallOptions(frozenset("f"), hold=False))))


@pytest.mark.parametrize("size", range(1, len(TEXT) + 1))
def test_pieces_of_any_size_make_the_same_blocks(size: int) -> None:
    found, seen, opened = blocks(), [], None
    for at in range(0, len(TEXT), size):
        end = "stop" if at + size >= len(TEXT) else None
        for change in found.add(CompletionOutput(0, TEXT[at : at + size], [], finish_reason=end)):
            if isinstance(change, BlockStart):
                assert opened is None
                opened = change.block
                seen.append([opened.kind, opened.name, ""])
            elif isinstance(change, BlockDelta):
                assert opened is change.block and change.text
                seen[-1][2] += change.text
            else:
                assert isinstance(change, BlockEnd) and opened is change.block
                opened = None
    assert opened is None and [block.text for block in found.all] == [text for _, _, text in seen]
    assert (
        seen == [["reasoning", "", "So"], ["text", "", "Hi"], ["call", "f", '{"a": 1}']] and found.has_calls
    )
