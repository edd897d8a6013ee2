"""Anthropic's API: its client with the demo model, and every kind of block through a server that echoes its prompt."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from serving import Server, serving
from training.tools import TOOLS as DEMO_TOOLS

SUM = [{"role": "user", "content": "What is 27 + 45?"}]
ASK = [{"role": "user", "content": "What is the weather in Oakford?"}]
TWO = [{"role": "user", "content": "What is the weather in Oakford? What is the weather in Westbrook?"}]
PATH = "/v1/messages"
SEARCH = {"type": "web_search_20250305", "name": "web_search"}


def tool(name: str, **fields: Any) -> dict[str, Any]:
    function = next(t.schema()["function"] for t in DEMO_TOOLS if t.name == name)
    schema = function["parameters"]
    return {"name": name, "description": function["description"], "input_schema": schema, **fields}


TOOLS = [tool(name) for name in ("get_weather", "find_object", "add")]


@pytest.fixture
def client(demo: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=demo.url, api_key="none", max_retries=0)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the bodies of a stream of named events, checked to have the types that the names say."""
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for part in response.text.split("\n\n"):
        if part:
            name, data = part.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
    return found


def told(stream: list[dict[str, Any]]) -> dict[str, Any]:
    """Check the order of a stream; return its message."""
    kinds = [event["type"] for event in stream]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("ping") == (1 if "content_block_start" in kinds else 0)
    message = stream[0]["message"]
    assert message["content"] == [] and message["stop_reason"] is None
    open_index = None
    for event in stream[1:-2]:
        if event["type"] == "content_block_start":
            assert open_index is None and event["index"] == len(message["content"])
            open_index = event["index"]
            message["content"].append(event["content_block"])
            pieces: list[str] = []
        elif event["type"] == "content_block_delta":
            assert event["index"] == open_index
            (kind, text) = event["delta"].values()
            assert kind.removesuffix("_delta") in ("text", "thinking", "input_json") and text
            pieces.append(text)
        elif event["type"] == "content_block_stop":
            assert event["index"] == open_index
            open_index, block = None, message["content"][-1]
            if block["type"] == "tool_use":
                block["input"] = json.loads("".join(pieces))
            else:
                block[block["type"]] = "".join(pieces)
        else:
            assert event == {"type": "ping"}
    assert open_index is None
    message |= stream[-2]["delta"]
    message["usage"] = stream[-2]["usage"]
    return message


def both(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    """Return the answer, checked to be the same whole and streamed."""
    response = server.post(PATH, body)
    assert response.status_code == 200, response.text
    whole, streamed = response.json(), told(events(server.post(PATH, {**body, "stream": True})))
    for message in (whole, streamed):
        assert message.pop("id").startswith("msg_")
        usage = message.pop("usage")
        message["tokens"] = usage["output_tokens"]
        message["prompt"] = usage["input_tokens"] + usage["cache_read_input_tokens"]
        for block in message["content"]:
            block.pop("id", None)
    assert streamed == whole
    return whole


def body(messages: list[Any], **fields: Any) -> dict[str, Any]:
    return {"model": "demo", "max_tokens": 100, "temperature": 0, "messages": messages, **fields}


def asked(messages: list[Any], **fields: Any) -> dict[str, Any]:
    """Return a request as arguments of the client, which takes no temperature."""
    return {
        "model": "demo",
        "max_tokens": 100,
        "extra_body": {"temperature": 0},
        "messages": messages,
        **fields,
    }


# ------------------------------------------------------------------------------------ the demo model


def test_the_client(client: anthropic.Anthropic) -> None:
    message = client.messages.create(**asked(SUM))
    assert message.type == "message" and message.role == "assistant" and message.model == "demo"
    (block,) = message.content
    assert block.type == "text" and block.text == "27 + 45 = 72"
    assert message.stop_reason == "end_turn" and message.stop_sequence is None
    assert message.usage.output_tokens > 0 and message._request_id
    prompt = message.usage.input_tokens + message.usage.cache_read_input_tokens
    assert client.messages.count_tokens(model="demo", messages=SUM).input_tokens == prompt


def test_models(client: anthropic.Anthropic) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.type, model.display_name) == ("demo", "model", "demo")
    assert client.models.retrieve("demo") == model and model.created_at.year > 2000


