"""Completions, /generate, and the routes of the tokenizer."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from serving import Server, events

STORY = "Once upon a time"


def test_openai_client(demo: Server) -> None:
    client = openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0)
    answer = client.completions.create(model="demo", prompt=STORY, max_tokens=12, temperature=0)
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-")
    assert answer.choices[0].text.startswith(" there was a") and answer.choices[0].finish_reason == "length"
    chunks = client.completions.create(model="demo", prompt=STORY, max_tokens=12, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == answer.choices[0].text
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_with_an_interval_has_the_same_text_in_fewer_events(demo: Server, route: str) -> None:
    asked = {"messages": [{"role": "user", "content": STORY}]} if "chat" in route else {"prompt": STORY}
    body = {**asked, "max_tokens": 24, "temperature": 0, "ignore_eos": True, "stream": True}

    def read(**fields: Any) -> tuple[str, int]:
        *chunks, done = events(demo.post(route, {**body, **fields}))
        assert done == "[DONE]" and "warnings" not in chunks[0]
        texts = [
            c.get("text") or c.get("delta", {}).get("content") or ""
            for chunk in chunks
            for c in chunk["choices"]
        ]
        return "".join(texts), sum(map(bool, texts))

    text, each = read()
    same, few = read(stream_interval=8)
    assert same == text and few <= 6 < each
    refused = demo.post(route, {**body, "stream_interval": 0})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "stream_interval"


def test_every_form_of_prompt(dry: Server) -> None:
    ids = dry.post("/tokenize", {"prompt": "Hello there"}).json()["tokens"]

    def texts(prompt: object, **fields: object) -> list[str]:
        body = {"prompt": prompt, "max_tokens": len(ids), **fields}
        choices = dry.post("/v1/completions", body).json()["choices"]
        assert [choice["index"] for choice in choices] == list(range(len(choices)))
        return [choice["text"] for choice in choices]

    assert texts("Hello there") == texts(["Hello there"]) == texts(ids) == texts([ids]) == ["Hello there"]
    assert texts(["Hello there", "Hello you"], n=2)[::2] == ["Hello there", "Hello you"]
    assert texts([ids, ids[:2]])[0] == "Hello there"
    assert texts("Hello there", echo=True) == texts(ids, echo=True) == ["Hello thereHello there"]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"prompt": [STORY, "The king"], "n": 2, "temperature": 0.8, "seed": 3},
        {"logprobs": 2},
        {"echo": True},
        {"stop": " a"},
        {"return_token_ids": True},
    ],
)
def test_a_stream_is_the_whole_answer_in_pieces(demo: Server, fields: dict) -> None:
    body = {"prompt": STORY, "max_tokens": 20, "temperature": 0, **fields}
    whole = demo.post("/v1/completions", body).json()
    *chunks, done = events(demo.post("/v1/completions", {**body, "stream": True}))
    assert done == "[DONE]"
    for choice in whole["choices"]:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert [c["finish_reason"] for c in mine][-1] == choice["finish_reason"]
        if "logprobs" in fields:
            for name, values in choice["logprobs"].items():
                assert [v for c in mine if c["logprobs"] for v in c["logprobs"][name]] == values
        if "return_token_ids" in fields:
            assert [t for c in mine for t in c["token_ids"]] == choice["token_ids"]
            assert mine[0]["prompt_token_ids"] == choice["prompt_token_ids"]


def test_logprobs_and_offsets(demo: Server) -> None:
    body = {"prompt": STORY, "max_tokens": 5, "temperature": 0, "logprobs": 3, "echo": True}
    (choice,) = demo.post("/v1/completions", body).json()["choices"]
    found = choice["logprobs"]
    assert choice["text"].startswith(STORY) and "".join(found["tokens"]) == choice["text"]
    for token, offset in zip(found["tokens"], found["text_offset"]):
        assert choice["text"][offset:].startswith(token)
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    assert all(value <= 0 for value in found["token_logprobs"][1:])
    assert all(token in top for token, top in zip(found["tokens"][-5:], found["top_logprobs"][-5:]))


def test_scoring_a_prompt(demo: Server) -> None:
    scored = demo.post(
        "/v1/completions", {"prompt": STORY, "max_tokens": 0, "echo": True, "logprobs": 0}
    ).json()
    (choice,) = scored["choices"]
    assert choice["text"] == STORY and choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["tokens"]) == scored["usage"]["prompt_tokens"]
    assert scored["usage"]["completion_tokens"] == 0
    longer = demo.post("/v1/completions", {"prompt": STORY, "max_tokens": 3, "prompt_logprobs": 1}).json()
    entries = longer["choices"][0]["prompt_logprobs"]
    by_id = [next(iter(entry.values()))["logprob"] for entry in entries[1:]]
    assert by_id == pytest.approx(choice["logprobs"]["token_logprobs"][1:], abs=1e-4)


@pytest.mark.parametrize("path", ["/generate", "/v1/generate"])
def test_short_form(demo: Server, path: str) -> None:
    answer = demo.post(path, {"prompt": STORY, "max_new_tokens": 7, "temperature": 0}).json()
    names = {"request_id", "text", "generated_tokens", "latency_ms", "finish_reason", "model"}
    assert set(answer) == names
    assert (
        answer["generated_tokens"] == 7 and answer["finish_reason"] == "length" and answer["latency_ms"] > 0
    )
    assert answer["model"] == "demo" and answer["text"].startswith(" there was")
    other = demo.post(path, {"prompt": STORY, "max_tokens": 7, "temperature": 0}).json()
    assert other["text"] == answer["text"]


def test_tokenize_and_back(dry: Server) -> None:
    text = "Grüße, 東京! 🙂"
    found = dry.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert (
        found["count"] == len(found["tokens"]) == len(found["token_strs"]) and found["max_model_len"] == 2048
    )
    assert dry.post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": text}
    messages = [{"role": "user", "content": "Hi"}]
    rendered = dry.post("/tokenize", {"messages": messages}).json()["tokens"]
    back = dry.post("/detokenize", {"tokens": rendered}).json()["prompt"]
    assert back == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_models_version_health_stats(dry: Server) -> None:
    assert dry.http.get("/v1/models").json()["data"][0]["max_model_len"] == 2048
    assert dry.http.get("/v1/models/demo").json()["object"] == "model"
    assert dry.http.get("/v1/models/other").status_code == 404
    assert dry.http.get("/version").json()["version"]
    for path in ("/health", "/healthz", "/ping"):
        assert dry.http.get(path).status_code == 200
    dry.post("/v1/completions", {"prompt": "a b c"})
    stats = dry.wait_until_idle()
    assert stats["blocks"]["used"] == 0 and stats["blocks"]["free"] == stats["blocks"]["total"]
    assert stats["requests"]["completed"] >= 1 and stats["tokens"]["generated"] >= 1


def test_only_what_can_be_a_prompt_is_tokenized(dry: Server) -> None:
    """2,048 tokens of 16 characters, the demo model's longest, are 32,768 characters."""
    assert dry.post("/tokenize", {"prompt": "a" * 32_768}).json()["count"] > 2048
    long = "a" * 32_769
    for path, body in (
        ("/tokenize", {"prompt": long}),
        ("/tokenize", {"messages": [{"role": "user", "content": long}]}),
        ("/v1/messages/count_tokens", {"model": "demo", "messages": [{"role": "user", "content": long}]}),
        ("/v1/completions", {"prompt": ["a", long]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": long}]}),
        ("/v1/embeddings", {"input": long}),
        ("/generate", {"prompt": long}),
    ):
        answer = dry.post(path, body)
        assert answer.status_code == 400
        assert "characters" in answer.json()["error"]["message"]
    assert dry.post("/detokenize", {"tokens": [5] * 32_768}).status_code == 200
    answer = dry.post("/detokenize", {"tokens": [5] * 32_769})
    assert answer.status_code == 400 and "at most 32768" in answer.json()["error"]["message"]
    kept = dry.post("/generate", {"prompt": long * 20, "truncate_prompt_tokens": 5, "max_tokens": 5})
    assert kept.status_code == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 5},
        {"max_tokens": 0},
        {"max_tokens": 5, "n": 3},
        {"max_tokens": 5, "n": 2, "prompt": [[7, 8, 9] * 400]},  # its events are made in a thread
    ],
    ids=["answer", "prompt only", "n", "long"],
)
def test_a_streamed_echo_has_the_log_probabilities_of_the_prompt(
    demo: Server, fields: dict[str, Any]
) -> None:
    asked = {"prompt": [STORY, "The end."], "temperature": 0, "logprobs": 2, "echo": True, **fields}
    whole = demo.post("/v1/completions", asked).json()["choices"]
    *chunks, done = events(demo.post("/v1/completions", {**asked, "stream": True}))
    assert done == "[DONE]"
    for choice in whole:
        pieces = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        assert pieces[-1]["finish_reason"] == choice["finish_reason"]
        assert pieces[0]["logprobs"]["token_logprobs"][0] is None
        for name, expected in choice["logprobs"].items():
            found = [value for piece in pieces for value in piece["logprobs"][name]]
            if name in ("tokens", "text_offset"):
                assert found == expected
            else:
                assert len(found) == len(expected)
        logprobs = [value for piece in pieces for value in piece["logprobs"]["token_logprobs"][1:]]
        assert all(value is not None for value in logprobs)
