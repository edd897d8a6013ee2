"""Structured output over HTTP with the demo model: every field, on every route, whole and streamed."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import jsonschema
import openai
import pydantic
import pytest
from serving import Server, chat, events
from training.tools import TOOLS as DEMO_TOOLS

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASK = "Tell me about a girl."
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
        "pet": {"enum": ["cat", "dog", "rabbit"]},
    },
    "required": ["name", "age", "pet"],
    "additionalProperties": False,
}
DATE = r"\d{4}-\d{2}-\d{2}"
LARK = 'start: "yes" | "no, " REST\nREST: /[a-z]{1,8}/'
GBNF = 'root ::= "yes" | "no, " [a-z] [a-z]?'


def fits_schema(text: str) -> None:
    jsonschema.validate(json.loads(text), SCHEMA)


def is_object(text: str) -> None:
    assert isinstance(json.loads(text), dict)


def fits(pattern: str) -> Any:
    def check(text: str) -> None:
        assert re.fullmatch(pattern, text), text

    return check


WAYS: dict[str, tuple[dict[str, Any], Any]] = {
    "json_schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "girl", "schema": SCHEMA}}},
        fits_schema,
    ),
    "bare_schema": ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, fits_schema),
    "json_object": ({"response_format": {"type": "json_object"}}, is_object),
    "guided_json": ({"guided_json": SCHEMA}, fits_schema),
    "guided_json_text": ({"guided_json": json.dumps(SCHEMA)}, fits_schema),
    "guided_regex": ({"guided_regex": DATE}, fits(DATE)),
    "guided_choice": ({"guided_choice": ["red", "green"]}, fits("red|green")),
    "guided_grammar": ({"guided_grammar": LARK}, fits("yes|no, [a-z]{1,8}")),
    "json": ({"structured_outputs": {"json": SCHEMA}}, fits_schema),
    "regex": ({"structured_outputs": {"regex": DATE}}, fits(DATE)),
    "choice": ({"structured_outputs": {"choice": ["red", "green"]}}, fits("red|green")),
    "grammar": ({"structured_outputs": {"grammar": GBNF}}, fits("yes|no, [a-z]{1,2}")),
    "tgi_value": ({"response_format": {"type": "json", "value": SCHEMA}}, fits_schema),
    "object_with_schema": ({"response_format": {"type": "json_object", "schema": SCHEMA}}, fits_schema),
    "tgi_regex": ({"response_format": {"type": "regex", "value": DATE}}, fits(DATE)),
    "format_grammar": ({"response_format": {"type": "grammar", "grammar": GBNF}}, fits("yes|no, [a-z]{1,2}")),
    "top_json_schema": ({"json_schema": json.dumps(SCHEMA)}, fits_schema),
    "top_regex": ({"regex": DATE}, fits(DATE)),
    "top_ebnf": ({"ebnf": GBNF}, fits("yes|no, [a-z]{1,2}")),
    "top_grammar": ({"grammar": GBNF}, fits("yes|no, [a-z]{1,2}")),
    "any_object": ({"structured_outputs": {"json_object": True}}, is_object),
}


def texts(server: Server, path: str, body: dict[str, Any]) -> list[str]:
    """Return the text of each choice, checked to be the same whole and streamed."""
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    assert {choice["finish_reason"] for choice in choices} == {"stop"}, choices
    whole = [c["text"] if path == TEXT else c["message"]["content"] for c in choices]
    streamed = [""] * len(whole)
    for chunk in events(server.post(path, {**body, "stream": True}))[:-1]:
        for choice in chunk["choices"]:
            piece = choice["text"] if path == TEXT else choice["delta"].get("content", "")
            streamed[choice["index"]] += piece
    assert streamed == whole
    return whole


@pytest.mark.parametrize("way", WAYS)
def test_every_way_on_every_route(demo: Server, way: str) -> None:
    fields, check = WAYS[way]
    common: dict[str, Any] = {"temperature": 0, "max_tokens": 300, "seed": 1, **fields}
    for text in texts(demo, CHAT, chat(ASK, **common)):
        check(text)
    if way in ("json_object", "any_object"):
        return  # out of a chat, or hot, an object of any shape may go on and on
    for more in ({}, {"n": 3, "temperature": 1.5}):
        for path, asked in ((CHAT, chat(ASK)), (TEXT, {"prompt": ASK})):
            for text in texts(demo, path, asked | common | more):
                check(text)


@pytest.mark.parametrize("way", ["guided_regex", "choice", "json"])
def test_the_other_apis(demo: Server, way: str) -> None:
    """The newer APIs take these fields besides their own."""
    fields, check = WAYS[way]
    message = demo.post("/v1/messages", chat(ASK, max_tokens=100, temperature=0, **fields)).json()
    check(message["content"][0]["text"])
    response = demo.post("/v1/responses", {"input": ASK, "temperature": 0, **fields}).json()
    check(response["output"][0]["content"][0]["text"])
    check(demo.post("/generate", {"prompt": ASK, "max_tokens": 100, **fields}).json()["text"])


def test_the_client_parses(demo: Server) -> None:
    class Girl(pydantic.BaseModel):
        name: str
        age: int

    client = openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0)
    messages: Any = [{"role": "user", "content": ASK}]
    parsed = client.chat.completions.parse(
        model="demo", messages=messages, response_format=Girl, temperature=0
    )
    assert isinstance(parsed.choices[0].message.parsed, Girl)
    with client.chat.completions.stream(
        model="demo", messages=messages, response_format=Girl, temperature=0
    ) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Girl)


def test_many_schemas_at_once(demo: Server) -> None:
    """Each answer follows its own constraint, and unconstrained answers are the same as alone."""

    async def run() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0) as client:

            def ask(text: str, **extra: Any) -> Any:
                messages: Any = [{"role": "user", "content": text}]
                return client.chat.completions.create(
                    model="demo", messages=messages, temperature=0, max_tokens=100, extra_body=extra
                )

            asked = []
            for i in range(12):
                asked.append(ask(ASK, guided_regex=f"{i}[a-f]{{{i + 1}}}"))
                asked.append(ask(f"What is {i + 10} + 45?"))
            return await asyncio.gather(*asked)

    found = [answer.choices[0].message.content for answer in asyncio.run(run())]
    for i in range(12):
        assert re.fullmatch(f"{i}[a-f]{{{i + 1}}}", found[2 * i])
        assert found[2 * i + 1] == f"{i + 10} + 45 = {i + 55}"


def content(server: Server, **fields: Any) -> tuple[str, list[str]]:
    answer = server.post(CHAT, chat(ASK, temperature=0, max_tokens=100, **fields))
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"], answer.json().get("warnings", [])


def test_unknown_keywords_are_listed(demo: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean", "strict": True}}, "required": ["a"]}
    text, warnings = content(demo, response_format={"type": "json_object", "schema": schema})
    assert json.loads(text).keys() == {"a"}  # nothing is appended
    assert warnings == ["json schema: the keyword 'strict' at #/properties/a has no effect"]
    streamed = events(demo.post(CHAT, chat(ASK, stream=True, guided_json=schema)))[:-1]
    assert [chunk["warnings"] for chunk in streamed if "warnings" in chunk] == [warnings]


def test_options_of_json(demo: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    compact = {"json": schema, "disable_any_whitespace": True}
    assert content(demo, structured_outputs=compact)[0] in ('{"a":true}', '{"a":false}')
    spaced = {"json": schema, "whitespace_pattern": r"\n"}
    assert content(demo, structured_outputs=spaced)[0].count("\n") >= 2


def test_structural_tags(demo: Server) -> None:
    """The text is free up to a trigger, whose tag then holds JSON. The prefix of the answer is such a trigger."""
    said = content(demo)[0]
    trigger = said[:4]
    tag = {"begin": trigger, "schema": {"enum": [12, 34]}, "end": "!"}
    for fields in (
        {"structural_tag": {"structures": [tag], "triggers": [trigger[:3]]}},
        {"response_format": {"type": "structural_tag", "structures": [tag], "triggers": [trigger]}},
    ):
        text = content(demo, **fields)[0]
        assert re.match(re.escape(trigger) + " ?(12|34) ?!", text), text


TOOLS = [tool.schema() for tool in DEMO_TOOLS if tool.name in ("get_weather", "find_object", "add")]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("name", ["get_weather", "find_object", "add"])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_named_tool_is_called_by_its_schema(
    demo: Server, name: str, temperature: float, streams: bool
) -> None:
    choice = {"type": "function", "function": {"name": name}}
    body = chat(
        "Sing a song.", tools=TOOLS, tool_choice=choice, temperature=temperature, seed=2, max_tokens=400
    )
    if streams:
        calls: list[Any] = [["", ""]]
        for chunk in events(demo.post(CHAT, {**body, "stream": True}))[:-1]:
            for part in chunk["choices"][0]["delta"].get("tool_calls", ()):
                calls[0][0] += part["function"].get("name", "")
                calls[0][1] += part["function"]["arguments"]
    else:
        message = demo.post(CHAT, body).json()["choices"][0]["message"]
        calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message["tool_calls"]]
    ((called, arguments),) = calls
    schema = next(tool["function"]["parameters"] for tool in TOOLS if tool["function"]["name"] == name)
    assert called == name
    jsonschema.validate(json.loads(arguments), schema)


@pytest.mark.parametrize("streams", [False, True])
def test_a_forced_call_takes_a_format_and_stop_strings(demo: Server, streams: bool) -> None:
    """The format applies to the text of a later answer, and no stop string cuts the arguments."""
    body = chat(
        "Sing a song.",
        tools=TOOLS,
        tool_choice="required",
        response_format={"type": "json_schema", "json_schema": {"name": "girl", "schema": SCHEMA}},
        stop=["{", '"'],
        temperature=0,
        max_tokens=300,
    )
    if streams:
        chunks = events(demo.post(CHAT, {**body, "stream": True}))[:-1]
        parts = [part for c in chunks for part in c["choices"][0]["delta"].get("tool_calls", ())]
        arguments = "".join(part["function"]["arguments"] for part in parts if part["index"] == 0)
        reason = chunks[-1]["choices"][0]["finish_reason"]
        warnings = next(chunk["warnings"] for chunk in chunks if "warnings" in chunk)
    else:
        answer = demo.post(CHAT, body).json()
        (choice,) = answer["choices"]
        arguments, reason = (
            choice["message"]["tool_calls"][0]["function"]["arguments"],
            choice["finish_reason"],
        )
        warnings = answer["warnings"]
    is_object(arguments)
    assert reason == "tool_calls" and any("stop" in text for text in warnings)


def test_a_stop_string_that_cuts_a_call_is_the_reason(demo: Server) -> None:
    tool = json.loads(json.dumps(TOOLS[0]))
    tool["function"]["strict"] = True
    body = chat("What is the weather in Paris?", tools=[tool], temperature=0, max_tokens=300)
    whole = demo.post(CHAT, body).json()["choices"][0]
    assert whole["finish_reason"] == "tool_calls"
    cut = demo.post(CHAT, {**body, "stop": ['": "', '":"']}).json()["choices"][0]
    assert cut["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"guided_json": {"type": "object", "not": {}}}, "not"),
        ({"guided_json": {"$ref": "https://example.com/x"}}, "https://example.com/x"),
        ({"guided_regex": "(a"}, "regex"),
        ({"guided_regex": "(?=a)b"}, "regex"),
        ({"guided_grammar": "start: nothing"}, "grammar"),
        ({"guided_choice": []}, "choice"),
        ({"guided_json": "{"}, "json"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "only one field"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "regex"}}, "regex must be a string"),
        ({"response_format": {"type": "json", "value": 3}}, "needs a JSON schema"),
        ({"regex": "a", "grammar": "root ::= other"}, "only one field"),
        ({"grammar": "root ::= other"}, "the rule 'other' is not defined"),
        ({"structural_tag": {"structures": [], "triggers": ["<"]}}, "each begin must start with a trigger"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": "x"}}, "whitespace_pattern"),
        ({"structured_outputs": {"json": {}, "disable_any_whitespace": 1}}, "must be true or false"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "exactly one"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structural_tag is not valid JSON"),
        ({"structured_outputs": {"nothing": "x"}}, "structured_outputs.nothing"),
    ],
)
def test_what_cannot_be_enforced_is_refused(demo: Server, fields: dict[str, Any], says: str) -> None:
    for path, body in ((CHAT, chat(ASK)), (TEXT, {"prompt": ASK}), ("/v1/messages", chat(ASK, max_tokens=9))):
        answer = demo.post(path, {**body, **fields})
        assert answer.status_code == 400 and says in answer.json()["error"]["message"], answer.text
    assert demo.wait_until_idle()["blocks"]["used"] == 0
