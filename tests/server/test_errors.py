"""Requests with errors: each gets a 4xx in OpenAI's form that names the field, and the server keeps serving."""

from __future__ import annotations

import gzip
import re
from typing import Any

import openai
import pytest
from serving import JSON, Server, chat, events

FUNCTION = {"name": "f", "parameters": {"type": "object"}}

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def refused(server: Server, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    answer = server.post_bytes(path, body) if isinstance(body, bytes) else server.post(path, body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert len(error["message"]) < 2000
    return error


FIELDS = [
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 1e9}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 2**70}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": 10**30}, "n"),
    ({"n": 1.5}, "n"),
    ({"n": True}, "n"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": 10**40}, "max_tokens"),
    ({"max_tokens": []}, "max_tokens"),
    ({"min_tokens": 10**9, "max_tokens": 3}, "min_tokens"),
    ({"min_tokens": 5000}, "min_tokens"),
    ({"seed": 2**64}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"stop": [""]}, "stop"),
    ({"stop": 3}, "stop"),
    ({"stop": ["x"] * 1000}, "stop"),
    ({"stop": "x" * 10_000}, "stop"),
    ({"logit_bias": {str(i): 1 for i in range(3000)}}, "logit_bias"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [10**30]}, "stop_token_ids"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 1000}}, "logit_bias"),
    ({"logit_bias": {"99999999": 1}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [2048]}, "allowed_token_ids"),
    ({"bad_words": [""]}, "bad_words"),
    ({"bad_words": ["x"] * 5000}, "bad_words"),
    ({"frequency_penalty": 3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"prompt_logprobs": 10**6}, "prompt_logprobs"),
    ({"prompt_logprobs": -7}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 3}}, "stream_options"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "x" * 5000}, "cache_salt"),
    ({"allowed_token_ids": [5] * 5000}, "allowed_token_ids"),
    ({"timeout": -1}, "timeout"),
    ({"timeout": 1e300}, "timeout"),
    ({"priority": 2**80}, "priority"),
    ({"request_id": ""}, "request_id"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"response_format": {"type": "nonsense"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_regex": 5}, "guided_regex"),
    ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
]


@pytest.mark.parametrize(("fields", "name"), FIELDS, ids=lambda v: str(v)[:50])
def test_fields_out_of_range_are_named(dry: Server, fields: dict, name: str) -> None:
    for path, body in ((CHAT, chat("Hi", **fields)), (TEXT, {"prompt": "Hi", **fields})):
        error = refused(dry, path, body)
        assert error["param"] == name or name in error["message"], error
        assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [1]}, "messages"),
        ({"messages": [{}]}, "messages"),
        ({"messages": [{"role": 5, "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"tools": []}, "tools"),
        ({"tools": [{}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": 3}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "perhaps"}, "tool_choice"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f"}}],
                "tool_choice": {"type": "function", "function": {"name": "g"}},
            },
            "tool_choice",
        ),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"chat_template": "{% for"}, "chat template"),
        ({"chat_template": "{% for i in range(10**9) %}{% endfor %}"}, "chat template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"functions": []}, "functions"),
        ({"functions": [{}]}, "functions[0].name"),
        ({"functions": [FUNCTION], "tools": [{"type": "function", "function": FUNCTION}]}, "functions"),
        ({"functions": [FUNCTION], "function_call": {"name": "g"}}, "function_call"),
        ({"functions": [FUNCTION], "function_call": "perhaps"}, "function_call"),
        ({"function_call": "auto"}, "function_call"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "middle"}, "truncation_side"),
        ({"modalities": ["audio"]}, "modalities"),
    ],
    ids=lambda v: str(v)[:60],
)  # fmt: skip
def test_chats_that_cannot_be_served(dry: Server, fields: dict, name: str) -> None:
    error = refused(dry, CHAT, {**chat("Hi"), **fields})
    assert name in error["message"] or error["param"] == name, error


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**63]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": "word " * 5000}, "prompt"),
        ({"prompt": "x" * 4_000_000}, "prompt"),
        ({"prompt": ["a"] * 3000}, "prompt"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 100}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"echo": "yes"}, "echo"),
    ],
    ids=lambda v: str(v)[:60],
)
def test_completions_that_cannot_be_served(dry: Server, fields: dict, name: str) -> None:
    error = refused(dry, TEXT, {"prompt": "Hi", **fields})
    assert name in error["message"] or error["param"] == name, error


