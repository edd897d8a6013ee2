"""The formats of Gemma 4 and FunctionGemma: like JSON, but with bare keys and with marks for quotes.

    <|tool_call>call:get_weather{city:<|"|>Oakford<|"|>,days:[1,2]}<tool_call|>
    <start_function_call>call:get_weather{city:<escape>Oakford<escape>}<end_function_call>

A grammar forces the declared parameters in their order, and the items and properties within them. Lengths, patterns
and limits of numbers stay free inside lists and objects.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from quire.serve.answer.incremental import SPACE, ParserSteps
from quire.serve.answer.tools.call_grammar import CallShape, LarkGrammar, json_rule
from quire.serve.answer.tools.calls import CallOptions
from quire.serve.answer.tools.json_reader import MAX_DEPTH, MalformedJson, Sink, UnfinishedJson
from quire.serve.answer.tools.keyword_calls import KeywordCallParser, escaped
from quire.serve.answer.tools.parameters import (
    STRING,
    Parameter,
    Schema,
    any_parameters,
    parameter,
    parameters,
    separated,
)

_NAME = re.compile(r"[^\s{}<>:,\"]+")
_SPACES = re.compile(f"[{SPACE}]+")
_WORD = re.compile(r"[-+.0-9A-Za-z_]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_WORDS = {"true": "true", "false": "false", "null": "null", "None": "null", "True": "true", "False": "false"}
_SCALARS = frozenset({"integer", "number", "boolean", "null"})


@dataclass(frozen=True, slots=True)
class GemmaMarks:
    """The texts around a call and around a string."""

    begin: str
    end: str
    quote: str

    @property
    def marks(self) -> tuple[str, ...]:
        return self.begin, self.end, self.quote


GEMMA4 = GemmaMarks("<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = GemmaMarks("<start_function_call>", "<end_function_call>", "<escape>")


class GemmaParser(KeywordCallParser):
    """The parser of Gemma's formats."""

    def __init__(self, marks: GemmaMarks, options: CallOptions) -> None:
        super().__init__(options)
        self._marks = marks

    def _run(self) -> ParserSteps[None]:
        while (yield from self._text_until(self._marks.begin)):
            yield from self._attempt(self._block())

    def _block(self) -> ParserSteps[None]:
        yield from self._mark(self._marks.begin)
        yield from self._mark("call:")
        name = yield from self._while(_NAME)
        if (yield from self._peek()) not in ("{", ""):
            raise MalformedJson
        yield from self._character("{")
        arguments = self._open_arguments(name)
        yield from self._members(lambda key: self._add_key(arguments, key), 0)
        self._close_arguments(arguments)
        self._accept()
        yield from self._spaces()
        yield from self._skip(self._marks.end)

    def _members(self, sink_of: Any, depth: int) -> ParserSteps[None]:
        """Read keys and values up to the closing brace. `sink_of` takes a key and returns the sink of its value."""
        yield from self._spaces()
        while (yield from self._peek()) != "}":
            key = yield from self._key_name()
            yield from self._spaces()
            yield from self._character(":")
            yield from self._spaces()
            yield from self._gemma_value(sink_of(key), depth + 1)
            yield from self._comma_before("}")
        self._advance(self._at + 1)

    def _key_name(self) -> ParserSteps[str]:
        first = yield from self._peek()
        if first == '"':
            return (yield from self._read_string())
        if (yield from self._sees(self._marks.quote)):
            pieces: list[str] = []
            yield from self._between_quotes(pieces.append)
            return "".join(pieces)
        key = yield from self._while(_NAME)
        if not key:
            raise MalformedJson if (yield from self._peek()) else UnfinishedJson
        return key

    def _gemma_value(self, sink: Sink, depth: int) -> ParserSteps[None]:
        first = yield from self._peek()
        if depth > MAX_DEPTH:
            raise MalformedJson
        if first == "{":
            self._advance(self._at + 1)
            yield from self._nested_object(sink, depth)
        elif first == "[":
            self._advance(self._at + 1)
            yield from self._nested_list(sink, depth)
        elif first == '"':
            yield from self._string(sink)
        elif (yield from self._sees(self._marks.quote)):
            sink('"')
            yield from self._between_quotes(lambda text: sink(escaped(text)))
            sink('"')
        else:
            word = yield from self._while(_WORD)
            if (yield from self._peek()) == "":
                raise UnfinishedJson
            if word not in _WORDS and not _NUMBER.fullmatch(word):
                raise MalformedJson
            sink(_WORDS.get(word, word))

    def _nested_object(self, sink: Sink, depth: int) -> ParserSteps[None]:
        keys: list[str] = []

        def sink_of(key: str) -> Sink:
            sink(f'{", " if keys else ""}"{escaped(key)}": ')
            keys.append(key)
            return sink

        sink("{")
        yield from self._members(sink_of, depth)
        sink("}")

    def _nested_list(self, sink: Sink, depth: int) -> ParserSteps[None]:
        sink("[")
        yield from self._spaces()
        comma = ""
        while (yield from self._peek()) != "]":
            sink(comma)
            comma = ", "
            yield from self._gemma_value(sink, depth + 1)
            yield from self._comma_before("]")
        self._advance(self._at + 1)
        sink("]")

    def _between_quotes(self, sink: Sink) -> ParserSteps[None]:
        quote = self._marks.quote
        yield from self._mark(quote)
        while (piece := (yield from self._until(quote))) is not None:
            sink(piece)
        sink((yield from self._while(_SPACES)))
        yield from self._mark(quote)


