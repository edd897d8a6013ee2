"""Affinity of prompts to replicas, for routers that cannot see caches."""

from __future__ import annotations

import json
import random

from quire.ray.affinity import PrefixAffinity, prompt_pieces


def chat(*texts: str, **fields: object) -> bytes:
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
    return json.dumps({"messages": messages, **fields}).encode()


def test_a_longer_conversation_begins_with_the_pieces_of_the_shorter_one() -> None:
    first = prompt_pieces(chat("a" * 1000, temperature=0))
    longer = prompt_pieces(chat("a" * 1000, "b" * 900, "c" * 300, stream=True))
    assert len(first) >= 3 and longer[: len(first) - 1] == first[:-1] and len(longer) > len(first)
    other = prompt_pieces(chat("b" * 1000))
    assert not set(other) & set(first), "a piece stands for everything before it"


def test_what_has_no_prompt_has_no_pieces() -> None:
    for body in (b"", b"{", b"[1]", b"7", b'{"model": "x"}', b'{"prompt": ""}', chat("short")):
        assert prompt_pieces(body) == []
    assert len(prompt_pieces(json.dumps({"prompt": list(range(10**6))}).encode())) <= 256


def test_prompts_return_unless_their_replica_is_busy() -> None:
    affinity = PrefixAffinity()
    pieces = prompt_pieces(chat("a" * 3000))
    affinity.note(pieces, "one")
    assert affinity.rank(pieces, {"two": 0, "one": 1}) == ["one", "two"]
    assert affinity.rank(pieces, {"two": 0, "one": 9}) == ["two", "one"]
    assert affinity.rank([], {"two": 1, "one": 0}) == ["one", "two"]
    affinity.keep({"two"})
    assert affinity.rank(pieces, {"two": 0, "one": 0}) == ["two", "one"]


def test_memory_is_bounded() -> None:
    affinity, source = PrefixAffinity(), random.Random(0)
    for _ in range(300):
        affinity.note([source.randbytes(8) for _ in range(256)], "one")
    newest = [source.randbytes(8)]
    affinity.note(newest, "one")
    assert affinity.rank(newest * 1, {"one": 0, "two": 0})[0] == "one"
    assert max(map(len, affinity._sent.values())) <= 65_536
