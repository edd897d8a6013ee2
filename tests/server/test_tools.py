"""Tools and reasoning over HTTP: the OpenAI client with the demo model, and every format through an echoing server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from serving import Server, chat, events, serving
from training.tools import TOOLS as DEMO_TOOLS

TOOLS = [tool.schema() for tool in DEMO_TOOLS if tool.name in ("get_weather", "find_object", "add")]
NAMED = {"type": "function", "function": {"name": "find_object"}}
ASK = "What is the weather in Oakford?"
TWO = "What is the weather in Oakford? What is the weather in Westbrook?"
PATH = "/v1/chat/completions"


@pytest.fixture
def client(demo: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0)


def ask(text: str, **fields: Any) -> dict[str, Any]:
    return chat(text, **{"tools": TOOLS, "temperature": 0, "max_tokens": 120, **fields})


def joined(chunks: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """Return the message of a stream without call ids, and its finish reason."""
    found: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    for choice in [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]:
        delta = choice["delta"]
        found["content"] += delta.get("content") or ""
        found["reasoning"] += delta.get("reasoning", "")
        assert delta.get("reasoning") == delta.get("reasoning_content")
        for part in delta.get("tool_calls", []):
            if "id" in part:
                assert part["index"] == len(found["calls"]) and part["type"] == "function"
                found["calls"].append((part["function"]["name"], ""))
            else:
                assert set(part) == {"index", "function"} and set(part["function"]) == {"arguments"}
            name, text = found["calls"][part["index"]]
            found["calls"][part["index"]] = name, text + part["function"]["arguments"]
        if choice["finish_reason"]:
            found["finish_reason"] = choice["finish_reason"]
    return found


def said(choice: dict[str, Any]) -> dict[str, Any]:
    """Return the message of a whole answer without call ids, and its finish reason."""
    message = choice["message"]
    calls = message.get("tool_calls", [])
    assert all(call["type"] == "function" and call["id"] for call in calls)
    assert len({call["id"] for call in calls}) == len(calls)
    assert message.get("reasoning") == message.get("reasoning_content")
    return {
        "content": message["content"] or "",
        "reasoning": message.get("reasoning") or "",
        "calls": [(call["function"]["name"], call["function"]["arguments"]) for call in calls],
        "finish_reason": choice["finish_reason"],
    }


def both(server: Server, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the message of each choice, checked to be the same whole and streamed."""
    response = server.post(PATH, body)
    assert response.status_code == 200, response.text
    whole = [said(choice) for choice in response.json()["choices"]]
    *chunks, done = events(server.post(PATH, {**body, "stream": True}))
    assert done == "[DONE]"
    opening = chunks[0]["choices"][0]["delta"]
    assert opening == {"role": "assistant", "content": None if body.get("tools") else ""}
    assert [joined(chunks, index) for index in range(len(whole))] == whole
    return whole


# ------------------------------------------------------------------------------------ the demo model


def test_openai_client_calls_a_tool_and_answers_from_it(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": ASK}]
    options: dict[str, Any] = {"model": "demo", "tools": TOOLS, "temperature": 0}
    (choice,) = client.chat.completions.create(messages=messages, **options).choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    (call,) = choice.message.tool_calls
    assert call.id.startswith("call_") and call.type == "function" and call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Oakford"}

    messages += [
        choice.message,
        {"role": "tool", "tool_call_id": call.id, "content": '{"condition": "sunny", "temperature": 21}'},
    ]
    (choice,) = client.chat.completions.create(messages=messages, **options).choices
    assert choice.finish_reason == "stop" and choice.message.tool_calls is None
    assert choice.message.content == "The weather in Oakford is sunny, with 21 degrees."


def test_openai_client_streams_a_call(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="demo", messages=[{"role": "user", "content": ASK}], tools=TOOLS, temperature=0
    ) as stream:
        kinds = [event.type for event in stream]
        completion = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds and "tool_calls.function.arguments.done" in kinds
    (call,) = completion.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Oakford"})
    assert completion.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3, "temperature": 1, "seed": 3},
        {"parallel_tool_calls": False},
        {"tool_choice": "none"},
        {"max_tokens": 12},
        {"stop": ["</tool_call>"]},
        {"logprobs": True},
        {"ignore_eos": True, "max_tokens": 60},
    ],
)
def test_streams_say_what_whole_answers_say(demo: Server, fields: dict[str, Any]) -> None:
    texts = [ASK, "Sing a song."] if fields else [ASK, TWO, "What is 27 + 45?", "Sing a song."]
    for found in [found for text in texts for found in both(demo, ask(text, **fields))]:
        for _, arguments in found["calls"]:
            assert isinstance(json.loads(arguments), dict)
        if found["calls"] and "max_tokens" not in fields:
            assert found["finish_reason"] == "tool_calls"


