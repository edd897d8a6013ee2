"""The parser of reasoning, for every way to cut the text."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.frontend.location import locate_model
from quire.frontend.tokenizer.tokenizer import load_tokenizer
from quire.serve.answer.parser import Content, ParserEvent, PlainText, Reasoning, TextParser, merge_events
from quire.serve.answer.reasoning import ReasoningParser, count_reasoning_tokens
from quire.serve.answer.reasoning_formats import THINK, choose_reasoning, known_reasoning_parser
from quire.serve.answer.tools.formats import TOOL_PARSERS

TOKENIZER = load_tokenizer(locate_model("demo").path)


def events(pieces: list[str], inside: bool = False, inner: TextParser | None = None) -> list[ParserEvent]:
    parser = ReasoningParser(THINK, inside, inner or PlainText())
    found = [event for piece in pieces for event in parser.feed(piece)]
    return merge_events(found + parser.finish())


def read(found: list[ParserEvent]) -> tuple[str, str]:
    return tuple("".join(e.text for e in found if isinstance(e, kind)) for kind in (Reasoning, Content))  # type: ignore[return-value, union-attr]


CASES: list[tuple[str, bool, tuple[str, str]]] = [
    ("<think>\nWell, 1 < 2.\n\nSo.\n</think>\n\nYes.\n", False, ("Well, 1 < 2.\n\nSo.", "Yes.\n")),
    ("\n<think>a</think>b", False, ("a", "b")),
    ("<think>\n\n</think>\n\nb", False, ("", "b")),
    ("a\n</think>\n\nb", True, ("a", "b")),
    ("<think>a</think>b", True, ("a", "b")),
    ("a </thin", True, ("a </thin", "")),
    ("<think>a  ", False, ("a  ", "")),
    ("Plain <think>x</think>", False, ("", "Plain <think>x</think>")),
    ("  plain", False, ("", "  plain")),
    ("<thin", False, ("", "<thin")),
    (" ", False, ("", " ")),
    ("", True, ("", "")),
    ("<think>a</think>b</think><think>c", False, ("a", "b</think><think>c")),
]


@pytest.mark.parametrize("text, inside, wanted", CASES)
def test_thoughts_however_cut(text: str, inside: bool, wanted: tuple[str, str]) -> None:
    whole = events([text], inside)
    assert read(whole) == wanted
    for at in range(len(text) + 1):
        assert events([text[:at], text[at:]], inside) == whole
    assert events(list(text), inside) == whole
    rng = random.Random(1)
    for _ in range(20):
        places = sorted(rng.choices(range(len(text) + 1), k=6))
        assert events([text[a:b] for a, b in zip([0, *places], [*places, len(text)])], inside) == whole


@pytest.mark.parametrize("text, inside, wanted", CASES)
def test_tokens_of_thoughts(text: str, inside: bool, wanted: tuple[str, str]) -> None:
    """The last reasoning token is the one that completes the closing mark."""
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    count = count_reasoning_tokens(THINK, inside, TOKENIZER, ids)
    if not (inside or text.lstrip().startswith("<think>")):
        assert count == 0
    elif "</think>" not in text:
        assert count == len(ids)
    else:
        assert "</think>" in TOKENIZER.decode(ids[:count], False)
        assert "</think>" not in TOKENIZER.decode(ids[: count - 1], False)


def test_a_call_behind_a_thought() -> None:
    text = '<think>\nI look for <tool_call>.\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'

    def run(pieces: list[str]) -> list[str]:
        inner = TOOL_PARSERS["hermes"].make_parser(frozenset({"f"}), True, False)
        return [str(event).split("id=")[0] for event in events(pieces, inner=inner)]

    whole = run([text])
    assert len(whole) == 3 and "I look for <tool_call>." in whole[0] and "ToolCall" in whole[1]
    for at in range(len(text)):
        assert run([text[:at], text[at:]]) == whole
    assert run(list(text)) == whole


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<", "</", "think>", "\n", " ", "a", "é"]), max_size=10),
    st.booleans(),
)
def test_any_text(parts: list[str], inside: bool) -> None:
    text = "".join(parts)
    assert events(parts, inside) == events([text], inside) == events(list(text), inside)


def test_who_opens_and_closes_thoughts() -> None:
    assert THINK.opened_by("<|im_start|>assistant\n<think>\n") and not THINK.closed_by("<think>\n")
    assert THINK.closed_by("<think>\n\n</think>\n\n") and not THINK.opened_by("<think>\n\n</think>\n\n")
    assert not THINK.opened_by("What does <think> mean?")


def test_parsers_by_name() -> None:
    assert (
        choose_reasoning("auto", "... <think> ... </think>") == THINK
        and choose_reasoning("auto", "plain") is None
    )
    assert choose_reasoning("none", "</think>") is None and choose_reasoning("glm45", "") == THINK
    assert choose_reasoning("deepseek_r1", "") == choose_reasoning("auto", "only </think>")
    assert known_reasoning_parser("qwen3") and not known_reasoning_parser("nonsense")
