"""Parsers of tool calls: every format, every way to cut the text, and no text lost."""

from __future__ import annotations

import json
import random
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.serve.answer.parser import Arguments, Content, ParserEvent, ToolCall, merge_events
from quire.serve.answer.tools.calls import CallOptions, call_id
from quire.serve.answer.tools.formats import TOOL_PARSERS, choose_format, known_tool_parser

TEMPLATES = Path(__file__).parents[2] / ".." / "shared" / "data" / "chat_templates" / "templates"
NAMES = frozenset({"weather", "find"})
Found = tuple[str, list[tuple[str, str]]]  # content, and calls with their arguments


def events(form: str, pieces: list[str], hold: bool = True, single: bool = False) -> list[ParserEvent]:
    ids = count()
    options = CallOptions(NAMES, hold, single, lambda: f"call_{next(ids)}")
    parser = TOOL_PARSERS[form].parser(options)
    found = [event for piece in pieces for event in parser.feed(piece)]
    return merge_events(found + parser.finish())


def read(found: list[ParserEvent]) -> Found:
    content, calls = "", []
    for event in found:
        match event:
            case Content(text):
                content += text
            case ToolCall(index, _, name):
                calls.append((name, ""))
            case Arguments(index, text):
                calls[index] = (calls[index][0], calls[index][1] + text)
    return content, calls


def same_however_cut(form: str, text: str, hold: bool = True, single: bool = False) -> Found:
    """Return the events of `text`, checked to be the same for all splits in two and for random pieces."""
    whole = events(form, [text], hold, single)
    cuts = [[text[:at], text[at:]] for at in range(1, len(text))] + [list(text)]
    rng = random.Random(0)
    for _ in range(20):
        places = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.randint(2, 12))))
        cuts.append([text[a:b] for a, b in zip([0, *places], [*places, len(text)])])
    for pieces in cuts:
        assert events(form, pieces, hold, single) == whole, pieces
    return read(whole)


OBJECT = '{"city": "Köln \\u00e9\\n\\"x\\"", "days": [1, -2.5e3, {}, true], "more": null}'
ONE = f'{{"name": "weather", "arguments": {OBJECT}}}'
TWO = '{"name": "find", "arguments": {}}'
TAGGED = f"<tool_call>\n{ONE}\n</tool_call>"
CALL, OTHER = ("weather", OBJECT), ("find", "{}")

