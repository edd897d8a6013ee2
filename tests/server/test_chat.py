"""Chats, through the OpenAI client and as plain JSON."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from serving import Server, chat, events, serving

SUM = "What is 27 + 45?"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@pytest.fixture
def client(demo: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0)


def test_openai_client(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": SUM}], temperature=0
    )
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-") and answer.model == "demo"
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and choice.message.content == "27 + 45 = 72"
    assert choice.finish_reason == "stop" and choice.message.tool_calls is None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0


def test_openai_client_streams(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": SUM}],
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].choices[0].delta.content == ""
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == "27 + 45 = 72"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 11
    assert len({chunk.id for chunk in chunks}) == len({chunk.created for chunk in chunks}) == 1


def test_async_client_answers_many_at_once(demo: Server) -> None:
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{demo.url}/v1", api_key="none") as client:
            asked = [
                client.chat.completions.create(
                    model="demo", messages=[{"role": "user", "content": f"What is {n} + 5?"}], temperature=0
                )
                for n in range(10, 40)
            ]
            return [answer.choices[0].message.content for answer in await asyncio.gather(*asked)]

    answers = asyncio.run(run())
    assert [a.split("= ")[-1] for a in answers] == [str(n + 5) for n in range(10, 40)]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3, "temperature": 0.9, "seed": 5},
        {"stop": ["4", "zzz"]},
        {"stop": "= ", "include_stop_str_in_output": True},
        {"logprobs": True, "top_logprobs": 3},
        {"max_completion_tokens": 4},
        {"skip_special_tokens": False, "ignore_eos": True, "max_tokens": 30},
        {"return_token_ids": True},
    ],
)
def test_a_stream_is_the_whole_answer_in_pieces(demo: Server, fields: dict) -> None:
    body = chat(SUM, temperature=0, **{k: v for k, v in fields.items() if k != "temperature"})
    body["temperature"] = fields.get("temperature", 0)
    whole = demo.post("/v1/chat/completions", body).json()
    *chunks, done = events(demo.post("/v1/chat/completions", {**body, "stream": True}))
    assert done == "[DONE]"
    for choice in whole["choices"]:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["delta"].get("content", "") for c in mine) == choice["message"]["content"]
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [choice["finish_reason"]]
        assert mine[-1]["stop_reason"] == choice["stop_reason"]
        if fields.get("logprobs"):
            got = [entry for c in mine if c["logprobs"] for entry in c["logprobs"]["content"]]
            assert got == choice["logprobs"]["content"]
        if fields.get("return_token_ids"):
            assert [t for c in mine for t in c.get("token_ids", [])] == choice["token_ids"]
    if fields.get("return_token_ids"):
        assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]


def test_usage_in_streams(demo: Server) -> None:
    body = chat(SUM, temperature=0, stream=True)
    plain = events(demo.post("/v1/chat/completions", body))
    assert all("usage" not in chunk for chunk in plain[:-1])
    with_usage = events(
        demo.post("/v1/chat/completions", {**body, "stream_options": {"include_usage": True}})
    )
    assert [chunk["usage"] for chunk in with_usage[:-2]] == [None] * (len(with_usage) - 2)
    assert with_usage[-2]["choices"] == [] and with_usage[-2]["usage"]["total_tokens"] == 29
    options = {"include_usage": True, "continuous_usage_stats": True}
    running = events(demo.post("/v1/chat/completions", {**body, "stream_options": options}))
    counts = [chunk["usage"]["completion_tokens"] for chunk in running[:-1]]
    assert counts[0] == 0 and running[0]["usage"]["prompt_tokens"] > 0  # before any text
    assert counts == sorted(counts) and counts[-1] == 11


def test_logprobs(demo: Server) -> None:
    body = chat(SUM, temperature=0, logprobs=True, top_logprobs=2)
    (choice,) = demo.post("/v1/chat/completions", body).json()["choices"]
    content = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == "27 + 45 = 72"
    with_end = demo.post("/v1/chat/completions", {**body, "include_stop_str_in_output": True}).json()
    assert with_end["choices"][0]["logprobs"]["content"][-1]["token"] == "<|im_end|>"
    *chunks, _ = events(demo.post("/v1/chat/completions", {**body, "stream": True}))
    streamed = [e for c in chunks for e in (c["choices"][0]["logprobs"] or {}).get("content", [])]
    assert streamed == content and bytes(content[0]["bytes"]) == b"2"
    for entry in content:
        assert next(top["token"] for top in entry["top_logprobs"]) == entry["token"]  # greedy
        assert len(entry["top_logprobs"]) == 2 and entry["logprob"] <= 0
    named = demo.post("/v1/chat/completions", {**body, "return_tokens_as_token_ids": True}).json()
    assert named["choices"][0]["logprobs"]["content"][0]["token"].startswith("token_id:")
    none = demo.post("/v1/chat/completions", chat(SUM, logprobs=True)).json()
    assert none["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_prompt_logprobs(demo: Server) -> None:
    answer = demo.post("/v1/chat/completions", chat(SUM, prompt_logprobs=1, max_tokens=1)).json()
    entries = answer["prompt_logprobs"]
    assert entries[0] is None and len(entries) == answer["usage"]["prompt_tokens"]
    assert all(set(e) == {"logprob", "rank", "decoded_token"} for e in entries[1].values())


def test_cached_tokens_and_n(demo: Server) -> None:
    """The `n` choices share the prompt's blocks; sharing among themselves does not count as cached."""
    long = chat("Rosa met Bobo at the mill. " * 20, n=3, max_tokens=2, cache_salt="fresh")
    first = demo.post("/v1/chat/completions", long).json()["usage"]
    again = demo.post("/v1/chat/completions", long).json()["usage"]
    assert first["prompt_tokens_details"]["cached_tokens"] == 0 and first["completion_tokens"] == 6
    assert again["prompt_tokens_details"]["cached_tokens"] == again["prompt_tokens"] // 16 * 16
    other = demo.post("/v1/chat/completions", {**long, "cache_salt": "other"}).json()["usage"]
    assert other["prompt_tokens_details"]["cached_tokens"] == 0


