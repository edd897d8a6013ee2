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
        ({"tools": [{"type": "web_search"}]}, "web_search", "tools"),
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
        ({"conversation": "x"}, "conversation", "conversation"),
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
    assert small.http.get(f"{PATH}/{ids[0]}?stream=true", headers=a).status_code == 400


def test_a_stream_that_fails(small: Server, check: Check) -> None:
    asked = body("once " * 200, stream=True, timeout=2.0)
    stream = named_events(small.post(PATH, asked, headers={"Authorization": "Bearer a"}))
    for event in stream:
        check(event, "ResponseStreamEvent")
    assert [event["type"] for event in stream[-2:]] == ["error", "response.failed"]
    assert stream[-2]["code"] == "timeout" and stream[-1]["response"]["status"] == "failed"
    assert "timeout" in stream[-1]["response"]["error"]["message"]