GOOD: list[tuple[str, str, Found]] = [
    ("hermes", TAGGED, ("", [CALL])),
    (
        "hermes",
        f"Let me see.\n\n{TAGGED}\n<tool_call>{TWO}</tool_call>\n",
        ("Let me see.", [CALL, OTHER]),
    ),
    ("hermes", f"{TAGGED}\nDone.\n", ("Done.\n", [CALL])),
    ("hermes", f"a < b <tool\n{TAGGED}", ("a < b <tool", [CALL])),
    ("hermes", TAGGED.removesuffix("</tool_call>"), ("", [CALL])),
    ("hermes", TAGGED.removesuffix("_call>"), ("", [CALL])),
    ("hermes", f"<tool_call>[{ONE}, {TWO}]</tool_call>", ("", [CALL, OTHER])),
    ("hermes", f'<tool_call>{{"arguments": {OBJECT}, "name": "weather"}}</tool_call>', ("", [CALL])),
    ("hermes", '<tool_call>{"name": "unheard of"}</tool_call>', ("", [("unheard of", "{}")])),
    ("hermes", '<tool_call>{"name": "find", "arguments": null}</tool_call>', ("", [OTHER])),
    (
        "hermes",
        '<tool_call>{"name": "find", "id": 7, "arguments": "{\\"a\\": 1}"}</tool_call>',
        ("", [("find", '{"a": 1}')]),
    ),
    (
        "hermes",
        '<tool_call>{"name": "find", "arguments": {"code": "a\n\tb"}}</tool_call>',
        ("", [("find", '{"code": "a\\n\\tb"}')]),
    ),
    ("hermes", "No call at all.  ", ("No call at all.  ", [])),
    (
        "llama3_json",
        ONE.replace("arguments", "parameters") + "; " + TWO.replace("arguments", "parameters"),
        ("", [CALL, OTHER]),
    ),
    ("llama3_json", f"\n<|python_tag|>{ONE}", ("", [CALL])),
    ("llama3_json", f"I will look. <|python_tag|>{TWO} So.", ("I will look.So.", [OTHER])),
    ("llama3_json", f'{{"type": "function", {ONE[1:]}', ("", [CALL])),
    ("llama3_json", f"{ONE}\n{TWO}", ("", [CALL, OTHER])),
    ("llama3_json", f"Here it is: {ONE} More?", ("Here it is:More?", [CALL])),
    ("llama3_json", f"{{}} and {{x}}\n\n{ONE};{TWO}", ("{} and {x}", [CALL, OTHER])),
    ("llama3_json", f"<|python_tag|>{ONE}<|python_tag|>{TWO}", ("", [CALL, OTHER])),
    ("mistral", f"[TOOL_CALLS][{ONE}, {TWO}]", ("", [CALL, OTHER])),
    ("mistral", f"Yes. [TOOL_CALLS] [{ONE}] ", ("Yes.", [CALL])),
    ("mistral", f"[TOOL_CALLS]weather[ARGS]{OBJECT}[TOOL_CALLS]find[ARGS]{{}}", ("", [CALL, OTHER])),
    ("mistral", f"[TOOL_CALLS]weather[CALL_ID]123456789[ARGS]{OBJECT}", ("", [CALL])),
    ("mistral", f"[TOOL_CALLS]weather{OBJECT}", ("", [CALL])),
    ("json", ONE, ("", [CALL])),
    ("json", f"[{ONE}, {TWO}]", ("", [CALL, OTHER])),
    ("json", f"```json\n{ONE}\n```\n", ("", [CALL])),
]


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize(
    "form, broken, good",
    [
        ("hermes", '<tool_call>{"name": "find", "arguments": {x}}</tool_call>', TAGGED),
        ("mistral", '[TOOL_CALLS]find[ARGS]{"a": x}', f"[TOOL_CALLS]weather[ARGS]{OBJECT}"),
    ],
)
def test_what_turns_out_to_be_no_call_is_not_counted(form: str, broken: str, good: str, single: bool) -> None:
    """The call after it has index 0: clients join the pieces of calls by index."""
    assert same_however_cut(form, f"{broken}\n{good}", single=single) == (broken, [CALL])


@pytest.mark.parametrize("form, text, wanted", GOOD)
def test_calls_are_found_however_the_text_is_cut(form: str, text: str, wanted: Found) -> None:
    for hold in (True, False):
        assert same_however_cut(form, text, hold) == wanted
    for _, arguments in wanted[1]:
        assert isinstance(json.loads(arguments), dict)


