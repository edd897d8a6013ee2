"""Answers and chunks, checked against OpenAI's description of its API."""

from __future__ import annotations

import pytest
from serving import Check, Server, chat, events

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 2, "temperature": 1, "seed": 1},
        {"logprobs": True, "top_logprobs": 2},
        {"max_tokens": 3},
        {"stop": "7"},
        {"nonsense": 1},
    ],
)
def test_chats(demo: Server, check: Check, fields: dict) -> None:
    body = chat("What is 27 + 45?", temperature=0, **{k: v for k, v in fields.items() if k != "temperature"})
    check(demo.post(CHAT, body).json(), "CreateChatCompletionResponse")
    for options in (None, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}):
        *chunks, _ = events(demo.post(CHAT, {**body, "stream": True, "stream_options": options}))
        assert chunks
        for chunk in chunks:
            check(chunk, "CreateChatCompletionStreamResponse")


@pytest.mark.parametrize(
    "fields",
    [{}, {"n": 2}, {"logprobs": 2}, {"prompt": ["a", "b"], "echo": True}, {"max_tokens": 0, "echo": True}],
)
def test_completions(demo: Server, check: Check, fields: dict) -> None:
    body = {"prompt": "Once upon a time", **fields}
    check(demo.post(TEXT, body).json(), "CreateCompletionResponse")
    *chunks, _ = events(demo.post(TEXT, {**body, "stream": True, "stream_options": {"include_usage": True}}))
    for chunk in chunks:
        if chunk.get("usage") is None:
            chunk.pop("usage", None)  # null in all chunks but the last, says the text of the description
        for choice in chunk[
            "choices"
        ]:  # and this schema, unlike that of chats, does not know unfinished chunks
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        check(chunk, "CreateCompletionResponse")


def test_models_and_errors(dry: Server, check: Check) -> None:
    check(dry.http.get("/v1/models").json(), "ListModelsResponse")
    check(dry.http.get("/v1/models/demo").json(), "Model")
    for path, body in (
        (CHAT, {}),
        (CHAT, chat("Hi", temperature=-1)),
        (TEXT, {"prompt": "Hi", "model": "x"}),
    ):
        check(dry.post(path, body).json(), "ErrorResponse")