@pytest.mark.parametrize(
    ("path", "field", "body"),
    [
        (CHAT, "max_tokens", chat("a b c")),
        (CHAT, "max_completion_tokens", chat("a b c", max_tokens=1)),
        (TEXT, "max_tokens", {"prompt": ["a b c", "d"]}),
        ("/generate", "max_new_tokens", {"prompt": "a b c"}),
    ],
)
def test_more_tokens_than_the_prompt_leaves_room_for(dry: Server, path: str, field: str, body: dict) -> None:
    for size in (2048, 10_000):
        error = refused(dry, path, {**body, field: size})
        assert error["param"] == field and error["code"] == "context_length_exceeded"
        assert re.fullmatch(
            rf"{field} must be at most \d+, got {size}: the prompt has \d+ tokens, and both together must fit into "
            r"max_model_len \(2048\); this model's maximum context length is exceeded \(context_length_exceeded\)",
            error["message"],
        )
    room = int(re.findall(r"\d+", error["message"])[0])
    refused(dry, path, {**body, field: room + 1})
    assert dry.post(path, {**body, field: room}).status_code == 200


def test_a_length_that_nobody_asked_for_is_what_fits(dry: Server) -> None:
    prompt = [5] * 2040
    answer = dry.post(TEXT, {"prompt": prompt}).json()  # 16 by default
    assert answer["usage"]["completion_tokens"] == 8 and answer["choices"][0]["finish_reason"] == "length"
    cut = {"prompt": prompt, "truncate_prompt_tokens": -1}  # as vLLM: to what leaves room for the answer
    usage = dry.post(TEXT, {**cut, "max_tokens": 16}).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2032, 16)
    assert dry.post(TEXT, cut).json()["usage"]["prompt_tokens"] == 2040
    refused(dry, TEXT, {**cut, "max_tokens": 5000})


def test_the_newer_apis_cut_the_answer_and_say_so(dry: Server) -> None:
    messages = [{"role": "user", "content": "a b c"}]
    for path, asked in (
        ("/v1/responses", {"input": "a b c", "max_output_tokens": 5000}),
        ("/v1/messages", {"messages": messages, "max_tokens": 5000}),
    ):
        (warning,) = dry.post(path, {**asked, "ignore_eos": True}).json()["warnings"]
        assert re.fullmatch(
            r"the answer can have \d+ tokens: more do not fit into max_model_len \(2048\)", warning
        )


BODIES = [
    b"",
    b"x",
    b"null",
    b"[]",
    b'"text"',
    b"{",
    b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": "a", "temperature": Infinity}',
    b'{"prompt": "a", "temperature": 1e999}',
    b'{"prompt": "a", "max_tokens": 1' + b"0" * 5000 + b"}",
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "\\udc00 \\ud800"}',
    b'{"prompt": "\xff\xfe"}',
    b'{"prompt": ' + b"[" * 60_000,
    b'{"prompt": ' + b"[" * 500 + b"]" * 500 + b"}",
    b'{"a":' * 30_000,
    b'{"prompt": "a", "metadata": ' + b'{"a":' * 70 + b"1" + b"}" * 70 + b"}",
    b'{"prompt": "a"} trailing',
    "{}".encode("utf-16"),
    b"\x00" * 1000,
]


@pytest.mark.parametrize("body", BODIES, ids=lambda b: repr(b[:30]))
def test_bodies_that_are_no_request(dry: Server, body: bytes) -> None:
    for path in (CHAT, TEXT, "/generate", "/tokenize", "/detokenize"):
        refused(dry, path, body)


@pytest.mark.parametrize(
    ("body", "where"),
    [
        (b'{"prompt": "a \\ud800"}', "prompt"),
        (b'{"prompt": ["a", "\\udc00\\ud800"]}', "prompt[1]"),
        (b'{"prompt": "a", "stop": "\\ud83dx"}', "stop"),
        (
            b'{"messages": [{"role": "user", "content": [{"text": "\\uDEAD"}]}]}',
            "messages[0].content[0].text",
        ),
        (b'{"logit_bias": {"\\ud800": 1}}', "logit_bias"),
        (b'{"\\ud800": 1}', "the body"),
    ],
)
def test_half_a_character_is_said_to_be_one(dry: Server, body: bytes, where: str) -> None:
    error = refused(dry, TEXT, body)
    assert error["message"] == f"{where} is not valid Unicode: it holds half of a surrogate pair"
    assert error["param"] == (None if where == "the body" else re.match(r"\w+", where)[0])
    assert "UTF-8: byte 0xff at position 13" in refused(dry, TEXT, b'{"prompt": "a\xff"}')["message"]