def test_log_probabilities_are_not_lost_where_text_is_held(demo: Server) -> None:
    body = ask(ASK, logprobs=True, top_logprobs=1)
    whole = demo.post(PATH, body).json()["choices"][0]["logprobs"]["content"]
    *chunks, _ = events(demo.post(PATH, {**body, "stream": True}))
    got = [e for chunk in chunks for c in chunk["choices"] if c["logprobs"] for e in c["logprobs"]["content"]]
    assert got == whole and "".join(entry["token"] for entry in whole).startswith("<tool_call>\n")


def test_what_a_short_answer_cuts_off_is_content(demo: Server) -> None:
    (found,) = both(demo, ask(ASK, max_tokens=12))
    assert found["content"].startswith('<tool_call>\n{"name"') and found["finish_reason"] == "length"


@pytest.fixture(scope="module")
def constrained(demo: Server) -> Server:
    """Return the demo server, or skip the test if its engine does not enforce grammars."""
    answer = demo.post(PATH, chat("Hi", structured_outputs={"choice": ["a"]}, max_tokens=4))
    if answer.status_code == 400 and "not available" in answer.text:
        pytest.skip("this version has no structured output")
    return demo


@pytest.mark.parametrize("text", [ASK, "Sing a song."])
def test_required_and_named_calls(constrained: Server, text: str) -> None:
    (found,) = both(constrained, ask(text, tool_choice="required"))
    assert found["calls"] and found["finish_reason"] == "tool_calls" and found["content"] == ""
    (found,) = both(constrained, ask(text, tool_choice=NAMED))
    ((name, arguments),) = found["calls"]
    assert name == "find_object" and list(json.loads(arguments)) == ["object"]


def test_a_forced_call_comes_as_it_is_written(constrained: Server) -> None:
    *chunks, _ = events(constrained.post(PATH, ask(ASK, tool_choice="required", stream=True)))
    assert sum("tool_calls" in chunk["choices"][0]["delta"] for chunk in chunks) > 2
    (found,) = both(constrained, ask(ASK, tool_choice="required", max_tokens=16))
    ((name, arguments),) = found["calls"]
    assert name == "get_weather" and '{"city": "Oakford"}'.startswith(arguments)
    assert found["finish_reason"] == "length" and found["content"] == ""


def test_random_tokens_under_a_forced_call(constrained: Server) -> None:
    """The temperature is so high that the model's output is noise."""
    parameters = {
        "type": "object",
        "properties": {"text": {"type": "string", "maxLength": 20}, "kind": {"enum": ["a", "b"]}},
        "required": ["text", "kind"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "note", "parameters": parameters}}
    (found,) = both(
        constrained,
        ask("Hi", tools=[tool], tool_choice="required", parallel_tool_calls=False, temperature=20, seed=3),
    )
    ((name, arguments),) = found["calls"]
    assert name == "note" and set(json.loads(arguments)) == {"text", "kind"} and not found["content"]


