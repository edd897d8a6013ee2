"""The client of `quire bench serve`: the requests that it sends, and how it reads a stream."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from quire.bench.load.arrivals import ramp_times
from quire.bench.load.datasets import (
    BenchRequest,
    custom,
    prefix_repetition,
    random_work,
    repeated,
    sharegpt,
    to_requests,
)
from quire.bench.run import ServedRequest
from quire.bench.server.client import AnswerReader, ServerTarget
from quire.frontend.location import locate_tokenizer
from quire.frontend.tokenizer.tokenizer import Tokenizer, load_tokenizer
from quire.types import ConfigError


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(locate_tokenizer("demo"))


def test_random_prompts() -> None:
    work = random_work(500, 200, 100, 20, range_ratio=0.5, prefix_len=7, seed=3)
    lengths = [len(ids) - 7 for ids, _ in work]
    assert min(lengths) >= 50 and max(lengths) <= 150 and len(set(lengths)) > 20
    assert {tuple(ids[:7]) for ids, _ in work} == {tuple(work[0][0][:7])}
    assert all(10 <= count <= 30 for _, count in work) and all(0 <= t < 500 for ids, _ in work for t in ids)
    assert work == random_work(500, 200, 100, 20, range_ratio=0.5, prefix_len=7, seed=3)
    assert [len(ids) for ids, _ in random_work(500, 3, 10, 5)] == [10, 10, 10]


def test_shared_prefixes() -> None:
    work = prefix_repetition(500, 12, 30, 8, 4, 16)
    prefixes = [tuple(ids[:30]) for ids, _ in work]
    assert len(set(prefixes)) == 4 and all(prefixes.count(one) == 3 for one in prefixes)
    assert all(len(ids) == 38 and count == 16 for ids, count in work)


def test_prompts_of_files(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = tmp_path / "sharegpt.json"
    talk = [
        {
            "conversations": [
                {"from": "human", "value": f"What is {i} plus {i}?"},
                {"from": "gpt", "value": "It is " * 9},
            ]
        }
        for i in range(5)
    ]
    short = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    file.write_text(json.dumps([*talk, short, {"conversations": []}, {"id": 3}]))
    asks = sharegpt(file, 8, tokenizer)
    assert len(asks) == 8 and len({ask.prompt for ask in asks}) == 5, "those that fit, more than once"
    assert [ask.number for ask in asks] == list(range(8))
    assert asks[0].prompt_len == len(tokenizer.encode(str(asks[0].prompt))) and asks[0].output_len >= 18
    assert sharegpt(file, 1, tokenizer, 50)[0].output_len == 50
    file.write_text('{"prompt": "one two"}\n\n{"prompt": "three", "output_tokens": 9}\n')
    assert [(a.prompt, a.output_len) for a in custom(file, 2, None, 5)] == [("one two", 5), ("three", 9)]
    for text, said in (("{", "neither JSON"), ('{"a": 1}', '"prompt"'), ("", "holds no prompts")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=said):
            custom(file, 2, None, 5)
    file.write_text('{"a": 1}')
    with pytest.raises(ConfigError, match="holds no conversation"):
        sharegpt(file, 2, tokenizer)
    with pytest.raises(ConfigError, match="cannot read"):
        custom(tmp_path / "missing", 2, None, 5)


def test_ramps() -> None:
    times = ramp_times(3000, 10.0, 100.0, "linear", 1e6)
    assert times == sorted(times) and times[0] == pytest.approx(0.1, rel=0.01)
    assert times[-1] - times[-2] == pytest.approx(0.01, rel=0.01)
    middle = ramp_times(3001, 1.0, 100.0, "exponential", 1e6)
    assert middle[1500] - middle[1499] == pytest.approx(0.1, rel=0.02)


def test_bodies(tokenizer: Tokenizer) -> None:
    (ask,) = to_requests([([5, 6, 7], 9)])
    body = json.loads(ServerTarget("http://a", fields={"model": "m", "ignore_eos": True}).body(ask))
    assert body == {
        "stream": True,
        "stream_options": {"include_usage": True},
        "prompt": [5, 6, 7],
        "max_tokens": 9,
        "model": "m",
        "ignore_eos": True,
    }
    (ask,) = to_requests([([50, 60, 70], 9)], tokenizer)
    body = json.loads(ServerTarget("http://a", "/v1/chat/completions").body(ask))
    assert body["messages"] == [{"role": "user", "content": tokenizer.decode([50, 60, 70])}]
    assert body["max_completion_tokens"] == 9 and "prompt" not in body
    assert [one.number for one in repeated([ask, BenchRequest(1, "b", 1, 2)], 3, skip=1)] == [0, 1, 2]


COMPLETION = [
    b'data: {"choices":[{"index":0,"text":"a"}],"usage":null}\n\n',
    b'data: {"choices":[{"index":0,"text":"","finish_reason":"length"}]}\n\n: comment\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":5,'
    b'"prompt_tokens_details":{"cached_tokens":4}}}\n\ndata: [DONE]\n\n',
]
CHAT = [
    b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\r\n\r\n',
    b'data: {"choices":[{"delta":{"reasoning":"hm"}}]}\r\n\r\ndata: {"choices":[{"delta":{"content":"a"}}]}\r\n\r\n',
    b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\r\n\r\n',
]


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_streams_cut_anywhere(size: int) -> None:
    served = ServedRequest(3, 0.0)
    answer, data = AnswerReader(served, False), b"".join(COMPLETION)
    for i in range(0, len(data), size):
        answer.feed(data[i : i + size], float(i))
    answer.finish()
    assert served.error is None and len(served.token_times_s) == 2 and served.text == "a"
    assert (served.prompt_len, served.output_len, served.cached_tokens) == (7, 5, 4)


def test_chats_begin_with_their_first_text() -> None:
    served = ServedRequest(3, 0.0)
    answer = AnswerReader(served, True)
    for at, data in enumerate(CHAT):
        answer.feed(data, float(at))
    answer.finish()
    assert served.token_times_s == [1.0, 1.0] and served.text == "hma" and served.output_len == 2


def test_what_is_no_answer() -> None:
    served = ServedRequest(3, 0.0)
    AnswerReader(served, False).feed(b'data: {"error": {"message": "too late"}}\n\n', 1.0)
    assert served.error is not None and "too late" in served.error
    with pytest.raises(msgspec.MsgspecError):
        AnswerReader(ServedRequest(3, 0.0), False).feed(b"data: <html>\n", 1.0)
    served = ServedRequest(3, 0.0)
    AnswerReader(served, False).finish()
    assert served.error == "the stream ended without a token"