def test_template_fields(dry: Server) -> None:
    def prompt(**fields: object) -> str:
        body = chat("Hi", return_prompt_text=True, max_tokens=1)
        return dry.post("/v1/chat/completions", {**body, **fields}).json()["prompt_text"]

    assert prompt() == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert prompt(add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"
    assert "get_weather" in prompt(tools=[WEATHER])
    assert "get_weather" not in prompt(tools=[WEATHER], tool_choice="none")
    begun = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well,"}]
    assert prompt(messages=begun, continue_final_message=True).endswith("assistant\nWell,")
    template = "{{ mood }}{% for m in messages %}{{ m.content }}{% endfor %}"
    assert prompt(chat_template=template, chat_template_kwargs={"mood": "glad "}) == "glad Hi"
    assert (
        prompt(messages=[{"role": "user", "content": [{"type": "text", "text": "part"}]}]).count("part") == 1
    )


def test_a_developer_is_a_system_to_templates_without_one(dry: Server) -> None:
    messages = [{"role": "developer", "content": "Be kind."}]
    body = {"messages": messages, "chat_template": "{{ messages[0].role }}"}
    assert dry.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"] == "system"
    body["chat_template"] = "{{ messages[0].role }}{# developer #}"
    assert dry.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"] == "developer"


def test_echo_and_truncation(dry: Server) -> None:
    begun = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well,"}]
    body = {"messages": begun, "continue_final_message": True, "echo": True, "max_tokens": 2}
    answer = dry.post("/v1/chat/completions", body).json()
    assert answer["choices"][0]["message"]["content"].startswith("Well,")
    short = dry.post("/v1/chat/completions", chat("a b c d e f g h", truncate_prompt_tokens=3)).json()
    assert short["usage"]["prompt_tokens"] == 3


def test_warnings_and_strict(dry: Server) -> None:
    answer = dry.post("/v1/chat/completions", chat("Hi", nonsense=1, priority=3)).json()
    assert "nonsense" in answer["warnings"][0] and "priority" in answer["warnings"][1]
    chunks = events(dry.post("/v1/chat/completions", chat("Hi", nonsense=1, stream=True)))
    assert "nonsense" in chunks[0]["warnings"][0] and "warnings" not in chunks[1]
    assert "warnings" not in dry.post("/v1/chat/completions", chat("Hi")).json()


def test_templates_come_with_requests_only_if_the_operator_trusts_them(demo: Server) -> None:
    """The other tests use a server with --trust-request-chat-template."""
    messages = [{"role": "user", "content": "Hi"}]
    for path, body in (
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/messages", {"model": "demo", "max_tokens": 1, "messages": messages}),
        ("/v1/messages/count_tokens", {"model": "demo", "messages": messages}),
        ("/v1/responses", {"input": "Hi"}),
        ("/tokenize", {"messages": messages}),
    ):
        answer = demo.post(path, {**body, "chat_template": "{{ messages[0].content }}"})
        assert answer.status_code == 400
        assert "--trust-request-chat-template" in answer.json()["error"]["message"]


def test_unknown_roles_reach_the_template(dry: Server) -> None:
    messages = [{"role": "critic", "content": "Hi"}]
    body = {"messages": messages, "chat_template": "{{ messages[0].role }}", "max_tokens": 9}
    assert dry.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"] == "critic"
    body["chat_template"] = "{{ raise_exception('no ' + messages[0].role) }}"
    answer = dry.post("/v1/chat/completions", body)
    assert answer.status_code == 400 and "no critic" in answer.json()["error"]["message"]


def test_hostile_templates_of_requests_end(dry: Server) -> None:
    """The process that renders them ends, and another one serves the next request."""
    for source in ("{% set x=[['a']*2000]*2000 %}{{ (x|sum(start=[]))|length }}", "{{ 7 ** 999999999 }}"):
        answer = dry.post("/v1/chat/completions", {**chat("Hi"), "chat_template": source})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith("the chat template was stopped")
        assert answer.json()["error"]["param"] == "chat_template"
    assert dry.post("/v1/chat/completions", chat("Hi")).status_code == 200


def test_fields_of_other_engines_are_null(demo: Server) -> None:
    answer = demo.post("/v1/chat/completions", chat(SUM, temperature=0)).json()
    for name in ("service_tier", "prompt_logprobs", "prompt_token_ids", "kv_transfer_params"):
        assert answer[name] is None
    (choice,) = answer["choices"]
    assert choice["token_ids"] is None and choice["stop_reason"] is None
    assert choice["message"]["reasoning"] is None and choice["message"]["audio"] is None


def test_the_prompt_is_cut_at_either_side(dry: Server) -> None:
    def echoed(**fields: Any) -> str:
        body = {"prompt": "one two three four", "max_tokens": 0, "echo": True, **fields}
        return dry.post("/v1/completions", body).json()["choices"][0]["text"]

    ids = dry.post("/tokenize", {"prompt": "one two three four"}).json()["tokens"]
    assert len(ids) > 3
    for prompt in ("one two three four", ids):
        parts = [
            echoed(prompt=prompt, truncate_prompt_tokens=3, truncation_side=s) for s in ("left", "right")
        ]
        texts = [dry.post("/detokenize", {"tokens": part}).json()["prompt"] for part in (ids[-3:], ids[:3])]
        assert parts == texts


def test_a_dry_run_says_so(dry: Server, demo: Server) -> None:
    for server, mode in ((dry, "dry-run"), (demo, "model")):
        health, stats = server.http.get("/healthz").json(), server.stats()
        assert health == {"status": "ok", "model": "demo", "mode": mode}
        assert stats["mode"] == server.http.get("/version").json()["mode"] == mode
        assert stats["blocks"]["eviction_policy"] == "lru"
        answer = server.post("/v1/chat/completions", chat("Hi", max_tokens=2))
        assert answer.json()["system_fingerprint"].endswith("-dry-run") == (mode == "dry-run")
        assert answer.headers.get("x-quire-mode") == ("dry-run" if mode == "dry-run" else None)
        rows = server.stats()["batch"]["rows"]
        assert 1 <= rows["mean"] <= rows["max"]
        owner = server.http.get("/v1/models/demo").json()["owned_by"]
        assert owner == ("quire (dry-run)" if mode == "dry-run" else "quire")


def test_any_model_name() -> None:
    with serving("demo", "--dry-run", "--any-model-name") as server:
        answer = server.post("/v1/chat/completions", chat("Hi", model="gpt-4o-mini", max_tokens=2)).json()
        assert answer["model"] == "gpt-4o-mini"
        assert server.http.get("/v1/models").json()["data"][0]["id"] == "demo"