def test_the_client_streams(client: anthropic.Anthropic) -> None:
    with client.messages.stream(**asked(SUM)) as stream:
        assert "".join(stream.text_stream) == "27 + 45 = 72"
        assert stream.get_final_message().stop_reason == "end_turn"
    kinds = [e.type for e in client.messages.create(**asked(SUM), stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"] and kinds[-1] == "message_stop"


def test_the_async_client_answers_many_at_once(demo: Server) -> None:
    async def run() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=demo.url, api_key="none", max_retries=0) as client:

            async def ask(a: int) -> str:
                messages: list[Any] = [{"role": "user", "content": f"What is {a} + 45?"}]
                if a % 2:
                    return (await client.messages.create(**asked(messages))).content[0].text
                async with client.messages.stream(**asked(messages)) as stream:
                    return await stream.get_final_text()

            return await asyncio.gather(*(ask(a) for a in range(20, 36)))

    assert asyncio.run(run()) == [f"{a} + 45 = {a + 45}" for a in range(20, 36)]


@pytest.mark.parametrize("streams", [False, True])
def test_a_tool_is_called_and_answered_from(client: anthropic.Anthropic, streams: bool) -> None:
    messages: list[Any] = list(ASK)

    def ask() -> Any:
        if not streams:
            return client.messages.create(**asked(messages, tools=TOOLS))
        with client.messages.stream(**asked(messages, tools=TOOLS)) as stream:
            return stream.get_final_message()

    message = ask()
    assert message.stop_reason == "tool_use"
    (call,) = message.content
    assert (call.type, call.name, call.input) == ("tool_use", "get_weather", {"city": "Oakford"})
    result = {
        "type": "tool_result",
        "tool_use_id": call.id,
        "content": '{"condition": "sunny", "temperature": 21}',
    }
    messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    message = ask()
    assert message.stop_reason == "end_turn"
    assert message.content[0].text == "The weather in Oakford is sunny, with 21 degrees."


@pytest.mark.parametrize(
    ("choice", "names", "reason"),
    [
        ({"type": "auto"}, ["get_weather", "get_weather"], "tool_use"),
        ({"type": "auto", "disable_parallel_tool_use": True}, ["get_weather"], "tool_use"),
        ({"type": "any", "disable_parallel_tool_use": True}, ["get_weather"], "tool_use"),
        ({"type": "tool", "name": "find_object"}, ["find_object"], "tool_use"),
        ({"type": "none"}, [], "end_turn"),
    ],
)
def test_tool_choice(demo: Server, choice: dict[str, Any], names: list[str], reason: str) -> None:
    message = both(demo, body(TWO, tools=TOOLS, tool_choice=choice))
    assert [b["name"] for b in message["content"] if b["type"] == "tool_use"] == names
    assert message["stop_reason"] == reason


def test_strict_tools_and_cut_calls(demo: Server) -> None:
    strict = [tool("get_weather", strict=True)]
    message = both(demo, body(ASK, tools=strict))
    assert message["content"] == [{"type": "tool_use", "name": "get_weather", "input": {"city": "Oakford"}}]
    cut = demo.post(PATH, body(ASK, tools=strict, tool_choice={"type": "any"}, max_tokens=18)).json()
    assert cut["stop_reason"] == "max_tokens" and cut["content"][0]["input"] == {}


def test_why_it_stopped(demo: Server) -> None:
    assert both(demo, body(SUM, max_tokens=3))["stop_reason"] == "max_tokens"
    message = both(demo, body(SUM, stop_sequences=["=", "x"]))
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "=")
    assert message["content"] == [{"type": "text", "text": "27 + 45 "}]
    assert both(demo, body(SUM, top_k=1, temperature=1, top_p=0.9))["content"][0]["text"] == "27 + 45 = 72"
    long = [{"role": "user", "content": "Tell me a story. " * 200}]
    message = both(demo, body(long, max_tokens=5000, ignore_eos=True))
    assert message["stop_reason"] == "model_context_window_exceeded"


def test_json_by_a_schema(demo: Server) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    question = body([{"role": "user", "content": "Tell me about a girl."}])
    wanted = {"type": "json_schema", "schema": schema}
    for field in ({"output_config": {"format": wanted}}, {"output_format": wanted}):
        found = json.loads(both(demo, {**question, **field})["content"][0]["text"])
        assert isinstance(found["name"], str) and isinstance(found["age"], int)


# -------------------------------------------------------------------------------- through the echo