BAD: list[tuple[str, str]] = [
    ("hermes", TAGGED.replace('"name"', "'name'")),
    ("hermes", TAGGED.replace(": null", ": None")),
    ("hermes", TAGGED.replace("}\n<", "}}\n<")),
    ("hermes", TAGGED.replace("}\n<", "\n<")),
    ("hermes", TAGGED.replace('"more"', '"more')),
    ("hermes", TAGGED.replace("[1,", "[01,")),
    ("hermes", TAGGED.replace("[1,", "[NaN,")),
    ("hermes", TAGGED.replace("\\n", "\\q")),
    ("hermes", TAGGED[:60]),
    ("hermes", f" and then {TAGGED[:60]}  "),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "find", "name": "find"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "find", "arguments": {}, "parameters": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "find", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "find", "arguments": "{\\"a\\": NaN}"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    (
        "hermes",
        '<tool_call>{"name": "find", "arguments": {"a": ' + "[" * 80 + "]" * 80 + "}}</tool_call>",
    ),
    ("hermes", "<tool_call>\n<function=find>\n</function>\n</tool_call>"),
    ("hermes", "Write <tool_call> to call, <tool_cal to not"),
    ("hermes", "  <tool_call"),
    ("llama3_json", '{"name": "Mira", "parameters": {"age": 31}}'),
    ("llama3_json", '{"name": "find", "age": 31}'),
    ("llama3_json", '  {"city": "Köln"}'),
    ("llama3_json", '<|python_tag|>search.call(query="x")'),
    ("llama3_json", f'{{"tools": [{ONE}, {{"x": {ONE}}}]}}'),
    ("llama3_json", f'See {{"a":\n {ONE}}}'),
    ("mistral", "[TOOL_CALLS]"),
    ("mistral", "[TOOL_CALLS][]"),
    ("mistral", "[TOOL_CALLS]two words"),
    ("mistral", "[TOOL_CALLS]find[ARGS]"),
    ("json", "[1, 2]"),
    ("json", '```python\nprint("x")\n```'),
    ("json", '{"name": "find", "arguments": {'),
    ("json", f"{TAGGED}"),
]


@pytest.mark.parametrize("form, text", BAD)
def test_what_is_no_call_comes_back_as_content(form: str, text: str) -> None:
    assert same_however_cut(form, text) == (text, [])


def test_a_good_call_after_a_bad_one() -> None:
    text = f"<tool_call>oops</tool_call>\n{TAGGED}"
    assert same_however_cut("hermes", text) == ("<tool_call>oops</tool_call>", [CALL])
    assert same_however_cut("mistral", f"[TOOL_CALLS][{ONE}, oops]") == (", oops]", [CALL])


def test_calls_that_are_not_held_come_as_they_are_written() -> None:
    head = TAGGED[: TAGGED.index('"days"')]
    assert read(events("hermes", [head])) == (head, [])
    options = CallOptions(NAMES, hold=False)
    parser = TOOL_PARSERS["hermes"].parser(options)
    begun = [event for piece in head for event in parser.feed(piece)]
    assert len([event for event in begun if isinstance(event, Arguments)]) > 5
    assert read(begun + parser.finish()) == ("", [("weather", OBJECT[: OBJECT.index('"days"')])])
    # What is wrong after that is content, and what was told stays.
    cut = same_however_cut("hermes", TAGGED.replace("true", "yes!"), hold=False)
    assert cut == ('yes!], "more": null}}\n</tool_call>', [("weather", OBJECT[: OBJECT.index("true")])])


@pytest.mark.parametrize("form", ["hermes", "mistral"])
def test_an_answer_that_is_cut_off_in_a_call_that_was_told(form: str) -> None:
    """Arguments that were cut off are returned as they are, as in OpenAI's API."""
    head = {"hermes": '<tool_call>{"name": "weather", "arguments": ', "mistral": "[TOOL_CALLS]weather[ARGS]"}[
        form
    ]
    for end in range(1, len(OBJECT)):
        assert same_however_cut(form, head + OBJECT[:end], hold=False) == ("", [("weather", OBJECT[:end])])


def test_only_the_first_call_is_kept() -> None:
    text = f"A {TAGGED} {TAGGED}<tool_call>{TWO}</tool_call> B"
    for hold in (True, False):
        assert same_however_cut("hermes", text, hold, single=True) == ("AB", [CALL])
        assert same_however_cut("mistral", f"[TOOL_CALLS][{ONE}, {TWO}]", hold, single=True) == ("", [CALL])