def shape(marks: GemmaMarks, template: str, single: bool) -> CallShape:
    return CallShape(
        open=f"{marks.begin}call:",
        middle="{",
        close=f"}}{marks.end}",
        between="",
        mark=marks.begin,
        quoted=False,
        arguments=partial(_arguments, marks),
    )


def _arguments(marks: GemmaMarks, lark: LarkGrammar, prefix: str, schema: Schema) -> str:
    """Return an expression for the declared parameters, or for any if none are declared."""
    declared = parameters(schema)
    if not declared:
        least, most = any_parameters(schema)
        if most == 0:
            return ""
        _add_any_value(marks, lark)
        rest = f'("," any_member){{{max(0, least - 1)},{"" if most is None else most - 1}}}'
        return f"any_member {rest}" if least else f"(any_member {rest})?"
    items = []
    for index, item in enumerate(declared):
        value = _value(marks, lark, f"{prefix}_{index}_value", item, 0)
        lark.add(f"{prefix}_{index}: {lark.literal(item.name + ':')} {value}")
        items.append((f"{prefix}_{index}", item.required))
    return separated(lark.add, prefix, items, '","')


def _add_any_value(marks: GemmaMarks, lark: LarkGrammar) -> None:
    """Add the rules for any value."""
    lark.add(r"KEY: /[A-Za-z_][A-Za-z0-9_]*/")
    lark.add('any_member: KEY ":" any_value')
    lark.add('any_list: "[" (any_value ("," any_value)*)? "]"')
    lark.add('any_object: "{" (any_member ("," any_member)*)? "}"')
    scalar = json_rule({"type": ["number", "boolean", "null"]})
    lark.add(f"any_value: {_string(marks, lark)} | any_list | any_object | {scalar}")


def _string(marks: GemmaMarks, lark: LarkGrammar) -> str:
    return f"({lark.literal(marks.quote)} {lark.up_to('quoted', marks.quote)})"


def _value(marks: GemmaMarks, lark: LarkGrammar, prefix: str, item: Parameter, depth: int) -> str:
    """Return an expression for the value of a parameter, adding rules whose names start with `prefix`."""
    if item.words is not None:
        quote = marks.quote
        return "(" + " | ".join(lark.literal(quote + word + quote) for word in item.words) + ")"
    if item.types == STRING:
        return _string(marks, lark)
    if item.types is not None and item.types <= _SCALARS:
        return json_rule(item.schema)
    if item.types == frozenset({"array"}) and isinstance(item.schema.get("items"), Mapping) and depth < 8:
        inner = {"properties": {"items": item.schema["items"]}, **_definitions(item.schema)}
        lark.add(f"{prefix}: {_value(marks, lark, prefix + '_item', parameter(inner, 'items'), depth + 1)}")
        return f'("[" ({prefix} ("," {prefix})*)? "]")'
    if (
        item.types == frozenset({"object"})
        and isinstance(item.schema.get("properties"), Mapping)
        and depth < 8
    ):
        found = []
        for index, member in enumerate(parameters(item.schema)):
            value = _value(marks, lark, f"{prefix}_{index}_value", member, depth + 1)
            lark.add(f"{prefix}_{index}: {lark.literal(member.name + ':')} {value}")
            found.append((f"{prefix}_{index}", member.required))
        return f'("{{" {separated(lark.add, prefix, found, chr(34) + "," + chr(34))} "}}")'
    _add_any_value(marks, lark)
    return "any_value"


def _definitions(schema: Schema) -> dict[str, Any]:
    return {key: schema[key] for key in ("$defs", "definitions") if key in schema}