def test_a_compressed_body(dry: Server) -> None:
    answer = dry.http.post(TEXT, content=gzip.compress(b"{}"), headers={**JSON, "content-encoding": "gzip"})
    assert answer.status_code == 400 and "content-encoding gzip is not supported" in answer.text


def test_odd_but_harmless(dry: Server) -> None:
    """Nulls, whole numbers as fractions, NUL characters, duplicate keys and content-type parameters are no errors."""
    assert dry.post(TEXT, {"prompt": "Hi", "suffix": "", "max_tokens": 1}).status_code == 200
    nulls = dict.fromkeys(
        ["temperature", "stop", "tools", "seed", "n", "logit_bias", "stream_options", "user"]
    )
    assert dry.post(CHAT, chat("Hi", **nulls)).status_code == 200
    assert dry.post(TEXT, {"prompt": "Hi", "max_tokens": 2.0}).json()["usage"]["completion_tokens"] == 2
    assert dry.post(TEXT, {"prompt": "a\x00b"}).status_code == 200
    body = b'{"prompt": "Hi", "max_tokens": 1, "max_tokens": 3}'
    answer = dry.http.post(TEXT, content=body, headers={"content-type": "application/JSON; charset=utf-8"})
    assert answer.json()["usage"]["completion_tokens"] == 3


def test_other_routes(dry: Server) -> None:
    assert refused(dry, CHAT, chat("Hi", model="gpt-4"), 404)["code"] == "model_not_found"
    assert refused(dry, "/v1/nowhere", {}, 404)["message"].startswith("no route for POST /v1/nowhere")
    answer = dry.http.get(CHAT)
    assert answer.status_code == 405 and answer.json()["error"]["message"]
    assert refused(dry, "/detokenize", {"tokens": [2048]})["param"] == "tokens"
    assert refused(dry, "/detokenize", {"tokens": [2**70]})["param"] == "tokens"
    refused(dry, "/tokenize", {})
    refused(dry, "/tokenize", {"prompt": "a", "messages": []})
    refused(dry, "/tokenize", {"messages": []})
    refused(dry, "/generate", {"prompt": "a", "stream": True})
    refused(dry, "/generate", {"prompt": "a", "n": 2})


def test_structured_output_is_refused_or_kept(dry: Server) -> None:
    """Each field for structured output reaches the engine's check, so none is ignored in silence."""
    schema = {"type": "object"}
    for fields in (
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}},
        {"response_format": {"type": "json_schema", "schema": schema}},
        {"structured_outputs": {"json": schema}},
        {"guided_choice": ["a", "b"]},
    ):
        answer = dry.post(CHAT, chat("Hi", **fields))
        assert answer.status_code == 200 or "structured" in answer.json()["error"]["message"]
    assert dry.post(CHAT, chat("Hi", response_format={"type": "text"})).status_code == 200


def test_openai_client_raises_its_own_errors(dry: Server) -> None:
    client = openai.OpenAI(base_url=f"{dry.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "Hi"}], temperature=-3
        )
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="Hi")


def test_request_ids(dry: Server) -> None:
    given = dry.post(CHAT, chat("Hi", request_id="mine"), headers={"X-Request-Id": "abc-1"})
    assert given.headers["x-request-id"] == "abc-1" and given.json()["id"] == "chatcmpl-mine"
    made = dry.post(CHAT, chat("Hi"))
    assert len(made.headers["x-request-id"]) == 32
    assert dry.post(CHAT, {}).headers["x-request-id"]
    odd = dry.post(CHAT, chat("Hi"), headers={"X-Request-Id": "a b"})
    assert odd.headers["x-request-id"] != "a b"
    twice = [dry.post(CHAT, chat("Hi", request_id="same")).json()["id"] for _ in range(2)]
    assert twice == ["chatcmpl-same"] * 2


def test_an_error_in_a_stream_has_its_own_status_before_the_first_byte(dry: Server) -> None:
    answer = dry.post(CHAT, chat("Hi", stream=True, temperature=-1))
    assert answer.status_code == 400 and answer.headers["content-type"] == "application/json"
    assert answer.json()["error"]["param"] == "temperature"


def test_still_healthy_and_nothing_leaked(dry: Server) -> None:
    stats = dry.wait_until_idle()
    assert stats["blocks"]["used"] == 0
    answer = dry.post(CHAT, chat("Hi", stream=True))
    assert events(answer)[-1] == "[DONE]"
    assert dry.http.get("/health").json() == {"status": "ok", "model": "demo", "mode": "dry-run"}
