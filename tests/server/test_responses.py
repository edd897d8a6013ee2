"""The Responses API: the OpenAI client with the demo model, and every event against OpenAI's description."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest
from serving import Check, Server, serving
from test_messages import SHOWS, THINKS
from test_messages import events as named_events
from training.tools import TOOLS as DEMO_TOOLS

PATH = "/v1/responses"
SUM, ASK = "What is 27 + 45?", "What is the weather in Oakford?"
TWO = "What is the weather in Oakford? What is the weather in Westbrook?"
TOOLS = [
    {"type": "function", "strict": None, **tool.schema()["function"]}
    for tool in DEMO_TOOLS
    if tool.name in ("get_weather", "find_object", "add")
]
GIRL = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture
def client(demo: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0)


def body(given: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "demo", "input": given, "temperature": 0, "max_output_tokens": 100, **fields}


def told(stream: list[dict[str, Any]]) -> dict[str, Any]:
    """Check the order and the pieces of a stream; return its response."""
    assert [event["sequence_number"] for event in stream] == list(range(len(stream)))
    kinds = [event["type"].removeprefix("response.") for event in stream]
    assert kinds[:2] == ["created", "in_progress"] and kinds[-1] in ("completed", "incomplete")
    assert stream[0]["response"]["status"] == "in_progress" and stream[0]["response"]["output"] == []
    final = stream[-1]["response"]
    assert all(event["response"]["id"] == final["id"] for event in stream if "response" in event)
    done: list[dict[str, Any]] = []
    for event, kind in zip(stream[2:-1], kinds[2:-1]):
        assert event["output_index"] == len(done)
        if kind == "output_item.added":
            begun, parts, pieces = event["item"], [], []
            assert begun["status"] == "in_progress" and not (begun.get("content") or begun.get("arguments"))
            continue
        assert event.get("item_id", begun["id"]) == begun["id"] and event.get("content_index", 0) == 0
        if kind.endswith("part.added"):
            parts.append(event["part"])
            assert event["part"]["text"] == ""
        elif kind.endswith(".delta"):
            assert event["delta"]
            pieces.append(event["delta"])
        elif kind.endswith("part.done"):
            assert event["part"]["text"] == "".join(pieces) and len(parts) == 1
        elif kind == "output_item.done":
            assert event["item"]["id"] == begun["id"] and event["item"]["status"] != "in_progress"
            done.append(event["item"])
        else:
            assert kind.endswith(".done")
            assert (event["text"] if "text" in event else event["arguments"]) == "".join(pieces)
    assert done == final["output"]
    return final


def both(server: Server, asked: dict[str, Any], check: Check) -> dict[str, Any]:
    """Return the response, checked to be the same whole and streamed, and against OpenAI's description."""
    found = server.post(PATH, asked)
    assert found.status_code == 200, found.text
    whole, stream = found.json(), named_events(server.post(PATH, {**asked, "stream": True}))
    check(whole, "Response")
    for event in stream:
        check(event, "ResponseStreamEvent")
    streamed = told(stream)
    for response in (whole, streamed):
        assert response.pop("id").startswith("resp_")
        for name in ("created_at", "completed_at"):
            response.pop(name)
        response["usage"].pop("input_tokens_details")
        for item in response["output"]:
            assert item.pop("id").split("_")[0] in ("msg", "rs", "fc")
            item.pop("call_id", None)
    assert streamed == whole
    return whole


def texts(response: dict[str, Any]) -> str:
    items = [item for item in response["output"] if item["type"] == "message"]
    return "".join(part["text"] for item in items for part in item["content"])


# ------------------------------------------------------------------------------------ the demo model


def test_the_client(client: openai.OpenAI) -> None:
    response = client.responses.create(model="demo", input=SUM, temperature=0, store=False)
    assert response.output_text == "27 + 45 = 72" and response.status == "completed"
    assert response.object == "response" and response.model == "demo" and response.error is None
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)
    with pytest.raises(openai.BadRequestError, match="does not exist or is no longer stored") as missing:
        client.responses.create(model="demo", input="And?", previous_response_id=response.id)
    assert missing.value.code == "previous_response_not_found"


