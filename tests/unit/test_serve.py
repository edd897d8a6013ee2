"""Parts of the server that need no server: choices over every split, admission, keys, structured output, JSON."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from quire.config import EngineConfig
from quire.frontend.length import check_length
from quire.frontend.location import locate_model
from quire.frontend.tokenizer.tokenizer import load_tokenizer
from quire.serve.admission import Admission
from quire.serve.answer.choice import ChatChoiceBuilder
from quire.serve.answer.parser import (
    Arguments,
    Content,
    ParserEvent,
    PlainText,
    Reasoning,
    TextParser,
    ToolCall,
)
from quire.serve.api.protocol.chat import ChatRequest
from quire.serve.api.structured_fields import structured_outputs
from quire.serve.api.tokens import detokenize, tokenize
from quire.serve.async_engine import prefix_salt
from quire.serve.client_threads import ClientThreads
from quire.serve.http.auth import ANYONE, ApiClient, ApiKeys, bearer, load_keys
from quire.serve.http.body import BodyReader
from quire.serve.http.errors import ApiError
from quire.serve.http.listen import bind, listen
from quire.serve.http.wire import decode_object, encode, parse
from quire.serve.settings import ServeConfig
from quire.types import (
    CompletionOutput,
    ConfigError,
    EngineLoad,
    RequestError,
    RequestTargets,
    StructuredOutputsParams,
)

TOKENIZER = load_tokenizer(locate_model("demo").path)


class Brackets:
    """A parser for tests: (reasoning), [arguments of a call], everything else is content."""

    def __init__(self) -> None:
        self._kind, self._calls = "", 0

    def feed(self, text: str) -> list[ParserEvent]:
        found: list[ParserEvent] = []
        for char in text:
            if char in "([":
                self._kind = char
                if char == "[":
                    found.append(ToolCall(self._calls, f"call_{self._calls}", "f"))
            elif char in ")]":
                self._calls += char == "]"
                self._kind = ""
            elif self._kind == "(":
                found.append(Reasoning(char))
            elif self._kind == "[":
                found.append(Arguments(self._calls, char))
            else:
                found.append(Content(char))
        return found

    def finish(self) -> list[ParserEvent]:
        return [Content("!")]


def builder(parser: TextParser, **options: Any) -> ChatChoiceBuilder:
    settings: dict[str, Any] = dict(
        role="assistant", prefix="", top_logprobs=None, as_ids=False, token_ids=True, reasoning=True
    )
    return ChatChoiceBuilder(0, parser, TOKENIZER, **{**settings, **options})


def whole(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client makes of a stream."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "ids": [], "reason": None}
    for piece in pieces:
        delta = piece["delta"]
        message["content"] += delta.get("content", "")
        message["reasoning"] += delta.get("reasoning", "")
        message["ids"] += piece.get("token_ids", [])
        message["reason"] = piece["finish_reason"] or message["reason"]
        for call in delta.get("tool_calls", []):
            if "id" in call:
                assert call["index"] == len(message["calls"]) and call["type"] == "function"
                message["calls"].append([call["id"], call["function"]["name"], ""])
            message["calls"][call["index"]][2] += call["function"]["arguments"]
    return message


@pytest.mark.parametrize("reasoning", [True, False])
@pytest.mark.parametrize("text", ["plain", "(think)a[{1}][{2}]b", "[x]", "()", ""])
def test_every_split_of_a_text_makes_the_same_message(text: str, reasoning: bool) -> None:
    ids = list(range(len(text)))
    full = CompletionOutput(0, text, ids, finish_reason="stop", stop_reason=7)
    choice = json.loads(encode(builder(Brackets(), reasoning=reasoning).message(full)))
    message = choice["message"]
    expected = {
        "content": message["content"] or "",
        "reasoning": message["reasoning"] or "",
        "calls": [
            [c["id"], c["function"]["name"], c["function"]["arguments"]]
            for c in message.get("tool_calls", [])
        ],
        "ids": choice["token_ids"],
        "reason": choice["finish_reason"],
    }
    assert expected["reason"] == ("tool_calls" if "[" in text else "stop")
    assert message.get("reasoning") == message.get("reasoning_content")
    for count in range(min(4, len(text)) + 1):
        for cuts in combinations(range(1, len(text)), count):
            stream = builder(Brackets(), reasoning=reasoning)
            edges = [0, *cuts, len(text)]
            pieces = []
            for begin, end in pairwise(edges):
                pieces += stream.chunks(CompletionOutput(0, text[begin:end], ids[begin:end]))
            pieces += stream.chunks(replace(full, text="", token_ids=[]))
            assert whole([json.loads(encode(piece)) for piece in pieces]) == expected


def test_text_that_is_held_back_keeps_its_ids() -> None:
    stream = builder(PlainText())
    pieces = [
        *stream.chunks(CompletionOutput(0, "", [1])),
        *stream.chunks(CompletionOutput(0, "", [2])),
        *stream.chunks(CompletionOutput(0, "ab", [3])),
        *stream.chunks(CompletionOutput(0, "", [], finish_reason="length")),
    ]
    assert whole([json.loads(encode(piece)) for piece in pieces]) == {
        "content": "ab", "reasoning": "", "calls": [], "ids": [1, 2, 3], "reason": "length",
    }  # fmt: skip


# --------------------------------------------------------------------------------------- admission


def test_admission_counts_what_waits() -> None:
    gate = Admission(max_waiting=2, max_waiting_tokens=None, max_num_seqs=2)
    for _ in range(4):  # two run, two wait
        gate.arrive(ANYONE, 1)
        gate.pass_on(ANYONE, 1, 10, 10)
        gate.prepared(1)
    assert gate.waiting == 2 and gate.waiting_tokens == 40
    with pytest.raises(ApiError) as caught:
        gate.arrive(ANYONE, 1)
    assert caught.value.status == 503 and int(caught.value.headers["Retry-After"]) >= 1
    gate.report(EngineLoad(received=4, running=2, waiting=2, waiting_tokens=20))
    assert gate.waiting == 2 and gate.waiting_tokens == 20
    gate.report(EngineLoad(received=4, running=2, waiting=0))
    for _ in range(2):
        gate.leave(ANYONE, 1)
    gate.arrive(ANYONE, 2)
    assert gate.waiting == 2 and gate.num_open == 4
    gate.prepared(2)
    gate.leave(ANYONE, 2)
    assert gate.waiting == 0
    with pytest.raises(ApiError) as caught:
        gate.arrive(ANYONE, 5)
    assert caught.value.status == 400  # never


def test_a_full_queue_still_takes_a_clients_share() -> None:
    gate = Admission(max_waiting=4, max_waiting_tokens=None, max_num_seqs=1, total_weight=2.0)
    greedy, modest = ApiClient("greedy"), ApiClient("modest")
    for _ in range(5):
        gate.arrive(greedy, 1)
    for client, count in ((modest, 2), (greedy, 0)):
        for _ in range(count):
            gate.arrive(client, 1)
        with pytest.raises(ApiError):
            gate.arrive(client, 1)


def test_tokens_that_wait_are_limited_but_one_request_always_fits() -> None:
    gate = Admission(max_waiting=9, max_waiting_tokens=100, max_num_seqs=1)
    gate.arrive(ANYONE, 1)
    gate.pass_on(ANYONE, 1, 1000, 1000)
    gate.prepared(1)
    gate.report(EngineLoad(received=1, running=1))
    gate.arrive(ANYONE, 1)
    with pytest.raises(ApiError) as caught:
        gate.pass_on(ANYONE, 1, 101, 1)
    assert caught.value.status == 503
    gate.prepared(1)


def test_requests_that_would_miss_their_first_token_are_refused_with_the_time_to_wait() -> None:
    gate = Admission(max_waiting=99, max_waiting_tokens=None, max_num_seqs=4)
    gate.arrive(ANYONE, 1)
    assert gate.pass_on(ANYONE, 1, 9000, 9000, 0.5) is None, "nothing predicts it yet"
    gate.prepared(1)
    gate.report(EngineLoad(1, 1, 0, 0, computing_tokens=8000, prompt_rate=1000.0))
    gate.arrive(ANYONE, 1)
    with pytest.raises(ApiError) as caught:
        gate.pass_on(ANYONE, 1, 100, 100, target_ttft_s=3.0)
    assert caught.value.status == 503 and caught.value.headers["Retry-After"] == "5", (
        "8.1 s, less the target of 3"
    )
    assert gate.rejections["target_ttft"] == 1
    assert gate.pass_on(ANYONE, 1, 100, 100, target_ttft_s=9.0) == pytest.approx(8.1)
    gate.prepared(1)
    gate.arrive(ANYONE, 1)
    assert gate.pass_on(ANYONE, 1, 5000, 5000, target_ttft_s=4.0) == pytest.approx(13.1), (
        "waiting would not help it"
    )
    gate.prepared(1)
    # All slots are taken: the queue ends as fast as requests end.
    gate.report(EngineLoad(3, 4, 9, 0, prompt_rate=1000.0), "slots")
    gate._rate = 2.0
    gate.arrive(ANYONE, 1)
    assert gate.pass_on(ANYONE, 1, 100, 100) == pytest.approx(11 / 2.0 + 0.1)


def test_cached_tokens_count_neither_for_a_prompt_nor_for_those_in_front_of_it() -> None:
    gate = Admission(max_waiting=99, max_waiting_tokens=None, max_num_seqs=4)
    gate.report(EngineLoad(0, 1, 2, 9000, uncached_tokens=500, computing_tokens=1000, prompt_rate=1000.0))
    for tokens, uncached, forecast_s in ((5000, 16, 1.516), (5000, 300, 1.816), (5000, 5000, 6.816)):
        gate.arrive(ANYONE, 1)
        assert gate.pass_on(ANYONE, 1, tokens, uncached, 8.0) == pytest.approx(forecast_s)
        gate.prepared(1)
    gate.arrive(ANYONE, 1)
    with pytest.raises(ApiError) as caught:
        gate.pass_on(ANYONE, 1, 5000, 5000, 8.0)
    assert caught.value.headers["Retry-After"] == "4", "11.8 s, less the target of 8"
    gate.pass_on(ANYONE, 1, 5000, 16, 8.0)
    gate.report(EngineLoad(3, 1, 0, 0, prompt_rate=1000.0))
    gate.arrive(ANYONE, 1)
    assert gate.pass_on(ANYONE, 1, 100, 100) == pytest.approx(0.116), (
        "those that arrived are not on their way"
    )


# -------------------------------------------------------------------------------------------- port


def test_two_servers_that_start_at_once_do_not_both_listen() -> None:
    with bind(ServeConfig(port=0)) as first:
        settings = ServeConfig(port=first.getsockname()[1])
        with bind(settings) as second:  # nobody listens yet
            listen(first, settings)
            with pytest.raises(ConfigError, match="choose another --port"):
                listen(second, settings)


# -------------------------------------------------------------------------------------------- keys


def test_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(
        "# who\nsecret-1 weight=2.5 name=team\nsecret-2\nroot name=ops admin target_itl=40 target_ttft=500\n\n"
    )
    keys = load_keys(["flag"], "one, two ,", str(file))
    assert len(keys) == 6 and keys.total_weight == 7.5
    assert keys.client("secret-1") == ApiClient("team", 2.5)
    assert (
        keys.client("root") == ApiClient("ops", admin=True, targets=RequestTargets(0.04, 0.5))
        and not keys.client("flag").admin
    )
    assert keys.client("two") is not None and keys.client("") is None and keys.client(None) is None
    assert keys.client("secret-") is None and keys.client("ü") is None
    assert ApiKeys({}).client(None) is ANYONE and ANYONE.sees is None and ApiClient("team").sees == "team"
    for text in (
        "k weight=0",
        "k weight=x",
        "k target_itl=0",
        "k target_ttft=soon",
        "k wait=3",
        "k admin=1",
        "k name=a name=b",
        "k admin admin",
        "",
    ):
        file.write_text(text)
        with pytest.raises(ConfigError):
            load_keys([], "", str(file))
    for flags in ([""], ["fine", " "]):  # as --api-key "$UNSET" gives it
        with pytest.raises(ConfigError, match="api_key must not be empty"):
            load_keys(flags, "", None)
    file.write_text("schlüssel\n")
    for arguments in (
        (["schlüssel"], "", None),
        ([], "a,ключ", None),
        ([], "", str(file)),
        (["a\tb"], "", None),
    ):
        with pytest.raises(ConfigError, match="other than printable ASCII") as error:
            load_keys(*arguments)
        assert "schl" not in str(error.value)  # a key is not shown
    assert (
        bearer("Bearer  abc ", None) == "abc"
        and bearer("Basic abc", "x") == "x"
        and bearer(None, None) is None
    )


def test_no_two_keys_share_an_identity_by_accident(tmp_path: Path) -> None:
    """An identity comes from the key, not from its place among the others."""
    alone = load_keys(["b"], "", None).client("b")
    for flags, environment in ((["a", "b"], ""), (["b"], "a"), ([], "a,b"), ([], "b,a")):
        keys = load_keys(flags, environment, None)
        assert keys.client("b") == alone != keys.client("a")
    file = tmp_path / "keys"
    file.write_text("a\nb\n")
    assert load_keys([], "", str(file)).client("b") == alone
    assert alone is not None and "b" not in alone.name.removeprefix("key-")[:1]  # it is a digest


@pytest.mark.parametrize(
    ("flags", "environment", "lines", "where"),
    [
        (["hush", "hush", "b"], "", None, "in --api-key"),
        (["hush", " hush "], "", None, "in --api-key"),
        (["b"], "hush, hush", None, "in QUIRE_API_KEY"),
        (["hush"], "b,hush", None, "in --api-key and in QUIRE_API_KEY"),
        (["hush"], "", "hush name=a", "in --api-key and in the API key file"),
        ([], "hush", "b\nhush weight=2", "in QUIRE_API_KEY and in the API key file"),
        ([], "", "hush\nb\nhush", "in the API key file"),
        ([], "", "hush name=a\nhush name=a", "in the API key file"),
    ],
)
def test_a_key_that_is_given_twice_is_refused(
    tmp_path: Path, flags: list[str], environment: str, lines: str | None, where: str
) -> None:
    file = tmp_path / "keys"
    file.write_text(lines or "")
    with pytest.raises(ConfigError, match=f"given twice, {where}") as error:
        load_keys(flags, environment, str(file) if lines else None)
    assert "hush" not in str(error.value)


def test_keys_of_one_name_are_one_client(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("old name=team weight=2\nnew name=team weight=2\nother\n")
    keys = load_keys([], "", str(file))
    assert keys.client("old") == keys.client("new") and keys.total_weight == 3
    for line in ("new name=team", "new name=team weight=2 admin"):
        file.write_text(f"old name=team weight=2\n{line}\n")
        with pytest.raises(ConfigError, match="'team' belong to one client"):
            load_keys([], "", str(file))


def test_the_prefix_cache_is_salted_by_key() -> None:
    def salt(client: ApiClient, given: str, **settings: bool) -> str:
        return prefix_salt(client, given, ServeConfig(**settings).share_prefix_cache)

    given = ["", "x", "a", "a\n", "\n"]
    salts = {salt(ApiClient(name), one) for name in ("a", "b", "ab") for one in given}
    assert len(salts) == 3 * len(given)
    assert [salt(ANYONE, one) for one in given] == given
    assert [salt(ApiClient("a"), one, share_prefix_cache=True) for one in given] == given


# ---------------------------------------------------------------------------------------- tokenize


def test_tokenizing_is_not_done_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    names: set[str] = set()

    def noted(name: str) -> Callable[..., Any]:
        method = getattr(TOKENIZER, name)

        def call(*args: Any) -> Any:
            names.add(threading.current_thread().name)
            return method(*args)

        return call

    for name in ("encode", "token_text", "decode"):
        monkeypatch.setattr(TOKENIZER, name, noted(name))

    engine = SimpleNamespace(
        tokenizer=TOKENIZER,
        config=EngineConfig(),
        info=SimpleNamespace(max_model_len=2048, vocab_size=2048),
    )
    server = SimpleNamespace(engine=engine, settings=ServeConfig(), bodies=BodyReader(None, 100, 2048))
    server.counting = ClientThreads(1, 8, "counting")
    server.check_model = lambda name: "demo"
    app = Starlette(routes=[Route(f"/{f.__name__}", f, methods=["POST"]) for f in (tokenize, detokenize)])
    app.state.server = server

    async def ask() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as http:
            found = (await http.post("/tokenize", json={"prompt": "Hi", "return_token_strs": True})).json()
            assert "".join(found["token_strs"]) == "Hi"
            assert (await http.post("/detokenize", json={"tokens": found["tokens"]})).json() == {
                "prompt": "Hi"
            }

    try:
        asyncio.run(ask())
    finally:
        server.counting.close()
    assert names == {"counting_0"}


# ------------------------------------------------------------------------------- structured output

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, {"json": SCHEMA}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            {"json": SCHEMA},
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, {"json": {}}),
        ({"structured_outputs": {"json": SCHEMA}}, {"json": SCHEMA}),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, {"json": json.dumps(SCHEMA)}),
        ({"structured_outputs": {"regex": "a+", "json": None}}, {"regex": "a+"}),
        ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
        ({"structured_outputs": {"json": {}}}, {"json": {}}),
        ({"guided_json": SCHEMA}, {"json": SCHEMA}),
        ({"guided_regex": "a"}, {"regex": "a"}),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"guided_grammar": "root ::= x"}, {"grammar": "root ::= x"}),
    ],
)
def test_structured_output(fields: dict, expected: dict | None) -> None:
    request, _ = parse({"messages": [], **fields}, ChatRequest, False)
    wanted = None if expected is None else StructuredOutputsParams(**expected)
    assert structured_outputs(request) == wanted


# -------------------------------------------------------------------------------------------- JSON


@pytest.mark.parametrize("depth", [1, 40, 64, 65, 66, 300, 200_000])
@pytest.mark.parametrize(("begin", "end"), [('{"a":', "}"), ("[", "]")])
def test_nesting_has_a_limit(depth: int, begin: str, end: str) -> None:
    inner = begin * depth + "1" + end * depth
    body = b'{"x":' + inner.encode() + b"}"
    if depth <= 63:
        assert decode_object(body)
    else:
        with pytest.raises(ApiError, match="nested more than 64 levels deep"):
            decode_object(body)


def test_wide_is_not_deep() -> None:
    assert decode_object(json.dumps({"x": [[1]] * 10_000}).encode())


def test_warnings_are_short_and_few() -> None:
    _, warnings = parse({"messages": [], **{f"{i}" + "x" * 500: 1 for i in range(100)}}, ChatRequest, False)
    assert len(warnings) <= 16 and max(map(len, warnings)) < 100
    with pytest.raises(ApiError) as caught:
        parse({"messages": [], "nonsense": 1}, ChatRequest, True)
    assert caught.value.param == "nonsense"


def test_texts_that_are_much_too_long_are_not_tokenised() -> None:
    check_length(TOKENIZER, "word " * 2000, 2048)  # may be too long: the tokenizer will say
    for text in ("x" * 5_000_000, " " * 5_000_000, "word " * 1_000_000):
        with pytest.raises(RequestError, match=re.escape("more than 2048 tokens, the limit (max_model_len)")):
            check_length(TOKENIZER, text, 2048)
    check_length(TOKENIZER, "word " * 20_000, 41_000)
