"""Grammars of tool calls: the parsers read every text that they allow."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from quire.frontend.tokenizer.tokenizer import NoTokenizer
from quire.serve.answer.form import AnswerForm, AnswerForms
from quire.serve.answer.parser import Arguments, Content, Reasoning, ToolCall, merge_events
from quire.serve.answer.tools.formats import TOOL_PARSERS
from quire.serve.answer.tools.tool_use import tool_use
from quire.serve.api.protocol.chat import ChatRequest
from quire.serve.api.structured_fields import structured_outputs
from quire.serve.http.errors import ApiError

SPECIAL = ["[TOOL_CALLS]", "[ARGS]", "<think>", "</think>"]
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}, "required": ["city"],
        "additionalProperties": False}  # fmt: skip


def tool(name: str, parameters: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


TOOLS = [
    tool("weather", CITY),
    tool('a "%json" ::= é😀', {"type": "object", "maxProperties": 2}),
    tool("now"),
]


class Marks(NoTokenizer):
    """A tokenizer whose tokens are bytes, followed by the special tokens."""

    def __init__(self, special: list[str]) -> None:
        super().__init__()
        self.special = special
        self.special_ids = frozenset(range(256, 256 + len(special)))

    def token_id(self, piece: str) -> int | None:
        return 256 + self.special.index(piece) if piece in self.special else None


def form_of(
    form: str, prompt: str = "", template: str = "", special: bool = False, **fields: Any
) -> AnswerForm:
    chat = ChatRequest(messages=[], **{"tools": TOOLS, **fields})
    forms = AnswerForms(Marks(SPECIAL if special else []), form, "auto")
    return forms.choose(chat, tool_use(chat), template, prompt, structured_outputs(chat))


class Writer:
    """A writer of texts that a constraint allows, token by token."""

    def __init__(self, form: AnswerForm, special: bool = False) -> None:
        matching = pytest.importorskip("quire.grammar.matching", reason="this version has no grammars")
        structured = pytest.importorskip("quire.frontend.structured_spec")
        self.names = SPECIAL if special else []
        vocabulary = matching.Vocabulary([*matching.BYTES, *(b"" for _ in self.names)])
        spec = structured.grammar_spec(form.constraint)
        self._start = matching.build_matcher(vocabulary, spec, matching.grammar_text(spec))
        self._end = vocabulary.end

    def ids(self, text: str) -> list[int]:
        found: list[int] = []
        while text:
            name = next((name for name in self.names if text.startswith(name)), None)
            found += [256 + self.names.index(name)] if name else text[0].encode()
            text = text.removeprefix(name) if name else text[1:]
        return found

    def allows(self, text: str) -> bool:
        matcher = self._start.deep_copy()
        return all(matcher.consume_token(token) for token in self.ids(text)) and matcher.is_accepting()

    def random(self, seed: int, most: int = 1000, likely: Sequence[str] = ()) -> str | None:
        """Return a random text that the constraint allows, or None if it did not end.

        Args:
            seed: seed of the choices.
            most: largest number of tokens.
            likely: texts that are often tried, such as closing tags, which chance would not write.
        """
        rng, matcher, found = random.Random(seed), self._start.deep_copy(), b""
        planned: list[int] = []
        for _ in range(most):
            mask = matcher.compute_bitmask()
            allowed = [8 * i + b for i, byte in enumerate(mask) for b in range(8) if byte >> b & 1]
            if not planned and likely and rng.random() < 0.3:
                planned = self.ids(rng.choice(likely))
            planned = planned if planned and planned[0] in allowed else []
            token = planned.pop(0) if planned else rng.choice(allowed)
            if self._end in allowed:
                return found.decode("utf-8", "replace")
            assert matcher.consume_token(token)
            found += self.names[token - 256].encode() if token >= 256 else bytes([token])
        return None


def read(form: AnswerForm, text: str) -> tuple[str, str, list[tuple[str, str]]]:
    """Return the reasoning, the content and the calls of a text."""
    parser = form.make_parser()
    found = merge_events(parser.feed(text) + parser.finish())
    calls = [(e.name, "".join(a.text for a in found if isinstance(a, Arguments) and a.index == e.index))
             for e in found if isinstance(e, ToolCall)]  # fmt: skip
    thought = "".join(e.text for e in found if isinstance(e, Reasoning))
    return thought, "".join(e.text for e in found if isinstance(e, Content)), calls


VARIANTS = [(name, "", False) for name in TOOL_PARSERS] + [("mistral", "", True), ("mistral", "[ARGS]", True)]


@pytest.mark.parametrize("name, template, special", VARIANTS)
@pytest.mark.parametrize("single", [False, True])
def test_forced_calls_are_read_back(name: str, template: str, special: bool, single: bool) -> None:
    tools = [tool("weather", CITY), tool("now", {"type": "object", "maxProperties": 0})]
    form = form_of(
        name,
        template=template,
        special=special,
        tools=tools,
        tool_choice="required",
        parallel_tool_calls=not single,
    )
    assert form.show_special == special
    writer, ended = Writer(form, special), 0
    for seed in range(12):
        text = writer.random(seed, likely=TOOL_PARSERS[name].marks)
        if text is None:
            continue
        ended += 1
        thought, content, calls = read(form, text)
        assert (thought, content) == ("", "") and len(calls) >= 1 and not (single and len(calls) > 1), text
        for called, arguments in calls:
            value = json.loads(arguments)
            assert (called, list(value)) in [("weather", ["city"]), ("now", [])]
    assert ended > 6


def test_names_and_schemas_of_any_kind() -> None:
    form = form_of("hermes", tool_choice="required")
    writer = Writer(form)
    odd = json.dumps(TOOLS[1]["function"]["name"], ensure_ascii=False)
    call = '<tool_call>\n{"name": %s, "arguments": %s}\n</tool_call>'
    good = [call % ('"weather"', '{"city": "Köln"}'), call % (odd, '{"x": [1, {}]}'), call % ('"now"', "{}")]
    assert all(writer.allows(text) for text in good) and writer.allows("\n".join(good))
    assert read(form, "\n".join(good))[2][1] == (TOOLS[1]["function"]["name"], '{"x": [1, {}]}')
    for bad in (
        "",
        "Hello",
        call % ('"weather"', "{}"),
        call % ('"other"', "{}"),
        good[0] + "x",
        good[0][:-1],
    ):
        assert not writer.allows(bad)


def test_named_function() -> None:
    writer = Writer(form_of("llama3_json", tool_choice={"type": "function", "function": {"name": "weather"}}))
    assert writer.allows('{"name": "weather", "parameters": {"city": "x"}}')
    assert not writer.allows('{"name": "now", "parameters": {}}')
    assert not writer.allows(
        '{"name": "weather", "parameters": {"city": "x"}}; {"name": "weather", "parameters": {"city": "x"}}'
    )


@pytest.mark.parametrize("special", [False, True])
def test_calls_behind_thoughts(special: bool) -> None:
    template, call = (
        "<think></think>",
        '<tool_call>\n{"name": "weather", "arguments": {"city": "x"}}\n</tool_call>',
    )

    def form(prompt: str, **fields: Any) -> AnswerForm:
        return form_of("hermes", prompt, template, special, **{"tool_choice": "required", **fields})

    free, inside, closed = form("assistant\n"), form("assistant\n<think>\n"), form("<think>\n\n</think>\n\n")
    for text in (call, f"<think>a\nb</think>\n\n{call}"):
        assert Writer(free, special).allows(text)
    assert read(free, f"<think>a\nb</think>\n\n{call}")[:2] == ("a\nb", "")
    assert Writer(inside, special).allows(f"I < think\n</think>\n\n{call}")
    assert read(inside, f"I < think\n</think>\n\n{call}")[:2] == ("I < think", "")
    assert not Writer(inside, special).allows(call)
    assert Writer(closed, special).allows(call) and not Writer(closed, special).allows(
        f"<think>a</think>{call}"
    )
    # The same for structured output without tools.
    json_inside = form("<think>", tools=None, tool_choice=None, response_format={"type": "json_object"})
    assert Writer(json_inside, special).allows('So.</think>\n{"a": 1}')
    assert read(json_inside, 'So.</think>\n{"a": 1}') == ("So.", '{"a": 1}', [])
    regex_inside = form("<think>", tools=None, tool_choice=None, structured_outputs={"regex": "a/b\\/c"})
    assert Writer(regex_inside, special).allows("So.</think>a/b/c")
    choice_inside = form(
        "<think>", tools=None, tool_choice=None, structured_outputs={"choice": ["yes", 'n"o']}
    )
    assert Writer(choice_inside, special).allows('So.</think>\nn"o')


def test_json_or_calls() -> None:
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    form = form_of("hermes", response_format=wanted)
    writer = Writer(form)
    assert writer.allows('{"sum": 3}') and not writer.allows("Hello")
    assert writer.allows('<tool_call>\n{"name": "weather", "arguments": {"any": 1}}\n</tool_call>')
    assert read(form, '{"sum": 3}') == ("", '{"sum": 3}', [])


@pytest.mark.parametrize("special", [False, True])
def test_strict_functions_are_kept_to_in_free_text(special: bool) -> None:
    name = "mistral" if special else "hermes"
    tools = [tool("weather", CITY, strict=True), tool("now")]
    form = form_of(name, template="[ARGS]" if special else "", special=special, tools=tools)
    good = '[TOOL_CALLS]weather[ARGS]{"city": "x"}' if special else '<tool_call>\n{"name": "weather", "arguments": {"city": "x"}}\n</tool_call>'  # fmt: skip
    writer = Writer(form, special)
    for text in ("Hello", "", f"Well <tool\n{good}\n{good} and so on", good.replace("weather", "now")):
        assert writer.allows(text), text
    assert not writer.allows(f"Well {good.replace('city', 'town')}")
    assert form_of("hermes").constraint is None  # nothing strict, nothing masked
    untagged = Writer(form_of("llama3_json", tools=tools))
    assert untagged.allows("Hello {") and untagged.allows("") and not untagged.allows('{"name": "weather"}')


@pytest.mark.parametrize(
    "fields, param, words",
    [
        ({"tools": []}, "tools", "at least one"),
        ({"tools": None, "tool_choice": "auto"}, "tool_choice", "needs tools"),
        ({"tool_choice": "maybe"}, "tool_choice", "none, auto, required"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "'x'"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "to name a function"),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}},
            "tool_choice",
            "list of tools",
        ),
        ({"tools": [{"type": "custom"}]}, "tools", "type function"),
        ({"tools": [tool("")]}, "tools", "1 to 256"),
        ({"tools": [tool("x", [])]}, "tools", "JSON schema"),
        ({"tools": [tool("x", strict="yes")]}, "tools", "strict"),
        ({"tools": [tool("x", {"type": "string"})], "tool_choice": "required"}, "tools", "type object"),
        ({"structured_outputs": {"grammar": "start: /a/"}}, "structured_outputs", "none"),
    ],
)
def test_requests_that_make_no_sense(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(ApiError) as caught:
        form_of("hermes", **fields)
    assert (caught.value.status, caught.value.param) == (400, param) and words in caught.value.message


def test_allowed_tools() -> None:
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "now"}}]}
    chat = ChatRequest(
        messages=[], tools=TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": allowed}
    )
    use = tool_use(chat)
    assert use.forced and [f.name for f in use.functions] == ["now"] and use.tools == [TOOLS[2]]


def test_a_server_that_reads_no_calls() -> None:
    assert form_of("none").constraint is None
    with pytest.raises(ApiError, match="tool-call-parser none"):
        form_of("none", tool_choice="required")
