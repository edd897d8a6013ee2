"""Parsers of tool calls: every format, every way to cut the text, and no text lost."""

from __future__ import annotations

import json
import random
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.serve.answer.parser import Arguments, Content, ParserEvent, ToolCall, merge_events
from quire.serve.answer.tools.calls import CallOptions, call_id
from quire.serve.answer.tools.formats import TOOL_PARSERS, choose_format, known_tool_parser
from quire.serve.answer.tools.parameters import json_of, parameter

TEMPLATES = Path(__file__).parents[2] / ".." / "shared" / "data" / "chat_templates" / "templates"
NAMES = frozenset({"weather", "find"})
SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "array"},
            "more": {"anyOf": [{"$ref": "#/$defs/More"}, {"type": "null"}]},
            "zip": {"type": ["string", "null"]},
            "warm": {"type": "boolean"},
        },
        "$defs": {"More": {"type": "object"}},
    }
}
Found = tuple[str, list[tuple[str, str]]]  # content, and calls with their arguments


def events(form: str, pieces: list[str], hold: bool = True, single: bool = False) -> list[ParserEvent]:
    ids = count()
    options = CallOptions(NAMES, hold, single, lambda: f"call_{next(ids)}", SCHEMAS)
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


# Formats that write arguments one by one. Their text of the call `FULL`, and of a call of `find` without arguments.
CITY = 'Köln <b>\n"x" \\ '
FULL: dict[str, Any] = {
    "city": CITY,
    "days": [1, -2.5, {"a": True}],
    "more": None,
    "zip": "0123",
    "warm": True,
}
VALUES = {"city": CITY, "days": '[1, -2.5, {"a": true}]', "more": "null", "zip": "0123", "warm": "True"}
PYTHON = (
    """weather(city='Köln <b>\\n"x" \\\\ ', days=[1, -2.5, {"a": True},], more=None, zip="0123", warm=True)"""
)


def elements(key: str, end: str, values: dict[str, str] = VALUES) -> str:
    return "".join(key.replace("KEY", name) + value + end for name, value in values.items())


def gemma_call(begin: str, quote: str, end: str) -> str:
    bare = f"city:{quote}{CITY}{quote},days:[1,-2.5,{{a:true}}],more:null,zip:{quote}0123{quote},warm:true"
    return f"{begin}call:weather{{{bare}}}{end}"


QWEN = elements("<parameter=KEY>\n", "\n</parameter>\n")
DSML = "".join(
    f'<｜DSML｜parameter name="{name}" string="{"true" if name in ("city", "zip") else "false"}">{value}'
    "</｜DSML｜parameter>\n"
    for name, value in VALUES.items()
)
BARE: list[tuple[str, str, str]] = [
    (
        "qwen3_coder",
        f"<tool_call>\n<function=weather>\n{QWEN}</function>\n</tool_call>",
        "<tool_call>\n<function=find>\n</function>\n</tool_call>",
    ),
    ("qwen3_coder", f"<function=weather>\n{QWEN}</function>", "<function=find></function>\n</tool_call>"),
    (
        "seed_oss",
        f"<seed:tool_call><function=weather>{elements('<parameter=KEY>', '</parameter>')}</function></seed:tool_call>",
        "<seed:tool_call>\n<function=find>\n</function>\n</seed:tool_call>",
    ),
    *(
        (
            form,
            f"<tool_call>weather{gap}"
            + elements(f"<arg_key>KEY</arg_key>{gap}<arg_value>", f"</arg_value>{gap}")
            + "</tool_call>",
            f"<tool_call>find{gap}</tool_call>",
        )
        for form, gap in (("glm45", "\n"), ("glm47", ""))
    ),
    (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="weather">\n'
        + elements('<parameter name="KEY">', "</parameter>\n")
        + "</invoke>\n",
        '<invoke name="find">\n</invoke>\n</minimax:tool_call>',
    ),
    *(
        (
            form,
            f'<｜DSML｜{block}>\n<｜DSML｜invoke name="weather">\n{DSML}</｜DSML｜invoke>\n',
            f'<｜DSML｜invoke name="find">\n</｜DSML｜invoke>\n</｜DSML｜{block}>',
        )
        for form, block in (("deepseek_v32", "function_calls"), ("deepseek_v4", "tool_calls"))
    ),
    (
        "step3",
        '<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="weather">\n'
        + elements('<steptml:parameter name="KEY">', "</steptml:parameter>\n")
        + "</steptml:invoke><｜tool_call_end｜>\n",
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="find">\n</steptml:invoke><｜tool_call_end｜>\n'
        "<｜tool_calls_end｜>",
    ),
    ("pythonic", f"[{PYTHON}, ", "find()]"),
    ("pythonic", f"<|python_start|>[{PYTHON}, ", "find()]<|python_end|>"),
    ("lfm2", f"<|tool_call_start|>[{PYTHON}, ", "find()]<|tool_call_end|>"),
    ("olmo3", f"<function_calls>\n{PYTHON}\n", "find()\n</function_calls>"),
    *(
        (form, gemma_call(begin, quote, end), f"{begin}call:find{{}}{end}")
        for form, begin, quote, end in (
            ("gemma", "<|tool_call>", '<|"|>', "<tool_call|>"),
            ("function_gemma", "<start_function_call>", "<escape>", "<end_function_call>"),
        )
    ),
]


@pytest.mark.parametrize("form, full, other", BARE)
def test_arguments_without_quotes_get_their_types(form: str, full: str, other: str) -> None:
    for hold in (True, False):
        content, calls = same_however_cut(form, full + other, hold)
        assert content == "" and [name for name, _ in calls] == ["weather", "find"]
        assert [json.loads(arguments) for _, arguments in calls] == [FULL, {}]
    content, calls = read(events(form, list(f"Well <.\n\n{full}{other}")))
    assert (content, len(calls)) == ("Well <.", 2)


