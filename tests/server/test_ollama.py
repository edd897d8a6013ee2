"""Ollama's API over plain HTTP: the demo model, and every kind of field through a server that echoes its prompt."""

from __future__ import annotations

import json
from itertools import chain
from typing import Any

import httpx
import pytest
from serving import Server, serving
from training.tools import TOOLS as DEMO_TOOLS

from quire.serve.api.ollama.input import chat_of
from quire.serve.api.protocol.ollama import OllamaChatRequest

CHAT, TEXT = "/api/chat", "/api/generate"
SUM = [{"role": "user", "content": "What is 27 + 45?"}]
TOOLS = [tool.schema() for tool in DEMO_TOOLS if tool.name in ("get_weather", "add")]
GREEDY = {"temperature": 0}


def lines(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the lines of a stream; only the last one is done."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    found = [json.loads(line) for line in response.text.splitlines()]
    assert [line.get("done") for line in found] == [False] * (len(found) - 1) + [True]
    return found


def joined(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the last line with the texts and lists of all lines."""
    found = dict(pieces[-1])
    for name in ("response", "thinking", "logprobs", "warnings", "content", "tool_calls"):
        values = [piece[name] for piece in pieces if name in piece]
        if values:
            found[name] = "".join(values) if isinstance(values[0], str) else list(chain(*values))
    if "message" in found:
        found["message"] = joined([piece["message"] for piece in pieces])
    return found


def both(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the answer, checked to be the same whole and streamed, without times."""
    body = {"model": "demo", "options": GREEDY, **body}
    pieces = lines(server.post(path, body))
    whole = server.post(path, {**body, "stream": False}).json()
    streamed = joined(pieces)
    for answer in (streamed, whole):
        assert answer.pop("created_at").endswith("Z")
        total, load = answer.pop("total_duration"), answer.pop("load_duration")
        prompt, generated = answer.pop("prompt_eval_duration"), answer.pop("eval_duration")
        assert load == 0 and prompt > 0 and generated >= 0 and prompt + generated < total < 60e9
        for call in answer.get("message", {}).get("tool_calls", ()):
            assert call.pop("id")
    assert streamed == whole
    return whole


def echoed(dry: Server, messages: list[dict[str, Any]], **fields: Any) -> str:
    """Return the prompt of a conversation."""
    body = {"messages": messages, "stream": False, **fields}
    return dry.post(CHAT, body).json()["message"]["content"]


# ------------------------------------------------------------------------------------ the demo model


def test_a_chat(demo: Server) -> None:
    answer = both(demo, CHAT, {"messages": SUM})
    assert answer == {
        "model": "demo",
        "message": {"role": "assistant", "content": "27 + 45 = 72"},
        "done": True,
        "done_reason": "stop",
        "prompt_eval_count": 18,
        "eval_count": 11,
    }


def test_options(demo: Server) -> None:
    def say(**options: Any) -> dict[str, Any]:
        return both(demo, CHAT, {"messages": SUM, "options": {**GREEDY, **options}})

    cut = say(num_predict=3)
    assert cut["done_reason"] == "length" and cut["eval_count"] == 3
    assert say(num_predict=-1)["message"]["content"] == "27 + 45 = 72"
    assert say(stop=["="])["message"]["content"] == "27 + 45 "
    assert say(temperature=1, top_k=1.0, seed=-1, num_ctx=2048)["message"]["content"] == "27 + 45 = 72"
    assert say(repeat_penalty=100, num_predict=12)["message"]["content"] != "27 + 45 = 72"
    assert say(num_gpu=1)["warnings"] == ["unknown field 'options.num_gpu' was ignored"]
    sampled = {"temperature": 2, "seed": 7, "num_predict": 8}
    assert say(**sampled) == say(**sampled) != say(**{**sampled, "seed": 8})


def test_tools(demo: Server) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Oakford?"}]
    message = both(demo, CHAT, {"messages": messages, "tools": TOOLS})["message"]
    call = {"name": "get_weather", "arguments": {"city": "Oakford"}, "index": 0}
    assert message == {"role": "assistant", "content": "", "tool_calls": [{"function": call}]}
    result = '{"condition": "sunny", "temperature": 21}'
    messages += [message, {"role": "tool", "tool_name": "get_weather", "content": result}]
    answer = both(demo, CHAT, {"messages": messages, "tools": TOOLS})
    assert answer["message"]["content"] == "The weather in Oakford is sunny, with 21 degrees."
    two = "What is the weather in Oakford? What is the weather in Westbrook?"
    calls = both(demo, CHAT, {"messages": [{"role": "user", "content": two}], "tools": TOOLS})["message"]
    assert [call["function"]["index"] for call in calls["tool_calls"]] == [0, 1]


def test_format(demo: Server) -> None:
    properties = {"name": {"enum": ["Mira", "Tom"]}, "age": {"type": "integer", "maximum": 99, "minimum": 1}}
    schema = {
        "type": "object",
        "properties": properties,
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    found = json.loads(both(demo, TEXT, {"prompt": "Who is it?", "format": schema})["response"])
    assert found["name"] in ("Mira", "Tom") and 1 <= found["age"] <= 99
    body = {"messages": SUM, "format": "json", "options": {**GREEDY, "num_predict": 5}}
    assert both(demo, CHAT, body)["message"]["content"].startswith("{")
    assert both(demo, CHAT, {"messages": SUM, "format": ""})["message"]["content"] == "27 + 45 = 72"


def test_generate_continues_its_context(demo: Server) -> None:
    first = both(demo, TEXT, {"prompt": SUM[0]["content"]})
    assert first["response"] == "27 + 45 = 72" and len(first["context"]) == 18 + 11
    more = both(demo, TEXT, {"prompt": "What is 2 + 3?", "context": first["context"]})
    assert more["response"] == "2 + 3 = 5" and more["prompt_eval_count"] > len(first["context"])
    assert more["context"][: len(first["context"])] == first["context"]


def test_raw_prompts(demo: Server) -> None:
    body = {"prompt": "Once upon a time", "raw": True, "options": {**GREEDY, "num_predict": 10}}
    answer = both(demo, TEXT, body)
    plain = demo.post(
        "/v1/completions", {"prompt": "Once upon a time", "max_tokens": 10, "temperature": 0}
    ).json()
    assert answer["response"] == plain["choices"][0]["text"] and "context" not in answer


def test_logprobs(demo: Server) -> None:
    for path, prompt in ((CHAT, {"messages": SUM}), (TEXT, {"prompt": SUM[0]["content"]})):
        answer = both(demo, path, {**prompt, "logprobs": True, "top_logprobs": 2})
        assert answer["done_reason"] == "stop"
        assert len(answer["logprobs"]) == answer["eval_count"] - 1, "the end token is not part of the answer"
        assert all(len(token["top_logprobs"]) == 2 and token["logprob"] <= 0 for token in answer["logprobs"])


def test_embeddings(demo: Server) -> None:
    texts = ["Once upon a time", "The end."]
    answer = demo.post("/api/embed", {"model": "demo:latest", "input": texts}).json()
    theirs = demo.post("/v1/embeddings", {"input": texts}).json()
    assert answer["embeddings"] == [one["embedding"] for one in theirs["data"]]
    assert answer["prompt_eval_count"] == theirs["usage"]["prompt_tokens"] and answer["total_duration"] > 0
    short = demo.post("/api/embed", {"input": texts[0], "dimensions": 8}).json()["embeddings"]
    assert len(short) == 1 and len(short[0]) == 8 and sum(x * x for x in short[0]) == pytest.approx(1)
    (old,) = demo.post("/api/embeddings", {"prompt": texts[0]}).json().values()
    length = sum(x * x for x in old) ** 0.5
    assert length != pytest.approx(1)
    assert [x / length for x in old] == pytest.approx(answer["embeddings"][0], abs=1e-5)


def test_long_inputs_are_cut_at_their_end(demo: Server) -> None:
    body = {"input": ["Once upon a time. " * 800]}
    answer = demo.post("/api/embed", body).json()
    assert answer["prompt_eval_count"] == 2047
    (tokens,) = (demo.post("/tokenize", {"prompt": body["input"][0][:10000]}).json()["tokens"],)
    same = demo.post("/v1/embeddings", {"input": tokens[:2047]}).json()["data"][0]["embedding"]
    assert answer["embeddings"][0] == pytest.approx(same, abs=1e-4)
    refused = demo.post("/api/embed", {**body, "truncate": False})
    assert refused.status_code == 400 and refused.json()["param"] == "input"


# -------------------------------------------------------------------------------- about the model


def test_the_model_is_described(demo: Server) -> None:
    (listed,) = demo.http.get("/api/tags").json()["models"]
    assert listed["name"] == listed["model"] == "demo:latest" and len(listed["digest"]) == 64
    assert listed["size"] == 20862248 and listed["details"]["parameter_size"] == "10.4M"
    assert listed["details"]["quantization_level"] == "BF16" and listed["modified_at"] > "2020"
    (loaded,) = demo.http.get("/api/ps").json()["models"]
    engine = demo.stats()["engine"]
    assert loaded["digest"] == listed["digest"] and loaded["size_vram"] == 0
    assert loaded["size"] > engine["weight_bytes"] + engine["num_blocks"] * engine["block_bytes"]
    assert loaded["context_length"] == engine["max_model_len"] and loaded["expires_at"] > "2100"
    shown = demo.post("/api/show", {"model": "demo"}).json()
    assert shown["details"] == listed["details"] and "<|im_start|>" in shown["template"]
    assert shown["capabilities"] == ["completion", "tools"]
    assert (
        shown["model_info"]["qwen3.context_length"] == 2048 and shown["model_info"]["qwen3.block_count"] == 7
    )
    assert demo.post("/api/show", {"name": "demo:latest"}).json() == shown
    version = demo.http.get("/api/version").json()
    assert tuple(map(int, version["version"].split("."))) >= (0, 6, 4)


def test_a_request_without_a_prompt_finds_the_model_loaded(demo: Server) -> None:
    for path, empty in (
        (CHAT, {"messages": []}),
        (CHAT, {}),
        (TEXT, {}),
        (TEXT, {"prompt": "", "keep_alive": 0}),
    ):
        answer = demo.post(path, {"model": "demo", **empty}).json()
        assert answer["done"] is True and answer["done_reason"] == "load"
    assert demo.post("/api/embed", {"input": ""}).json()["embeddings"] == []
    assert demo.post("/api/embeddings", {"prompt": ""}).json() == {"embedding": []}


# -------------------------------------------------------------------------------- through the echo


def test_reasoning_is_apart(dry: Server) -> None:
    template = "{{ messages[-1].content }}{# <think></think> #}"
    body = {"prompt": "<think>So.</think>Yes", "template": template}
    answer = both(dry, TEXT, {**body, "think": True})
    assert (answer["thinking"], answer["response"]) == ("So.", "Yes")
    assert both(dry, TEXT, body)["thinking"] == "So."
    silent = both(dry, TEXT, {**body, "think": False})
    assert "thinking" not in silent and silent["response"] == "Yes"
    shows = "{{ enable_thinking }} {{ reasoning_effort }}{# <think></think> #}"
    assert both(dry, TEXT, {**body, "template": shows, "think": "low"})["response"] == "True low"


def test_messages_reach_the_template(dry: Server) -> None:
    text = echoed(dry, [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}])
    assert text == "system\nBe kind.\nuser\nHi\nassistant\n"
    continued = echoed(dry, [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "He"}])
    assert continued == "user\nHi\nassistant\nHe"
    body = {"prompt": "Hi", "system": "Be kind.", "stream": False}
    assert dry.post(TEXT, body).json()["response"] == text


def test_results_find_their_calls() -> None:
    """Ollama's clients send no ids, and name the function at most."""
    calls = [{"function": {"name": name, "arguments": {}}} for name in ("f", "g", "f")]
    results = [
        {"role": "tool", "content": "1", **name} for name in ({"tool_name": "g"}, {"tool_name": "f"}, {})
    ]
    more = [{"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "h"}}]}]
    more += [{"role": "tool", "content": "2", "tool_call_id": "x"}]
    given = [{"role": "assistant", "content": None, "thinking": "Hm.", "tool_calls": calls}, *results, *more]
    chat, warnings = chat_of(OllamaChatRequest(messages=given, truncate=True), 100)
    assert [call["id"] for call in chat.messages[0]["tool_calls"]] == ["call00000", "call00001", "call00002"]
    assert chat.messages[0]["thinking"] == "Hm." and chat.messages[0]["content"] == ""
    answered = [(m.get("tool_call_id"), m.get("name")) for m in chat.messages if m["role"] == "tool"]
    assert answered == [("call00001", "g"), ("call00000", "f"), ("call00002", "f"), ("x", "h")]
    assert warnings == ["truncate has no effect in Quire: a conversation that is too long is refused"]


# -------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("path", "fields", "param", "says"),
    [
        (CHAT, {"messages": "Hi"}, "messages", "messages must be a list"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages", "messages[0].content"),
        (CHAT, {"messages": [{"role": "user", "images": ["x"]}]}, "messages[0].images", "takes no images"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [5]}]}, "messages", "messages[0].tool_calls"),
        (CHAT, {"tools": [{"function": {}}]}, "tools", "tools[0].function.name"),
        (CHAT, {"format": "xml"}, "format", 'format must be "json" or a JSON schema'),
        (CHAT, {"format": {"type": "array", "contains": {}}}, "format", "format: json schema: the keyword"),
        (CHAT, {"think": True}, "think", "does not support thinking"),
        (CHAT, {"think": "hard"}, "think", "got 'hard'"),
        (CHAT, {"options": {"temperature": "hot"}}, "options", "options.temperature must be a number"),
        (CHAT, {"options": {"temperature": -1}}, "options.temperature", "options.temperature must be"),
        (CHAT, {"options": {"num_predict": -3}}, "options.num_predict", "options.num_predict must be"),
        (CHAT, {"options": {"repeat_penalty": -1}}, "options.repeat_penalty", "options.repeat_penalty must be"),
        (CHAT, {"options": {"num_ctx": 1 << 20}}, "options.num_ctx", "between 1 and 2048 (max_model_len), got 1048576"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        (CHAT, {"messages": [{"role": "user", "content": "a b " * 5000}]}, "messages", "max_model_len"),
        (TEXT, {"prompt": "a b " * 5000}, "prompt", "max_model_len"),
        (TEXT, {"prompt": "a", "images": ["x"]}, "images", "takes no images"),
        (TEXT, {"prompt": "a", "suffix": "b"}, "suffix", "suffix is not available"),
        (TEXT, {"prompt": "a", "raw": True, "system": "b"}, "system", "cannot be combined with raw"),
        (TEXT, {"prompt": "a", "template": "{{ oops("}, "template", "Jinja"),
        (TEXT, {"prompt": "a", "context": [4096]}, "context", "got 4096"),
        ("/api/embed", {"input": 5}, "input", "input must be"),
        ("/api/embed", {"input": "a", "dimensions": 0}, "dimensions", "at least 1"),
        ("/api/embed", {"input": ["a"] * 2049}, "input", "at most 2048"),
        ("/api/embed", {"input": "a", "timeout": -1}, "timeout", "timeout must be"),
    ],
)  # fmt: skip
def test_what_is_refused(dry: Server, path: str, fields: dict[str, Any], param: str, says: str) -> None:
    response = dry.post(path, {**({"messages": SUM} if path == CHAT else {}), **fields})
    assert response.status_code == 400, response.text
    found = response.json()
    assert set(found) == {"error", "param"}
    assert found["param"] == param and says in found["error"]


def test_other_errors_have_the_same_shape(dry: Server) -> None:
    for path in (CHAT, TEXT, "/api/show", "/api/embed", "/api/embeddings"):
        body = {"model": "other", "messages": SUM, "input": "a", "prompt": "a"}
        missing = dry.post(path, body)
        assert missing.status_code == 404
        assert missing.json()["error"] == "model 'other' not found; this server has demo:latest"
    assert dry.http.get("/api/chat").status_code == 405 and "error" in dry.http.get("/api/chat").json()
    assert "no route" in dry.post("/api/create", {}).json()["error"]
    assert dry.post_bytes(CHAT, b"{").status_code == 400
    assert dry.http.post(CHAT, content=b"{}").status_code == 415
    assert dry.post_bytes(CHAT, b" " * (17 << 20)).status_code == 413
    foreign = dry.post(CHAT, {"messages": SUM}, headers={"origin": "http://evil.example"})
    assert foreign.status_code == 403 and "evil.example" in foreign.json()["error"]
    off = dry.post("/api/pull", {"model": "some/model"})
    assert off.status_code == 403 and "--allow-pull" in off.json()["error"]


def test_keys_templates_and_errors_in_the_middle() -> None:
    with serving("demo", "--dry-run", "--dry-run-step-ms", "40", "--api-key", "right") as locked:
        wrong = locked.http.get("/api/tags")
        assert wrong.status_code == 401 and "API key" in wrong.json()["error"]
        locked.http.headers["authorization"] = "Bearer right"
        assert locked.http.get("/api/tags").status_code == 200
        untrusted = locked.post(TEXT, {"prompt": "Hi", "template": "{{ messages }}"})
        assert untrusted.status_code == 400 and untrusted.json()["param"] == "template"
        story = [{"role": "user", "content": "once " * 60}]
        late = locked.post(CHAT, {"messages": story, "timeout": 1.0})
        first, *_, last = [json.loads(line) for line in late.text.splitlines()]
        assert first["done"] is False and "timeout of 1 s" in last["error"]
        assert locked.wait_until_idle()["blocks"]["used"] == 0
