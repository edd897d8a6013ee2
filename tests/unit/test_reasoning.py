"""The parser of reasoning, for every way to cut the text."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.frontend.location import locate_model
from quire.frontend.tokenizer.tokenizer import load_tokenizer
from quire.serve.answer.parser import Content, ParserEvent, PlainText, Reasoning, TextParser, merge_events
from quire.serve.answer.reasoning import ReasoningParser, count_reasoning_tokens
from quire.serve.answer.reasoning_formats import (
    REASONING_FORMATS,
    THINK,
    choose_reasoning,
    known_reasoning_parser,
    reasoning_name,
)
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


def cut(text: str, make: Callable[[], TextParser]) -> list[str]:
    """Return the events of `text` without ids, checked to be the same for every split and for single characters."""

    def run(pieces: list[str]) -> list[str]:
        parser = make()
        found = [event for piece in pieces for event in parser.feed(piece)]
        return [re.sub(r"id='[^']*'", "", str(event)) for event in merge_events(found + parser.finish())]

    whole = run([text])
    for at in range(len(text)):
        assert run([text[:at], text[at:]]) == whole, text[:at]
    assert run(list(text)) == whole
    return whole


FORMS = [
    ("seed_oss", "<seed:think>a</seed:think>b", ("a", "b")),
    ("mistral", "[THINK]a[/THINK]\nb", ("a", "b")),
    ("gemma", "<|channel>thought\na\n<channel|>b", ("a", "b")),
    ("cohere", "<|START_THINKING|>a<|END_THINKING|><|START_RESPONSE|>b c<|END_RESPONSE|>", ("a", "b c")),
    ("cohere", "<|START_RESPONSE|>b<|END_RESPONSE|>", ("", "b")),
    ("kimi", "◁think▷a◁/think▷b", ("a", "b")),
    ("granite", "Here's my thought process: a\nHere is my response:\n\nb", ("a", "b")),
    ("granite", "Here is the answer", ("", "Here is the answer")),
    ("think_response", "<think>a</think>\n<response>b</response>", ("a", "b")),
    ("think_response", "<think>a</think>b", ("a", "b")),
    ("apriel", "Here are my reasoning steps:\na\n[BEGIN FINAL RESPONSE]\nb", ("a", "b")),
    ("minimax_m3", "<mm:think>a</mm:think>b", ("a", "b")),
    ("deepseek_r1", "a\n</think>\n\nb", ("a", "b")),
    ("deepseek_r1", "<think>a</think>b", ("a", "b")),
    ("gpt_oss", "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b", ("a", "b")),
    ("gpt_oss", "<|channel|>commentary<|message|>b <|end|><|start|>assistant<|channel|>analysis<|message|>a", ("a", "b")),
    ("gpt_oss", "<|channel|>final <|constrain|>json<|message|>{}<|return|>", ("", "{}")),
    ("gpt_oss", "plain < text ", ("", "plain < text ")),
    ("gpt_oss", "<|channel|>fin", ("", "")),
]  # fmt: skip


@pytest.mark.parametrize("name, text, wanted", FORMS)
def test_formats_of_reasoning(name: str, text: str, wanted: tuple[str, str]) -> None:
    marks = choose_reasoning(name, "")
    assert marks is not None
    inside = marks.opened_by("<|assistant|>")
    assert inside == (name == "deepseek_r1")
    found = cut(text, lambda: marks.make_parser(inside, PlainText()))
    assert (
        found == [str(e) for e in (Reasoning(wanted[0]), Content(wanted[1])) if e.text] or name == "gpt_oss"
    )
    parser = marks.make_parser(inside, PlainText())
    assert read(parser.feed(text) + parser.finish()) == wanted


def test_calls_of_gpt_oss_after_reasoning() -> None:
    text = (
        "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant to=functions.f<|channel|>commentary json"
        '<|message|>{"a": 1}<|call|>'
    )
    marks, calls = choose_reasoning("gpt_oss", ""), TOOL_PARSERS["gpt_oss"]
    assert marks is not None
    found = cut(text, lambda: marks.make_parser(False, calls.make_parser(frozenset({"f"}), True, False)))
    assert len(found) == 3 and "I look." in found[0] and "name='f'" in found[1] and '{"a": 1}' in found[2]


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    "text, thought, calls",
    [
        (f"<think>I call.\n{CALL}", "I call.", 1),
        (f"<think>I call.\n{CALL}\n{CALL}", "I call.", 2),
        (f"<think>Draft: {CALL}\nNo.</think>{CALL}", f"Draft: {CALL}\nNo.", 1),
        (f"<think>With <tool_call> I\n{CALL}", "With <tool_call> I", 1),
        (f"<think>Cut {CALL[:30]}", f"Cut {CALL[:30]}", 0),
        ("<think>Use <tool_call>.</think>b", "Use <tool_call>.", 0),
    ],
)
def test_a_call_in_reasoning_that_is_not_closed(text: str, thought: str, calls: int) -> None:
    def make_calls() -> TextParser:
        return TOOL_PARSERS["hermes"].make_parser(frozenset({"f"}), True, False)

    found = cut(text, lambda: THINK.make_parser(False, make_calls(), "<tool_call>", make_calls))
    assert found[0] == str(Reasoning(thought)) and sum("ToolCall" in event for event in found) == calls


def test_formats_of_reasoning_by_template() -> None:
    assert [reasoning_name("auto", marks.begin + marks.end) for marks in REASONING_FORMATS.values()][:9] == [
        *list(REASONING_FORMATS)[:8],
        "think",
    ]
    assert reasoning_name("auto", "<think></think> <response></response>") == "think_response"


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
