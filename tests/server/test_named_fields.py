"""Errors and warnings name fields as the client did, whatever the engine calls them."""

from __future__ import annotations

from typing import Any

import pytest
from serving import Server, chat, events

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SCHEMA = {"type": "array", "contains": {}}
BROKEN = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "required": 5}, "strict": True},
}
TOOL = {"name": "f", "parameters": {"type": "object", "contains": {"type": "integer"}}, "strict": True}
WAYS = [
    (CHAT, {"messages": [{"role": "user", "content": "word " * 3000}]}, "messages", "prompt has"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": "Hi"}], "chat_template": "{{ oops("},
        "chat_template",
        "Jinja",
    ),
    ("/v1/responses", {"input": "word " * 3000}, "input", "input has"),
    ("/v1/embeddings", {"input": ["a", ""]}, "input", "input is empty"),
    ("/v1/embeddings", {"input": [4096]}, "input", "input token ids must be"),
    (
        CHAT,
        {**chat("Hi"), "logprobs": True, "top_logprobs": 21},
        "top_logprobs",
        "top_logprobs must be at most 20",
    ),
    (
        CHAT,
        {**chat("Hi"), "prompt_logprobs": -1},
        "prompt_logprobs",
        "at most 20 (max_logprobs), got -1, which is all",
    ),
    (TEXT, {"prompt": "word " * 3000}, "prompt", "prompt has"),
    (TEXT, {"prompt": "a", "guided_json": SCHEMA}, "guided_json", "guided_json: json schema: the keyword"),
    (
        "/v1/responses",
        {"input": "a", "text": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        "text",
        "text: ",
    ),
    (
        CHAT,
        {**chat("Hi"), "tools": [{"type": "function", "function": TOOL}]},
        "tools",
        "tools[0] 'f': the keyword",
    ),
    (
        CHAT,
        {**chat("Hi"), "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        "response_format",
        "response_format: json schema: the keyword 'contains'",
    ),
    (
        CHAT,
        {**chat("Hi"), "tools": [BROKEN], "tool_choice": "required", "response_format": {"type": "text"}},
        "tools",
        "tools: structured_outputs need a model",
    ),
    (
        CHAT,
        {**chat("Hi"), "tools": [BROKEN], "tool_choice": "required", "regex": "a"},
        "regex",
        "regex or tools: structured_outputs need a model",
    ),
    (
        "/v1/responses",
        {"input": "a", "max_output_tokens": 10**30},
        "max_output_tokens",
        "max_output_tokens must be between 1 and",
    ),
    ("/generate", {"prompt": "a", "max_new_tokens": 0}, "max_new_tokens", "max_new_tokens must be between 1"),
]
# Errors of Anthropic's API have no `param`.
MESSAGES = [
    ({"stop_sequences": [""]}, "stop_sequences must hold non-empty strings"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format needs a JSON schema"),
]


@pytest.mark.parametrize(("path", "body", "param", "says"), WAYS)
def test_errors_name_the_field_as_the_client_called_it(
    dry: Server, path: str, body: dict[str, Any], param: str, says: str
) -> None:
    error = dry.post(path, body).json()["error"]
    assert error["param"] == param and says in error["message"]


def called(calls: Any) -> dict[str, Any]:
    return {"messages": [*chat("Hi")["messages"], {"role": "assistant", "content": "a", "tool_calls": calls}]}


def result(content: Any) -> dict[str, Any]:
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    answer = {"type": "tool_result", "tool_use_id": "t", "content": content}
    turns = [("user", "Hi"), ("assistant", [use]), ("user", [answer])]
    return {"max_tokens": 2, "messages": [{"role": role, "content": inner} for role, inner in turns]}


def thought(content: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": "Hi"}, {"type": "reasoning", "content": content}]}


# Falsy values of a wrong type, which `or` would take for a missing field.
FALSY = [
    (CHAT, lambda value: {"messages": [{"role": "user", "content": value}]}, [0, False, {}], "content must"),
    (CHAT, called, [0, False, "", {}], "tool_calls must be a list"),
    ("/v1/messages", result, [0, False, {}], "content"),
    (
        "/v1/messages",
        lambda value: {**chat("Hi"), "max_tokens": 2, "output_config": {"format": value}},
        [0, "", [], {}],
        "output_config.format must have type json_schema",
    ),
    ("/v1/responses", thought, [0, False, {}], "content must be a string or a list"),
    (
        "/v1/responses",
        lambda value: {"input": "a", "tools": [{"type": "function", "name": "f", "parameters": value}]},
        [0, False, ""],
        "parameters",
    ),
]


@pytest.mark.parametrize(("path", "body", "values", "says"), FALSY)
def test_a_falsy_value_of_a_wrong_type_is_not_a_missing_field(
    dry: Server, path: str, body: Any, values: list[Any], says: str
) -> None:
    for value in values:
        answer = dry.post(path, body(value))
        assert answer.status_code == 400 and says in answer.json()["error"]["message"], (value, answer.text)
    assert dry.post(path, body(None)).status_code == 200 or path == CHAT


@pytest.mark.parametrize(("fields", "says"), MESSAGES)
def test_errors_of_messages_name_the_field_in_the_text(
    dry: Server, fields: dict[str, Any], says: str
) -> None:
    error = dry.post("/v1/messages", {**chat("Hi"), "max_tokens": 3, **fields}).json()["error"]
    assert error["message"].startswith(says)


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/responses", {"input": "Hi", "prompt_logprobs": 1}, "prompt_logprobs"),
        ("/v1/responses", {"input": "Hi", "include": ["everything"]}, "include 'everything'"),
        ("/v1/messages", {**chat("Hi"), "max_tokens": 3, "return_token_ids": True}, "return_token_ids"),
        ("/generate", {"prompt": "Hi", "return_tokens_as_token_ids": True}, "return_tokens_as_token_ids"),
        ("/generate", {"prompt": "Hi", "return_tokens_as_token_ids": False}, None),
    ],
)
def test_fields_without_effect_on_a_route_are_named(
    dry: Server, path: str, body: dict[str, Any], name: str | None
) -> None:
    answer = dry.post(path, body)
    assert answer.status_code == 200, answer.text
    found = answer.json().get("warnings", [])
    assert [warning.startswith(f"{name} has no effect") for warning in found] == ([True] if name else [])


def test_unknown_stream_options_are_named(dry: Server) -> None:
    body = {**chat("Hi"), "stream": True, "stream_options": {"include_useage": True}}
    first = events(dry.post(CHAT, body))[0]
    assert first["warnings"] == ["unknown field 'stream_options.include_useage' was ignored"]


def test_the_text_of_a_prompt_that_was_cut(dry: Server) -> None:
    body = {**chat("Hi"), "return_prompt_text": True, "truncate_prompt_tokens": 2}
    assert dry.post(CHAT, body).json()["prompt_text"] == "assistant\n"