def test_the_client_streams(client: openai.OpenAI) -> None:
    with client.responses.stream(model="demo", input=SUM, temperature=0) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert len(pieces) > 1 and "".join(pieces) == final.output_text == "27 + 45 = 72"
    events = list(client.responses.create(model="demo", input=SUM, temperature=0, stream=True))
    assert events[0].type == "response.created" and events[-1].type == "response.completed"


def test_the_async_client_answers_many_at_once(demo: Server) -> None:
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0) as client:

            async def ask(a: int) -> str:
                found = await client.responses.create(model="demo", input=f"What is {a} + 45?", temperature=0)
                return found.output_text

            return await asyncio.gather(*(ask(a) for a in range(20, 36)))

    assert asyncio.run(run()) == [f"{a} + 45 = {a + 45}" for a in range(20, 36)]


def test_the_client_parses(client: openai.OpenAI) -> None:
    class Girl(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="forbid")
        name: str
        age: int

    response = client.responses.parse(
        model="demo", input="Tell me about a girl.", text_format=Girl, temperature=0
    )
    assert isinstance(response.output_parsed, Girl) and response.output_parsed.name

    class get_weather(pydantic.BaseModel):
        """Get the current weather in a city."""

        city: str

    tools = [openai.pydantic_function_tool(get_weather)]
    response = client.responses.parse(model="demo", input=ASK, tools=tools, temperature=0)
    assert response.output[0].parsed_arguments == get_weather(city="Oakford")


@pytest.mark.parametrize("stored", [True, False])
def test_a_function_is_called_and_answered_from(client: openai.OpenAI, stored: bool) -> None:
    options: dict[str, Any] = {"model": "demo", "tools": TOOLS, "temperature": 0, "store": stored}
    first = client.responses.create(input=ASK, **options)
    (call,) = first.output
    assert (call.type, call.name, json.loads(call.arguments)) == (
        "function_call",
        "get_weather",
        {"city": "Oakford"},
    )
    output = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": '{"condition": "sunny", "temperature": 21}',
    }
    if stored:
        second = client.responses.create(input=[output], previous_response_id=first.id, **options)
    else:
        second = client.responses.create(input=[{"role": "user", "content": ASK}, call, output], **options)
    assert second.output_text == "The weather in Oakford is sunny, with 21 degrees."
    assert second.previous_response_id == (first.id if stored else None)


def test_responses_are_kept_and_deleted(client: openai.OpenAI, check: Check) -> None:
    first = client.responses.create(
        model="demo", input=SUM, temperature=0, metadata={"who": "me"}, instructions="Hi"
    )
    assert client.responses.retrieve(first.id) == first
    second = client.responses.create(
        model="demo", input="What is 1 + 1?", temperature=0, previous_response_id=first.id, stream=True
    )
    final = list(second)[-1].response
    assert final.usage.input_tokens > first.usage.input_tokens and "1 + 1 = 2" in final.output_text
    client.responses.delete(first.id)
    for call in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            call(first.id)
    third = client.responses.create(model="demo", input="And 2 + 2?", previous_response_id=final.id)
    assert third.status == "completed"  # it knows the whole conversation, deleted beginnings included