PARTS = [
    "<tool_call>", "</tool_call>", "<tool_", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "```json\n", "```",
    '{"name": "find"', '"arguments": ', '"parameters": ', "{", "}", "[", "]", ", ", ": ", '"', "\\", "\\u00", "\n",
    " ", ";", "find", '{"a": 1}', "1.5", "-", "null", "tru", "é", "😀", "\x01", ONE, TWO, TAGGED,
]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(sorted(TOOL_PARSERS)),
    st.lists(st.one_of(st.sampled_from(PARTS), st.text(max_size=3)), max_size=12),
    st.booleans(),
    st.data(),
)
def test_any_text(form: str, parts: list[str], hold: bool, data: st.DataObject) -> None:
    text = "".join(parts)
    whole = events(form, [text], hold)
    assert events(form, parts, hold) == events(form, list(text), hold) == whole
    at = data.draw(st.integers(0, len(text)))
    assert events(form, [text[:at], text[at:]], hold) == whole
    content, calls = read(whole)
    if not calls:
        assert content == text
    if hold:
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)


def test_long_texts_take_linear_time() -> None:
    """No text is searched repeatedly. The bound is loose because machines are busy."""
    for text in (
        "<tool_call>" * 20_000,
        '<tool_call>{"name": "' * 10_000,
        "\n" * 10_000 + "<",
        '<tool_call>{"name": "find", "arguments": {"a": "' + "x" * 100_000,
    ):
        pieces = [text[at : at + 5] for at in range(0, len(text), 5)]
        assert read(events("hermes", pieces)) == (text, [])


def test_ids() -> None:
    ids = {call_id() for _ in range(100)}
    assert len(ids) == 100 and all(found.startswith("call_") for found in ids)
    call, *_ = TOOL_PARSERS["mistral"].make_parser(NAMES, True, False).feed(f"[TOOL_CALLS][{TWO}]")
    assert isinstance(call, ToolCall) and len(call.id) == 9 and call.id.isalnum()


FORMATS = {
    "Apriel-1.6-15b-Thinker-fixed": "apriel",
    "ByteDance-Seed-OSS": "seed_oss",
    "CohereForAI-c4ai-command-r-plus-tool_use": "cohere_plus",
    "GLM-4.6": "glm45",
    "Kimi-K2-Thinking": "kimi_k2",
    "LFM2.5-8B-A1B": "lfm2",
    "MiMo-VL": "hermes",
    "MiniMax-M3": "json",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "qwen3_coder",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": "hermes",
    "Qwen-QwQ-32B": "hermes",
    "Qwen-Qwen3-0.6B": "hermes",
    "Qwen3.5-4B": "qwen3_coder",
    "Reka-Edge": "hermes",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": "deepseek_v3",
    "deepseek-ai-DeepSeek-V3.1": "deepseek_v31",
    "deepseek-ai-DeepSeek-V4-Flash-0731": "deepseek_v4",
    "fireworks-ai-llama-3-firefunction-v2": "phi4_functools",
    "google-gemma-4-31B-it-interleaved": "gemma",
    "ibm-granite-granite-3.3-2B-Instruct": "granite",
    "ibm-granite-granite-4.1": "hermes",
    "meta-llama-Llama-3.2-3B-Instruct": "llama3_json",
    "microsoft-Phi-3.5-mini-instruct": "json",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral",
    "openai-gpt-oss-120b": "gpt_oss",
    "poolside-Laguna-S-2.1": "glm47",
    "poolside-Laguna-XS.2": "glm45",
    "unsloth-Apriel-1.5": "apriel",
}


@pytest.mark.parametrize("name, wanted", FORMATS.items())
def test_formats_of_published_templates(name: str, wanted: str) -> None:
    path = TEMPLATES / f"{name}.jinja"
    if not path.exists():
        pytest.skip("the published chat templates are not beside the checkout")
    found = choose_format("auto", path.read_text(encoding="utf-8"))
    assert found is not None and found.name == wanted


def test_formats_by_name() -> None:
    assert choose_format("none", "<tool_call>") is None
    for name, wanted in {"hermes": "hermes", "qwen3": "hermes", "llama3": "llama3_json"}.items():
        found = choose_format(name, "")
        assert found is not None and found.name == wanted and known_tool_parser(name)
    assert known_tool_parser("auto") and not known_tool_parser("nonsense")
