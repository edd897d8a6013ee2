"""benchmarks/endurance.py for some seconds: clients that read, disconnect or read slowly, on the demo model.

The server drafts tokens, and its KV cache holds little more than one request of full length.
"""

from __future__ import annotations

import asyncio
import importlib
from pathlib import Path

import httpx
import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_every_request_ends_once_and_nothing_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    endurance = importlib.import_module("endurance")
    flags = [
        "--max-num-seqs",
        "16",
        "--max-waiting",
        "24",
        "--check-invariants",
        "--kv-cache-memory",
        "10000000",
    ]
    drafts = ["--spec-method", "suffix", "--spec-tokens", "4", "--no-spec-adaptive"]
    server = endurance.Server(["demo", *flags, *drafts])
    try:
        levels = asyncio.run(endurance.run(server, [1, 8, 64], seconds=3.0))
        stats = httpx.get(server.url + "/stats").json()
    finally:
        assert server.close() == 0
    assert (
        stats["drafts"]["method"] == "suffix" and 0 < stats["drafts"]["accepted"] < stats["drafts"]["tokens"]
    )
    for level in levels:
        assert level.wrong == [] and sum(level.ended.values()) == level.sent >= level.clients
        assert level.ended["done"]
    assert levels[-1].ended["refused"], "64 clients are more than there is room for"


def test_a_stream_that_is_not_whole_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    endurance = importlib.import_module("endurance")
    body = {"n": 1, "max_tokens": 4}
    chunk = b'data: {"choices":[{"index":0,"finish_reason":%b}],"usage":{"completion_tokens":%d}}\n\n'
    for data, said in (
        (b"", "ended with"),
        (chunk % (b'"stop"', 1), "ended with"),
        (chunk % (b'"stop"', 1) + b"data: [DONE]\n\n" * 2, "ended with"),
        (chunk % (b"null", 1) + b"data: [DONE]\n\n", "choices ended"),
        (chunk % (b'"stop"', 1) * 2 + b"data: [DONE]\n\n", "choices ended"),
        (chunk % (b'"stop"', 9) + b"data: [DONE]\n\n", "answers of at most 4 tokens"),
    ):
        level = endurance.Level(1)
        endurance.check(body, data, level)
        assert said in level.wrong[0]
    level = endurance.Level(1)
    assert endurance.check(body, chunk % (b'"stop"', 2) + b"data: [DONE]\n\n", level) == "done"
    assert level.wrong == [] and level.tokens == 2
