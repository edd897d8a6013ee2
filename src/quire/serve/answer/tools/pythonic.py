"""Formats that write calls as Python does. Llama 3.2 and 4 write a list, Olmo 3 a line for each call.

    [get_weather(city="Oakford", days=[1, 2]), find()]
    <function_calls>
    get_weather(city="Oakford")
    find()
    </function_calls>

Values are Python literals or JSON. A plain list may also be other text, so without marks its calls must name known
functions, and it starts the answer or a line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from quire.serve.answer.incremental import ParserSteps
from quire.serve.answer.tools.call_grammar import CallShape, LarkGrammar, json_rule
from quire.serve.answer.tools.calls import CallOptions
from quire.serve.answer.tools.json_reader import MAX_DEPTH, MalformedJson, Sink, UnfinishedJson, discard
from quire.serve.answer.tools.keyword_calls import KeywordCallParser, escaped
from quire.serve.answer.tools.parameters import (
    Parameter,
    Schema,
    any_parameters,
    parameters,
    separated,
)

_NAME = re.compile(r"[\w.-]+")
_KEY = re.compile(r"\w+")
_WORD = re.compile(r"[-+.0-9A-Za-z_]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_PLAIN = {quote: re.compile(rf"[^{quote}\\\x00-\x1f]+") for quote in "\"'"}
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {
    "n": "\\n",
    "t": "\\t",
    "r": "\\r",
    "b": "\\b",
    "f": "\\f",
    "\\": "\\\\",
    '"': '\\"',
    "'": "'",
    "/": "/",
}
_HEX = {"x": 2, "u": 4}


@dataclass(frozen=True, slots=True)
class PythonicMarks:
    """The text around calls, and between them: a comma or a line break.

    Attributes:
        begin, end: the text around all calls.
        separator: the text between two calls.
        required: whether calls start with `begin`; otherwise it may be missing.
    """

    begin: str
    end: str
    separator: str
    required: bool = True

    @property
    def marks(self) -> tuple[str, ...]:
        return self.begin.split()[0].rstrip("["), self.end.split()[-1].lstrip("]")


LLAMA = PythonicMarks("<|python_start|>[", "]<|python_end|>", ", ", required=False)
LFM2 = PythonicMarks("<|tool_call_start|>[", "]<|tool_call_end|>", ", ")
OLMO3 = PythonicMarks("<function_calls>\n", "\n</function_calls>", "\n")


class PythonicParser(KeywordCallParser):
    """The parser of formats with calls as in Python."""

    def __init__(self, marks: PythonicMarks, options: CallOptions) -> None:
        super().__init__(options)
        self._marks, self.marked = marks, marks.required
        self._begin, self._end = marks.marks

    def _run(self) -> ParserSteps[None]:
        if not self._marks.required:
            yield from self._attempt(self._block())
            while (yield from self._text_until(self._begin, "\n[")):
                yield from self._attempt(self._block())
            return
        while (yield from self._text_until(self._begin)):
            yield from self._attempt(self._block())

    def _block(self) -> ParserSteps[None]:
        yield from self._spaces()
        if self._marks.required or (yield from self._sees(self._begin)):
            yield from self._mark(self._begin)
        yield from self._spaces()
        listed = (yield from self._peek()) == "["
        if listed:
            self._advance(self._at + 1)
        elif not self._marks.required:
            raise MalformedJson
        yield from self._spaces()
        if (yield from self._peek()) == "{":  # older models write JSON between the same marks
            yield from self._json_calls(listed)
        else:
            yield from self._python_calls(listed)
        yield from self._spaces()
        yield from self._skip(self._end)

    def _json_calls(self, listed: bool) -> ParserSteps[None]:
        after = ","
        while after == ",":
            yield from self._spaces()
            yield from self._call()
            self._accept()
            after = (yield from self._after_item("]", discard)) if listed else ""

    def _python_calls(self, listed: bool) -> ParserSteps[None]:
        more = True
        while more:
            yield from self._python_call()
            self._accept()
            yield from self._spaces()
            if listed:
                more = (yield from self._character(",]")) == ","
                yield from self._spaces()
            else:
                more = (yield from self._peek()) not in ("", "<")

    def _python_call(self) -> ParserSteps[None]:
        name = yield from self._while(_NAME)
        yield from self._spaces()
        if (yield from self._peek()) not in ("(", ""):
            raise MalformedJson
        yield from self._character("(")
        arguments = self._open_arguments(name)
        yield from self._spaces()
        while (yield from self._peek()) != ")":
            key = yield from self._while(_KEY)
            if not key:
                raise MalformedJson if (yield from self._peek()) else UnfinishedJson
            yield from self._spaces()
            yield from self._character("=")
            yield from self._spaces()
            yield from self._literal(self._add_key(arguments, key))
            yield from self._spaces()
            if (yield from self._peek()) != ")":
                yield from self._character(",")
                yield from self._spaces()
        self._advance(self._at + 1)
        self._close_arguments(arguments)

    # ------------------------------------------------------------------------------------- literals

    def _literal(self, sink: Sink, depth: int = 0) -> ParserSteps[None]:
        """Read a Python literal or JSON; pass it on as JSON."""
        first = yield from self._peek()
        if depth > MAX_DEPTH:
            raise MalformedJson
        if first and first in "[(":
            yield from self._items({"[": "]", "(": ")"}[first], sink, depth)
        elif first == "{":
            yield from self._dictionary(sink, depth)
        elif first and first in "\"'":
            yield from self._quoted(sink)
        else:
            word = yield from self._while(_WORD)
            if (yield from self._peek()) == "":
                raise UnfinishedJson
            if word not in _WORDS and not _NUMBER.fullmatch(word):
                raise MalformedJson
            sink(_WORDS.get(word, word))

    def _items(self, end: str, sink: Sink, depth: int) -> ParserSteps[None]:
        """Read a list or a tuple, which may end with a comma."""
        self._advance(self._at + 1)
        sink("[")
        yield from self._spaces()
        comma = ""
        while (yield from self._peek()) != end:
            sink(comma)
            comma = ", "
            yield from self._literal(sink, depth + 1)
            yield from self._comma_before(end)
        self._advance(self._at + 1)
        sink("]")

    def _dictionary(self, sink: Sink, depth: int) -> ParserSteps[None]:
        self._advance(self._at + 1)
        sink("{")
        yield from self._spaces()
        comma = ""
        while (yield from self._peek()) != "}":
            sink(comma)
            comma = ", "
            yield from self._quoted(sink)
            yield from self._spaces()
            yield from self._character(":")
            yield from self._spaces()
            sink(": ")
            yield from self._literal(sink, depth + 1)
            yield from self._comma_before("}")
        self._advance(self._at + 1)
        sink("}")

    def _quoted(self, sink: Sink) -> ParserSteps[None]:
        """Read a string in single or double quotes."""
        quote = yield from self._character("\"'")
        sink('"')
        while (first := (yield from self._peek())) != quote:
            if match := _PLAIN[quote].match(self._text, self._at):
                sink(escaped(self._advance(match.end())))
            elif first == "\\":
                self._advance(self._at + 1)
                sink((yield from self._python_escape()))
            elif first:
                sink(escaped(self._advance(self._at + 1)))
            else:
                raise UnfinishedJson
        self._advance(self._at + 1)
        sink('"')

    def _python_escape(self) -> ParserSteps[str]:
        """Read what follows a backslash; return it as it stands in JSON. An unknown escape keeps its backslash."""
        kind = yield from self._peek()
        if not kind:
            raise UnfinishedJson
        self._advance(self._at + 1)
        if kind in _HEX:
            digits = ""
            while len(digits) < _HEX[kind]:
                digits += yield from self._character("0123456789abcdefABCDEF")
            return f"\\u{digits:0>4}"
        return "" if kind == "\n" else _ESCAPES.get(kind) or "\\\\" + escaped(kind)


def shape(marks: PythonicMarks, template: str, single: bool) -> CallShape:
    begin, end = marks.begin, marks.end
    if not marks.required:
        begin, end = "[", "]"
    return CallShape(
        open="",
        middle="(",
        close=")",
        between=marks.separator,
        begin=begin,
        end=end,
        mark=marks.marks[0] if marks.required else "",
        quoted=False,
        arguments=_arguments,
    )


def _arguments(lark: LarkGrammar, prefix: str, schema: Schema) -> str:
    """Return an expression for the declared parameters, or for any if none are declared."""
    declared = parameters(schema)
    if not declared:
        least, most = any_parameters(schema)
        if most == 0:
            return ""
        lark.add(r"KEY: /[A-Za-z_][A-Za-z0-9_]*/")
        lark.add(f'any_argument: KEY "=" {json_rule({})}')
        rest = f'(", " any_argument){{{max(0, least - 1)},{"" if most is None else most - 1}}}'
        return f"any_argument {rest}" if least else f"(any_argument {rest})?"
    items = []
    for index, parameter in enumerate(declared):
        lark.add(f"{prefix}_{index}: {lark.literal(parameter.name + '=')} {_value(parameter)}")
        items.append((f"{prefix}_{index}", parameter.required))
    return separated(lark.add, prefix, items, '", "')


def _value(parameter: Parameter) -> str:
    schema = parameter.schema
    if parameter.types == frozenset({"boolean"}) and "enum" not in schema and "const" not in schema:
        return '("True" | "False")'
    return json_rule(schema)


def matches_lfm2(template: str) -> bool:
    return "<|tool_call_start|>" in template or "<|tool_list_start|>" in template


def matches_llama(template: str) -> bool:
    """Return whether a template asks Llama for calls as in Python; most ask for JSON."""
    return "<|python_start|>" in template or ("[func_name1(" in template and "<tool_call>" not in template)