def test_schemas_that_cannot_be_enforced(constrained: Server) -> None:
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "contains": {"pattern": "a"}}},
    }
    answer = constrained.post(PATH, chat("Hi", tools=[tool], tool_choice="required"))
    assert answer.status_code == 400 and "contains" in answer.text
    assert constrained.post(PATH, chat("Hi", tools=[tool], max_tokens=2)).status_code == 200


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "unknown_type"}, "tools[1] 'f': properties.a.type must be one of string,"),
        ({"items": {"anyOf": [{"type": "text"}]}}, "tools[1] 'f': properties.a.items.anyOf[0].type must be"),
        ({"minContains": 2}, "properties.a "),
    ],
)
def test_errors_in_schemas_name_the_function_and_the_path(
    constrained: Server, schema: dict[str, Any], says: str
) -> None:
    parameters = {"type": "object", "properties": {"a": schema}}
    tools = [
        TOOLS[0],
        {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}},
    ]
    error = constrained.post(PATH, chat("Hi", tools=tools)).json()["error"]
    assert says in error["message"] and error["message"].startswith("tools[1] 'f': ")
    assert error["param"] == "tools"
    if "minContains" not in schema:
        wanted = {"type": "json_schema", "json_schema": {"name": "f", "schema": parameters}}
        error = constrained.post(PATH, chat("Hi", response_format=wanted)).json()["error"]
        assert says.split("'f': ")[1] in error["message"] and error["param"] == "response_format"


def test_strict_tools_and_json_beside_tools(constrained: Server) -> None:
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    (found,) = both(constrained, ask(ASK, tools=strict))
    assert found["calls"] == [("get_weather", '{"city": "Oakford"}')]
    (found,) = both(constrained, ask("Who are you?", tools=strict))
    assert found["calls"] == [] and found["content"] and found["finish_reason"] == "stop"
    (found,) = both(constrained, ask("Sing a song.", response_format={"type": "json_object"}))
    assert found["calls"] or isinstance(json.loads(found["content"]), dict)


# ------------------------------------------------------------------------------- every format, echoed

CITY = '{"city": "Köln", "days": [1, 2]}'
CALLS = {
    "{# <tool_call> {\"name\" #}": '<tool_call>\n{"name": "get_weather", "arguments": %s}\n</tool_call>',
    "{# <|python_tag|> #}": '{"name": "get_weather", "parameters": %s}',
    "{# [TOOL_CALLS] #}": '[TOOL_CALLS][{"name": "get_weather", "arguments": %s}]',
    "{# [TOOL_CALLS][ARGS] #}": "[TOOL_CALLS]get_weather[ARGS]%s",
    "": '```json\n{"name": "get_weather", "arguments": %s}\n```',
}  # fmt: skip


def echo(text: str, notes: str = "", **fields: Any) -> dict[str, Any]:
    template = "{{ messages[0].content }}{# tools #}" + notes
    return chat(text, chat_template=template, **{"tools": TOOLS, **fields})


@pytest.mark.parametrize("notes", CALLS)
def test_each_format_by_its_template(dry: Server, notes: str) -> None:
    (found,) = both(dry, echo(CALLS[notes] % CITY, notes))
    assert found == {
        "content": "", "reasoning": "", "calls": [("get_weather", CITY)], "finish_reason": "tool_calls",
    }  # fmt: skip
    broken = CALLS[notes] % CITY.replace("]", "")
    (found,) = both(dry, echo(broken, notes))
    assert found["content"] == broken and not found["calls"] and found["finish_reason"] == "stop"
    text = CALLS[notes] % CITY
    (found,) = both(dry, echo(text, notes, tools=None))
    assert found["content"] == text and not found["calls"]