@pytest.mark.parametrize("form, full, other", BARE)
def test_calls_without_quotes_that_are_cut_off(form: str, full: str, other: str) -> None:
    """A held call that is not complete is content. A call that was emitted leaves no text behind."""
    content, calls = read(events(form, [full[: full.index("0123")]]))
    assert (content, calls) == (full[: full.index("0123")], [])
    for end in range(full.index("Köln"), len(full), 5):
        whole = events(form, [full[:end]], hold=False)
        assert events(form, list(full[:end]), hold=False) == whole
        content, calls = read(whole)
        assert content.strip(", ") == "" and len(calls) == 1


NAMED: list[tuple[str, str, str]] = [
    (
        "deepseek_v3",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{OBJECT}\n```<｜tool▁call▁end｜>\n",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    (
        "deepseek_v31",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{OBJECT}<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>find<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    (
        "kimi_k2",
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{OBJECT}<|tool_call_end|>",
        "<|tool_call_begin|>functions.find:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    ),
    (
        "gpt_oss",
        f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{OBJECT}<|call|>",
        "<|channel|>commentary to=functions.find json<|message|>{}",
    ),
    ("granite", f"<|tool_call|>[{ONE}, ", f"{TWO}]"),
    ("granite", f"<tool_call>[{ONE}, ", f"{TWO}]"),
    ("phi4", f"<|tool_call|>{ONE}<|/tool_call|>", f"<|tool_call|>{TWO}<|/tool_call|>"),
    ("phi4", f"functools[{ONE}, ", f"{TWO}]"),
    ("phi4_functools", f"functools[{ONE}, ", f"{TWO}]"),
    ("apriel", f"<tool_calls>[{ONE}, ", f"{TWO}]</tool_calls>"),
    ("nemotron", f"<TOOLCALL>[{ONE}, ", f"{TWO}]</TOOLCALL>"),
    (
        "cohere",
        f'<|START_ACTION|>[\n    {{"tool_call_id": "0", "tool_name": "weather", "parameters": {OBJECT}}},\n',
        '    {"tool_call_id": "1", "tool_name": "find", "parameters": {}}\n]<|END_ACTION|>',
    ),
    (
        "cohere_plus",
        f'Action:\n```json\n[\n    {{"tool_name": "weather", "parameters": {OBJECT}}},\n',
        '    {"tool_name": "find", "parameters": {}}\n]\n```',
    ),
    ("lfm2", f"<|tool_call_start|>[{ONE}, ", f"{TWO}]<|tool_call_end|>"),
]


@pytest.mark.parametrize("form, full, other", NAMED)
def test_formats_with_arguments_in_json(form: str, full: str, other: str) -> None:
    for hold in (True, False):
        assert same_however_cut(form, full + other, hold) == ("", [CALL, OTHER])
        assert same_however_cut(form, full + other, hold, single=True) == ("", [CALL])
    assert same_however_cut(form, f"So <\n{full}{other}\n") == ("So <", [CALL, OTHER])
    assert read(events(form, [full[:-60]])) == (full[:-60], [])


def test_every_format_is_tested() -> None:
    assert set(TOOL_PARSERS) == {case[0] for case in (*GOOD, *BARE, *NAMED)}


def test_ids_that_kimi_writes() -> None:
    calls = [e for e in events("kimi_k2", [NAMED[2][1] + NAMED[2][2]]) if isinstance(e, ToolCall)]
    assert [call.id for call in calls] == ["functions.weather:0", "functions.find:1"]


@pytest.mark.parametrize(
    "schema, text, wanted",
    [
        ({"type": "string"}, "12", '"12"'),
        ({"type": "integer"}, " 12\n", "12"),
        ({"type": "integer"}, "twelve", '"twelve"'),
        ({"type": ["integer", "string"]}, "12", "12"),
        ({"type": ["string", "null"]}, "12", '"12"'),
        ({"type": ["string", "null"]}, "null", "null"),
        ({"type": "boolean"}, "False", "false"),
        ({"type": "object"}, "{'a': (1, None)}", '{"a": [1, null]}'),
        ({"type": "array"}, "[NaN]", '"[NaN]"'),
        ({"enum": ["1", "2"]}, "1", '"1"'),
        ({"$ref": "#/$defs/Id"}, "1", '"1"'),
        ({"$ref": "#/$defs/Loop"}, "1", "1"),
        ({"allOf": [{"title": "x"}, {"type": "string"}]}, "1", '"1"'),
        ({}, "1", "1"),
        ({}, "one", '"one"'),
        (True, "[]", "[]"),
    ],
)
def test_types_of_arguments(schema: Any, text: str, wanted: str) -> None:
    defs = {"Id": {"type": "string"}, "Loop": {"$ref": "#/$defs/Loop"}}
    assert json_of(text, parameter({"properties": {"p": schema}, "$defs": defs}, "p").types) == wanted


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
    "<function=", "<parameter=a>", "</parameter>", "</function>", "<tool_call>find", "<arg_key>a</arg_key>", "<arg_value>",
    "</arg_value>", "<function_calls>", "[find(", "a=", ")", "'", "call:find{", "a:", '<|"|>', "<|tool_call>",
    "<｜tool▁call▁begin｜>find", "<｜tool▁sep｜>", "<|tool_call_begin|>functions.find:0", "<|message|>", "functools",
    '<minimax:tool_call><invoke name="find">', '<parameter name="a">', "</invoke>", "<|tool_call|>", "(", "None", ">",
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