@pytest.mark.parametrize(
    ("fields", "kinds"),
    [
        ({}, ["message"]),
        ({"stop": ["="]}, ["message"]),
        ({"max_output_tokens": 3}, ["message"]),
        ({"input": ASK, "tools": TOOLS}, ["function_call"]),
        ({"input": TWO, "tools": TOOLS}, ["function_call"] * 2),
        ({"input": TWO, "tools": TOOLS, "parallel_tool_calls": False}, ["function_call"]),
        ({"input": TWO, "tools": TOOLS, "tool_choice": "none"}, ["message"]),
        ({"input": SUM, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}, ["function_call"]),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "find_object"}}, ["function_call"]),
        (
            {
                "tools": TOOLS,
                "parallel_tool_calls": False,
                "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]},
            },
            ["function_call"],
        ),
        ({"input": "Tell me about a girl.", "text": {"format": {"type": "json_schema", "name": "girl", "schema": GIRL}}}, ["message"]),
        ({"top_logprobs": 2, "include": ["message.output_text.logprobs"]}, ["message"]),
        ({"reasoning": {"effort": "low"}, "metadata": {"a": "b"}, "user": "me", "instructions": "Be kind."}, ["message"]),
    ],
)  # fmt: skip
def test_as_described(demo: Server, check: Check, fields: dict[str, Any], kinds: list[str]) -> None:
    response = both(demo, body(SUM) | fields, check)
    assert [item["type"] for item in response["output"]] == kinds
    cut = fields.get("max_output_tokens") == 3
    assert response["status"] == ("incomplete" if cut else "completed")
    assert response["incomplete_details"] == ({"reason": "max_output_tokens"} if cut else None)
    assert response["output"][-1]["status"] == response["status"]
    for item in response["output"]:
        if item["type"] == "function_call":
            assert isinstance(json.loads(item["arguments"]), dict)
    if "text" in fields:
        assert set(json.loads(texts(response))) == {"name", "age"}
    if "top_logprobs" in fields:
        (part,) = response["output"][0]["content"]
        assert "".join(entry["token"] for entry in part["logprobs"]).startswith(part["text"])
        assert all(len(entry["top_logprobs"]) == 2 for entry in part["logprobs"])


# -------------------------------------------------------------------------------- through the echo


def test_reasoning_is_an_item(dry: Server, check: Check) -> None:
    asked = body("<think>\nI see.\n</think>\n\nWell.", chat_template=THINKS)
    thought, message = both(dry, asked, check)["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "I see."}] and thought["summary"] == []
    assert message["content"][0]["text"] == "Well."
    usage = dry.post(PATH, asked).json()["usage"]
    assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]
    (message,) = both(dry, {**asked, "include_reasoning": False}, check)["output"]
    assert message["type"] == "message"


def shown(dry: Server, given: Any, **fields: Any) -> str:
    answer = dry.post(PATH, body(given, chat_template=SHOWS, **fields))
    assert answer.status_code == 200, answer.text
    return texts(answer.json())


def test_items_become_messages(dry: Server) -> None:
    assert shown(dry, "Hi", instructions="Be kind.") == "[system|Be kind.][user|Hi]"
    items = [
        {"role": "developer", "content": "Be kind."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm."}],
        },
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So."}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "one"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "two"}]},
        {"type": "function_call", "call_id": "3", "name": "f", "arguments": "{}"},
    ]
    assert shown(dry, items) == (
        '[system|Be kind.][user|Hi][assistant|So.|thought Hm.|f {"a": 1}|g {}][tool|one|from f][tool|two|from g]'
        "[assistant||f {}]"
    )


def test_tools_that_openai_runs_are_left_out(dry: Server, check: Check) -> None:
    crm = {
        "type": "namespace",
        "name": "crm",
        "description": "Customers",
        "tools": [
            {"type": "function", "name": "find", "parameters": {"type": "object"}},
            {"type": "custom", "name": "note"},
        ],
    }
    others = [{"type": "web_search"}, {"type": "custom", "name": "patch"}, {"type": "local_shell"}]
    call = '<tool_call>\n{"name": "crm__find", "arguments": {"a": 1}}\n</tool_call>'
    asked = body("Hi", tools=[*TOOLS, crm, *others], chat_template=f"{call}{{% if tools %}}{{% endif %}}")
    whole = both(dry, asked, check)
    (item,) = whole["output"]
    assert (item["type"], item["namespace"], item["name"]) == ("function_call", "crm", "find")
    assert [warning.split(" is not used")[0] for warning in whole["warnings"]] == [
        "tools[3].tools[1] 'note' of type 'custom'",
        "tools[4] of type 'web_search'",
        "tools[5] 'patch' of type 'custom'",
        "tools[6] of type 'local_shell'",
    ]
    assert both(dry, body("Hi", tools=others), check)["output"][0]["type"] == "message"
    listed = "{% for t in tools %}[{{ t.function.name }}]{% endfor %}"
    choice = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "crm__find"}, others[0]],
    }
    answer = dry.post(
        PATH, body("Hi", tools=[*TOOLS, crm, *others], tool_choice=choice, chat_template=listed)
    )
    assert texts(answer.json()) == "[crm__find]"