THINKS = "{% for m in messages %}{{ m.content }}{% endfor %}{# </think> #}"
SHOWS = (
    "{% for m in messages %}[{{ m.role }}|{{ m.content }}"
    "{% if m.reasoning_content %}|thought {{ m.reasoning_content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}|{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
    "{% if m.name %}|from {{ m.name }}{% endif %}]{% endfor %}"
    "{% if enable_thinking is defined %}|{{ enable_thinking }}{% endif %}"
)


def shown(dry: Server, messages: list[Any], **fields: Any) -> str:
    answer = dry.post(PATH, body(messages, chat_template=SHOWS, **fields))
    assert answer.status_code == 200, answer.text
    return "".join(block["text"] for block in answer.json()["content"])


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words, "cache_control": {"type": "ephemeral"}}


def test_thinking_comes_in_blocks_of_its_own(dry: Server) -> None:
    question = body([{"role": "user", "content": "<think>\nI see.\n</think>\n\nWell."}], chat_template=THINKS)
    answer = [{"type": "text", "text": "Well."}]
    thought = [{"type": "thinking", "thinking": "I see.", "signature": ""}]
    assert both(dry, question)["content"] == thought + answer
    found = both(dry, {**question, "thinking": {"type": "enabled", "budget_tokens": 1024}})
    assert found["content"] == thought + answer and "budget_tokens" in found["warnings"][0]
    assert both(dry, {**question, "thinking": {"type": "disabled"}})["content"] == answer
    assert (
        both(dry, {**question, "thinking": {"type": "adaptive", "display": "omitted"}})["content"] == answer
    )
    only = both(dry, {**question, "messages": [{"role": "user", "content": "<think>So"}]})
    assert [block["type"] for block in only["content"]] == ["thinking"]


def test_blocks_become_messages(dry: Server) -> None:
    say = {"role": "user", "content": "Hi"}
    assert shown(dry, [say], system="Be kind.") == "[system|Be kind.][user|Hi]"
    assert shown(dry, [say], system=[text("Be"), text("kind.")]) == "[system|Be\nkind.][user|Hi]"
    assert shown(dry, [say, {"role": "user", "content": [text("you")]}]) == "[user|Hi\nyou]"
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Once"}}
    assert shown(dry, [{"role": "user", "content": [document, text("Why?")]}]) == "[user|Once\nWhy?]"
    assert shown(dry, [say], thinking={"type": "disabled"}).endswith("|False")
    assert shown(dry, [say], thinking={"type": "adaptive"}).endswith("|True")


def test_tools_that_anthropic_runs_are_left_out(dry: Server) -> None:
    asked = body(SUM, tools=[SEARCH, {"type": "bash_20250124", "name": "bash"}, *TOOLS])
    answer = dry.post(PATH, asked).json()
    unused = [warning for warning in answer["warnings"] if "is not used" in warning]
    assert [warning.split(" is ")[0] for warning in unused] == [
        "tools[0] of type 'web_search_20250305'",
        "tools[1] of type 'bash_20250124'",
    ]
    count = "/v1/messages/count_tokens"
    assert dry.post(count, asked).json() == dry.post(count, body(SUM, tools=TOOLS)).json()
    answer = dry.post(PATH, body(SUM, tools=[SEARCH] * 40, tool_choice={"type": "auto"})).json()
    assert len(answer["warnings"]) == 17 and answer["warnings"][-1] == "24 more tools are not used"
    said = [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
                {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
                text("So."),
                {"type": "tool_use", "id": "t", "name": "find", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t",
                    "content": [{"type": "tool_reference", "tool_name": "get_weather"}],
                }
            ],
        },
    ]
    asked = body(said, chat_template=SHOWS)
    answer = dry.post(PATH, asked).json()
    assert "So." in answer["content"][0]["text"] and "get_weather|from find" in answer["content"][0]["text"]
    assert answer["warnings"] == [
        "content blocks of type 'server_tool_use' are left out",
        "content blocks of type 'web_search_tool_result' are left out",
    ]