@pytest.mark.parametrize("notes", [key for key in CALLS if key])
def test_reasoning_before_a_call(dry: Server, notes: str) -> None:
    text = "<think>\nI see.\n</think>\n\n" + CALLS[notes] % CITY
    body = echo(text, notes + "{# </think> #}")
    (found,) = both(dry, body)
    assert found["reasoning"] == "I see." and found["calls"] == [("get_weather", CITY)]
    message = dry.post(PATH, body).json()["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == "I see." and message["content"] is None
    usage = dry.post(PATH, body).json()["usage"]
    thought = len(dry.post("/tokenize", {"prompt": text.partition("</think>")[0]}).json()["tokens"])
    reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
    assert thought < reasoning < thought + 9 < usage["completion_tokens"]
    streamed = events(dry.post(PATH, {**body, "stream": True, "stream_options": {"include_usage": True}}))
    assert streamed[-2]["usage"] == usage
    (found,) = both(dry, {**body, "include_reasoning": False})
    assert found["reasoning"] == "" and found["calls"] == [("get_weather", CITY)]
    (found,) = both(dry, {**body, "separate_reasoning": False, "tools": None})
    assert found["reasoning"] == "" and found["content"] == text


def test_only_the_first_call_with_parallel_calls_off(dry: Server) -> None:
    notes = next(iter(CALLS))
    text = "\n".join([CALLS[notes] % CITY] * 3)
    assert len(both(dry, echo(text, notes))[0]["calls"]) == 3
    assert both(dry, echo(text, notes, parallel_tool_calls=False))[0]["calls"] == [("get_weather", CITY)]


def test_a_template_without_tools_is_told(dry: Server) -> None:
    answer = dry.post(PATH, chat("Hi", tools=TOOLS, chat_template="{{ messages[0].content }}")).json()
    assert "chat template" in answer["warnings"][0]


@pytest.fixture(scope="module")
def other() -> Iterator[Server]:
    flags = ["--tool-call-parser", "mistral", "--reasoning-parser", "deepseek_r1", "--stream-tool-arguments"]
    flags += ["--trust-request-chat-template"]
    with serving("demo", "--dry-run", *flags) as server:
        yield server


def test_parsers_by_flag(other: Server) -> None:
    text = "<think>a</think>" + CALLS["{# [TOOL_CALLS] #}"] % CITY
    (found,) = both(other, echo(text))
    assert found["reasoning"] == "a" and found["calls"] == [("get_weather", CITY)]
    (found,) = both(other, echo(text[:-4]))  # told as far as it goes
    assert found["calls"] == [("get_weather", CITY.removesuffix("]}"))]


@pytest.mark.parametrize("flag", ["--tool-call-parser", "--reasoning-parser"])
def test_unknown_parsers_are_refused(flag: str) -> None:
    with pytest.raises(RuntimeError, match="got 'nonsense'"), serving("demo", "--dry-run", flag, "nonsense"):
        pass


# --------------------------------------------------------------------------------- functions before tools


def test_functions_are_called_and_answered_from(client: openai.OpenAI) -> None:
    functions = [tool["function"] for tool in TOOLS]
    asked = [{"role": "user", "content": ASK}]
    options: dict[str, Any] = {"model": "demo", "functions": functions, "temperature": 0}
    (choice,) = client.chat.completions.create(messages=asked, **options).choices
    call = choice.message.function_call
    assert choice.finish_reason == "function_call" and not choice.message.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Oakford"})
    pieces = [
        chunk.choices[0] for chunk in client.chat.completions.create(messages=asked, stream=True, **options)
    ]
    calls = [piece.delta.function_call for piece in pieces if piece.delta.function_call]
    assert calls[0].name == call.name and "".join(c.arguments for c in calls) == call.arguments
    assert pieces[-1].finish_reason == "function_call"
    asked += [
        {
            "role": "assistant",
            "content": None,
            "function_call": {"name": call.name, "arguments": call.arguments},
        },
        {"role": "function", "name": call.name, "content": '{"condition": "sunny", "temperature": 21}'},
    ]
    (choice,) = client.chat.completions.create(messages=asked, **options).choices
    assert choice.message.content == "The weather in Oakford is sunny, with 21 degrees."
    (choice,) = client.chat.completions.create(
        messages=asked[:1], **{**options, "function_call": {"name": functions[-1]["name"]}}
    ).choices
    assert choice.message.function_call.name == functions[-1]["name"]
    (choice,) = client.chat.completions.create(
        messages=asked[:1], **{**options, "function_call": "none"}
    ).choices
    assert choice.message.function_call is None and choice.finish_reason == "stop"