def test_items_of_other_tools(dry: Server) -> None:
    called = {"type": "custom_tool_call", "call_id": "1", "name": "patch", "input": "*** Begin"}
    items = [
        {"type": "function_call", "call_id": "0", "namespace": "crm", "name": "find", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "0", "output": "none"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        called,
        {"type": "custom_tool_call_output", "call_id": "1", "output": "done"},
    ]
    answer = dry.post(PATH, body(items, chat_template=SHOWS)).json()
    assert texts(answer) == (
        '[assistant||crm__find {}][tool|none|from crm__find][assistant||patch {"input": "*** Begin"}][tool|done|from patch]'
    )
    assert answer["warnings"] == ["input items of type 'web_search_call' are left out"]


def test_input_items_and_references(client: openai.OpenAI, demo: Server, dry: Server, check: Check) -> None:
    first = client.responses.create(model="demo", input=SUM, temperature=0)
    asked = [{"role": "assistant", "content": "Hm."}, {"role": "user", "content": "And 1 + 1?"}]
    second = client.responses.create(model="demo", input=asked, previous_response_id=first.id, temperature=0)
    listed = client.responses.input_items.list(second.id, order="asc")
    said = [(item.role, item.content[0].type, item.content[0].text) for item in listed.data]
    assert said == [
        ("user", "input_text", SUM),
        ("assistant", "output_text", first.output_text),
        ("assistant", "output_text", "Hm."),
        ("user", "input_text", "And 1 + 1?"),
    ]
    pages = [item.id for item in client.responses.input_items.list(second.id, limit=1)]  # follows the pages
    assert pages == [item.id for item in reversed(listed.data)] and listed.data[1].id == first.output[0].id
    check(demo.http.get(f"{PATH}/{second.id}/input_items").json(), "ResponseItemList")
    for query in ("limit=0", "limit=101", "limit=x", "order=up", "after=nobody"):
        refused = demo.http.get(f"{PATH}/{second.id}/input_items?{query}")
        assert refused.status_code == 400 and refused.json()["error"]["param"] == query.split("=")[0]
    with pytest.raises(openai.NotFoundError):
        client.responses.input_items.list("resp_nobody")

    stored = dry.post(PATH, body("Hi", chat_template="You")).json()
    reference = {"type": "item_reference", "id": stored["output"][0]["id"]}
    assert shown(dry, [{"role": "user", "content": "Hi"}, reference]) == "[user|Hi][assistant|You]"


def test_tokens_are_counted(client: openai.OpenAI) -> None:
    for fields in ({}, {"instructions": "Be kind."}, {"tools": TOOLS}):
        response = client.responses.create(model="demo", input=SUM, temperature=0, **fields)
        counted = client.responses.input_tokens.count(model="demo", input=SUM, **fields)
        assert counted.input_tokens == response.usage.input_tokens
        assert counted.object == "response.input_tokens"
    more = client.responses.input_tokens.count(input="And?", previous_response_id=response.id)
    alone = client.responses.input_tokens.count(input="And?")
    assert more.input_tokens > alone.input_tokens + 20
    with pytest.raises(openai.BadRequestError, match="at least one item"):
        client.responses.input_tokens.count(model="demo")


@pytest.mark.parametrize(
    "fields", [{}, {"input": TWO, "tools": TOOLS}, {"max_output_tokens": 3}, {"top_logprobs": 1}]
)
def test_a_stored_response_is_streamed(demo: Server, check: Check, fields: dict[str, Any]) -> None:
    live = named_events(demo.post(PATH, {**body(SUM), **fields, "stream": True}))
    final = live[-1]["response"]
    path = f"{PATH}/{final['id']}?stream=true"
    again = named_events(demo.http.get(path))
    for event in again:
        check(event, "ResponseStreamEvent")
    assert told(again) == final

    def without_deltas(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        kept = [event for event in events if not event["type"].endswith(".delta")]
        return [{**event, "sequence_number": 0} for event in kept]

    assert without_deltas(again) == without_deltas(live)
    assert named_events(demo.http.get(f"{path}&starting_after=2")) == again[3:]
    assert demo.http.get(f"{path}&starting_after=x").status_code == 400


def test_the_client_streams_a_stored_response(client: openai.OpenAI) -> None:
    response = client.responses.create(model="demo", input=SUM, temperature=0)
    *_, last = client.responses.retrieve(response.id, stream=True)
    assert last.type == "response.completed" and last.response == response


def test_conversations(client: openai.OpenAI, demo: Server, check: Check) -> None:
    rule = {"type": "message", "role": "user", "content": "Hello."}
    conversation = client.conversations.create(items=[rule], metadata={"who": "me"})
    assert conversation.id.startswith("conv_") and conversation.metadata == {"who": "me"}
    first = client.responses.create(
        model="demo", input=ASK, tools=TOOLS, conversation=conversation.id, temperature=0
    )
    (call,) = first.output
    assert first.conversation.id == conversation.id
    output = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": '{"condition": "sunny", "temperature": 21}',
    }
    second = client.responses.create(
        model="demo", input=[output], tools=TOOLS, conversation=conversation.id, temperature=0, store=False
    )
    assert "sunny" in second.output_text
    items = client.conversations.items.list(conversation.id, order="asc").data
    assert [item.type for item in items] == [
        "message",
        "message",
        "function_call",
        "function_call_output",
        "message",
    ]
    assert items[-1].content[0].text == second.output_text
    found = demo.http.get(f"/v1/conversations/{conversation.id}/items?limit=2").json()
    assert found["has_more"]
    check(found, "ConversationItemList")
    check(demo.http.get(f"/v1/conversations/{conversation.id}").json(), "ConversationResource")

    added = client.conversations.items.create(conversation.id, items=[rule, rule]).data
    assert client.conversations.items.retrieve(added[1].id, conversation_id=conversation.id) == added[1]
    client.conversations.items.delete(added[0].id, conversation_id=conversation.id)
    client.conversations.items.delete(call.id, conversation_id=conversation.id)  # its output stays
    assert len(client.conversations.items.list(conversation.id).data) == 5
    assert (
        client.responses.create(model="demo", input=SUM, conversation=conversation.id).status == "completed"
    )
    assert client.conversations.update(conversation.id, metadata={"a": "b"}).metadata == {"a": "b"}
    with pytest.raises(openai.BadRequestError, match="at most 20"):
        client.conversations.items.create(conversation.id, items=[rule] * 21)
    with pytest.raises(openai.BadRequestError, match=r"items\[0\]") as refused:
        client.conversations.items.create(conversation.id, items=[{"type": "mystery"}])
    assert refused.value.param == "items"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(conversation.id)  # is no response
    assert client.conversations.delete(conversation.id).deleted
    for missing in (
        client.conversations.retrieve,
        client.conversations.delete,
        client.conversations.items.list,
    ):
        with pytest.raises(openai.NotFoundError):
            missing(conversation.id)


def test_previous_responses_without_their_instructions(dry: Server) -> None:
    first = dry.post(PATH, body("Hi", instructions="Be kind.", chat_template="You")).json()
    previous = first["id"]
    assert shown(dry, "And?", previous_response_id=previous) == "[user|Hi][assistant|You][user|And?]"
    assert shown(dry, "And?", previous_response_id=previous, instructions="Now be rude.").startswith(
        "[system|Now"
    )


@pytest.mark.parametrize(
    ("fields", "says", "param"),
    [
        ({"input": None}, "input", "input"),
        ({"input": []}, "at least one item", "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference", "input"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input_image", "input"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content", "input"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "call_id", "input"),
        ({"input": [{"type": "function_call_output", "call_id": "1"}]}, "output must be", "input"),
        (
            {"tools": [{"type": "web_search"}], "tool_choice": "required"},
            "tool_choice needs tools",
            "tool_choice",
        ),
        (
            {"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}},
            "'web_search'",
            "tool_choice",
        ),
        ({"tools": [{"type": "namespace", "tools": []}]}, "tools[0].name", "tools"),
        ({"tools": [{"type": "namespace", "name": "crm"}]}, "tools[0].tools", "tools"),
        (
            {"input": [{"type": "function_call_output", "call_id": "1", "output": "x"}]},
            "belongs to no function_call",
            "input",
        ),
        (
            {"input": [{"type": "custom_tool_call_output", "call_id": "1", "output": "x"}]},
            "belongs to no function_call",
            "input",
        ),
        ({"input": [{"type": "mystery"}]}, "'mystery'", "input"),
        ({"tools": [{"type": "function"}]}, "tools[0].function.name", "tools"),
        ({"tool_choice": "required"}, "tool_choice needs tools", "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "'x'", "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "allowed_tools", "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format", "text"),
        ({"text": {"format": 5}}, "text.format", "text"),
        ({"reasoning": {"effort": 5}}, "reasoning.effort", "reasoning"),
        ({"metadata": {"a": 5}}, "metadata", "metadata"),
        ({"metadata": {"a": "x" * 513}}, "at most 16 pairs", "metadata"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "at most 16 pairs", "metadata"),
        ({"background": True}, "background", "background"),
        ({"conversation": "x"}, "conversation: 'x' does not exist", "conversation"),
        ({"conversation": {"name": "x"}}, "object with an id", "conversation"),
        ({"conversation": "x", "previous_response_id": "y"}, "not both", "conversation"),
        ({"previous_response_id": "resp_x"}, "resp_x", "previous_response_id"),
        ({"n": 2}, "n must be 1", "n"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens"),
        ({"temperature": 1000}, "temperature", "temperature"),
    ],
)
def test_what_is_refused(dry: Server, check: Check, fields: dict[str, Any], says: str, param: str) -> None:
    response = dry.post(PATH, body(SUM) | fields)
    assert response.status_code == 400, response.text
    check(response.json(), "ErrorResponse")
    error = response.json()["error"]
    assert says in error["message"] and error["param"] == param


@pytest.fixture(scope="module")
def small() -> Iterator[Server]:
    """Serve slow steps to two clients and store two responses for each."""
    flags = ["--dry-run-step-ms", "20", "--max-stored-responses", "2", "--api-key", "a", "--api-key", "b"]
    with serving("demo", "--dry-run", *flags) as server:
        yield server


def test_few_are_kept_and_each_for_its_own_client(small: Server) -> None:
    a, b = ({"Authorization": f"Bearer {key}"} for key in "ab")

    def ask(**fields: Any) -> Any:
        return small.post(PATH, body("Hi", max_output_tokens=2, **fields), headers=a).json()["id"]

    def status(response_id: str, headers: dict[str, str]) -> int:
        return small.http.get(f"{PATH}/{response_id}", headers=headers).status_code

    ids = [ask(), ask()]
    assert [status(i, a) for i in ids] == [200, 200] and [status(i, b) for i in ids] == [404, 404]
    stolen = small.post(PATH, body("Hi", previous_response_id=ids[0]), headers=b)
    assert stolen.status_code == 400
    assert small.http.delete(f"{PATH}/{ids[0]}", headers=b).status_code == 404
    assert status(ids[0], a) == 200  # and used last
    ids.append(ask())
    assert [status(i, a) for i in ids] == [200, 404, 200]
    assert small.http.post(f"{PATH}/{ids[0]}/cancel", headers=a).status_code == 400


def test_a_stream_that_fails(small: Server, check: Check) -> None:
    asked = body("once " * 200, stream=True, timeout=2.0)
    stream = named_events(small.post(PATH, asked, headers={"Authorization": "Bearer a"}))
    for event in stream:
        check(event, "ResponseStreamEvent")
    assert [event["type"] for event in stream[-2:]] == ["error", "response.failed"]
    assert stream[-2]["code"] == "timeout" and stream[-1]["response"]["status"] == "failed"
    assert "timeout" in stream[-1]["response"]["error"]["message"]