def test_calls_and_results_become_messages(dry: Server) -> None:
    calls = [
        {"type": "thinking", "thinking": "Hm.", "signature": "x"},
        {"type": "redacted_thinking", "data": "x"},
        text("Let me see."),
        {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
        {"type": "tool_use", "id": "2", "name": "g", "input": {}},
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "1", "content": [text("one"), text("two")]},
        {"type": "tool_result", "tool_use_id": "2", "is_error": True},
        text("And?"),
    ]
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": calls},
        {"role": "user", "content": results},
    ]
    assert shown(dry, messages) == (
        '[user|Hi][assistant|Let me see.|thought Hm.|f {"a": 1}|g {}][tool|one\ntwo|from f][tool||from g][user|And?]'
    )


def test_the_last_message_is_continued(dry: Server, demo: Server) -> None:
    begun = [*SUM, {"role": "assistant", "content": "27 + 45 ="}]
    assert both(demo, body(begun))["content"] == [{"type": "text", "text": " 72"}]
    assert (
        shown(dry, [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "He"}])
        == "[user|Hi][assistant|He"
    )


def test_unknown_fields_are_named(dry: Server) -> None:
    for name in ("nonsense", "context_management"):
        answer = dry.post(PATH, body(SUM, **{name: {"edits": []}})).json()
        assert name in answer["warnings"][0]


# -------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_tokens": None}, "max_tokens must be an integer"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content must be a string or a list"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "has type 'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64"}}]}]},
            "type text",
        ),
        (
            {
                "messages": [
                    *SUM,
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "1", "name": "f", "input": 1}],
                    },
                ]
            },
            "input must be an object",
        ),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"tools": [SEARCH], "tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_reference", "tool_name": "f"}]}]},
            "tool_reference",
        ),
        ({"tools": [{"name": "f"}]}, "input_schema"),
        ({"tools": [{"name": 5, "input_schema": {}}]}, "tools[0].function.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "nobody"}}, "'nobody'"),
        ({"tools": TOOLS, "tool_choice": {"type": "maybe"}}, "tool_choice.type"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"output_config": {"format": "json"}}, "output_config.format"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"n": 2}, "n must be 1"),
        ({"temperature": -1}, "temperature"),
        ({"messages": [{"role": "user", "content": "a b " * 5000}]}, "prompt is too long: prompt has"),
    ],
)
def test_what_is_refused(dry: Server, fields: dict[str, Any], says: str) -> None:
    response = dry.post(PATH, body(SUM) | fields)
    assert response.status_code == 400, response.text
    found = response.json()
    assert found["type"] == "error" and found["error"]["type"] == "invalid_request_error"
    assert says in found["error"]["message"] and found["request_id"] == response.headers["request-id"]


def test_errors_as_the_client_knows_them(client: anthropic.Anthropic, dry: Server) -> None:
    with pytest.raises(anthropic.NotFoundError, match="not served here") as missing:
        client.messages.create(model="other", max_tokens=5, messages=SUM)
    assert missing.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="max_model_len"):
        client.messages.create(
            model="demo", max_tokens=5, messages=[{"role": "user", "content": "a " * 9000}]
        )
    with pytest.raises(anthropic.APITimeoutError):
        client.messages.create(**asked(SUM), timeout=1e-4)
    found = dry.http.get("/v1/messages")
    assert found.status_code == 405 and found.json()["type"] == "error"
    too_long = dry.post_bytes(PATH, b" " * (17 << 20))
    assert too_long.status_code == 413 and too_long.json()["error"]["type"] == "request_too_large"


@pytest.fixture(scope="module")
def locked() -> Iterator[Server]:
    with serving("demo", "--dry-run", "--dry-run-step-ms", "60", "--api-key", "right") as server:
        yield server


def test_keys_and_errors_in_the_middle(locked: Server) -> None:
    with pytest.raises(anthropic.AuthenticationError) as wrong:
        anthropic.Anthropic(base_url=locked.url, api_key="wrong", max_retries=0).messages.create(**asked(SUM))
    assert wrong.value.body["error"]["type"] == "authentication_error"
    client = anthropic.Anthropic(base_url=locked.url, api_key="right", max_retries=0)
    story = [{"role": "user", "content": "once " * 60}]
    with pytest.raises(anthropic.APIStatusError, match="timeout_error") as late:
        for _ in client.messages.create(**asked(story, extra_body={"timeout": 1.0}), stream=True):
            pass
    assert late.value.body["error"]["type"] == "timeout_error"
    stream = client.messages.create(**asked(story), stream=True)
    next(iter(stream))
    stream.close()
    locked.http.headers["x-api-key"] = "right"
    assert locked.wait_until_idle()["blocks"]["used"] == 0
