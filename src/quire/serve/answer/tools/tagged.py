"""Formats that put each argument between tags of its own, as XML does. Strings are bare text.

<tool_call>
<function=get_weather>
<parameter=city>
Oakford
</parameter>
</function>
</tool_call>

The formats differ in their tags only. A text becomes JSON by the type that the function's schema gives the parameter
(parameters.py). A grammar forces the declared parameters in their order. It enforces `enum`, `const` and everything
but strings; the length and the pattern of a bare string stay free.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial

from quire.serve.answer.incremental import SPACE, ParserSteps
from quire.serve.answer.tools.call_grammar import CallShape, LarkGrammar, json_rule
from quire.serve.answer.tools.calls import CallOptions
from quire.serve.answer.tools.json_reader import MalformedJson, Sink, UnfinishedJson
from quire.serve.answer.tools.keyword_calls import KeywordArguments, KeywordCallParser, escaped
from quire.serve.answer.tools.parameters import (
    STRING,
    Parameter,
    Schema,
    any_parameters,
    json_of,
    parameters,
)

_NAME = re.compile(r"[^\s<>\"]+")
_SPACES = re.compile(f"[{SPACE}]+")


@dataclass(frozen=True, slots=True)
class CallTags:
    """The text around the parts of a call. White space in it is what models write; parsers take any.

    Attributes:
        open, name_end, close: the text before a function's name, after it, and at the end of a call.
        key, key_end, value_end: the text before a parameter's name, after it, and after the value.
        begin, end: the text around all calls.
        between: the text between two calls.
        typed: whether `key_end` ends with `"true"` for a bare string and `"false"` for JSON.
        padded: whether a line break around a value belongs to the format.
        short_open: another text before a name, which some models write because they forget the outer tag.
    """

    open: str
    name_end: str
    key: str
    key_end: str
    value_end: str
    close: str
    begin: str = ""
    end: str = ""
    between: str = "\n"
    typed: bool = False
    padded: bool = False
    short_open: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        """Return all words that may be special tokens."""
        texts = (
            self.begin,
            self.open,
            self.name_end,
            self.key,
            self.key_end,
            self.value_end,
            self.close,
            self.end,
        )
        return tuple(dict.fromkeys(word for text in texts for word in text.split() if "<" in word))

    @property
    def first(self) -> str:
        """Return the word with which calls start."""
        return (self.begin or self.open).split()[0]


QWEN3_CODER = CallTags(
    open="<tool_call>\n<function=",
    name_end=">\n",
    key="<parameter=",
    key_end=">\n",
    value_end="</parameter>\n",
    close="</function>\n</tool_call>",
    padded=True,
    short_open="<function=",
)
SEED_OSS = CallTags(
    open="<seed:tool_call>\n<function=",
    name_end=">\n",
    key="<parameter=",
    key_end=">",
    value_end="</parameter>\n",
    close="</function>\n</seed:tool_call>",
)
GLM = CallTags(
    open="<tool_call>",
    name_end="\n",
    key="<arg_key>",
    key_end="</arg_key>\n<arg_value>",
    value_end="</arg_value>\n",
    close="</tool_call>",
)
GLM47 = CallTags(  # the same without line breaks
    open="<tool_call>",
    name_end="",
    key="<arg_key>",
    key_end="</arg_key><arg_value>",
    value_end="</arg_value>",
    close="</tool_call>",
    between="",
)
MINIMAX_M2 = CallTags(
    open='<invoke name="',
    name_end='">\n',
    key='<parameter name="',
    key_end='">',
    value_end="</parameter>\n",
    close="</invoke>\n",
    begin="<minimax:tool_call>\n",
    end="</minimax:tool_call>",
    between="",
)
STEP3 = CallTags(
    open='<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="',
    name_end='">\n',
    key='<steptml:parameter name="',
    key_end='">',
    value_end="</steptml:parameter>\n",
    close="</steptml:invoke><｜tool_call_end｜>\n",
    begin="<｜tool_calls_begin｜>\n",
    end="<｜tool_calls_end｜>",
    between="",
)


def _dsml(block: str) -> CallTags:
    """Return DeepSeek's tags; `block` is the name of the tag around all calls."""
    return CallTags(
        open='<｜DSML｜invoke name="',
        name_end='">\n',
        key='<｜DSML｜parameter name="',
        key_end='" string="',
        value_end="</｜DSML｜parameter>\n",
        close="</｜DSML｜invoke>\n",
        begin=f"<｜DSML｜{block}>\n",
        end=f"</｜DSML｜{block}>",
        between="",
        typed=True,
    )


DEEPSEEK_V32, DEEPSEEK_V4 = _dsml("function_calls"), _dsml("tool_calls")


class TaggedParser(KeywordCallParser):
    """The parser of formats with tags."""

    def __init__(self, tags: CallTags, options: CallOptions) -> None:
        super().__init__(options)
        self._tags = tags

    def _run(self) -> ParserSteps[None]:
        starts = [start for start in (self._tags.first, self._tags.short_open) if start]
        while (yield from self._text_until(*starts)):
            yield from self._attempt(self._block())

    def _block(self) -> ParserSteps[None]:
        yield from self._mark(self._tags.begin)
        more = True
        while more:
            yield from self._tagged_call()
            self._accept()
            yield from self._spaces()
            more = bool(self._tags.begin) and (yield from self._sees(self._tags.open.split()[0]))
        yield from self._marks_if_present(self._tags.end)

    def _tagged_call(self) -> ParserSteps[None]:
        tags = self._tags
        yield from self._spaces()
        full = not tags.short_open or (yield from self._sees(tags.first))
        yield from self._mark(tags.open if full else tags.short_open)
        yield from self._spaces()
        name = yield from self._while(_NAME)
        arguments = self._open_arguments(name)
        yield from self._mark(tags.name_end)
        yield from self._spaces()
        key, close = tags.key.split()[0], tags.close.split()[0]
        while (yield from self._sees(key)):
            yield from self._argument(arguments)
            yield from self._spaces()
        if not (yield from self._skip(close)):
            raise UnfinishedJson if (yield from self._peek()) == "" else MalformedJson
        self._close_arguments(arguments)
        yield from self._marks_if_present(tags.close[len(close) :])

    def _argument(self, arguments: KeywordArguments) -> ParserSteps[None]:
        tags = self._tags
        yield from self._mark(tags.key)
        key = yield from self._while(_NAME)
        parameter = self._parameter(arguments, key)
        types = parameter.types
        if not tags.typed:
            yield from self._mark(tags.key_end)
        elif (yield from self._is_string(types)):
            types = STRING
        elif types == STRING:
            types = None
        sink = self._add_key(arguments, key)
        if types == STRING:
            sink('"')
            yield from self._value_text(lambda text: sink(escaped(text)))
            sink('"')
        else:
            pieces: list[str] = []
            yield from self._value_text(pieces.append)
            sink(json_of("".join(pieces), types))

    def _is_string(self, types: frozenset[str] | None) -> ParserSteps[bool]:
        """Read the end of a key that says whether the value is a string; without it, go by the types."""
        yield from self._mark('"')
        yield from self._spaces()
        if (yield from self._sees(">")):
            yield from self._mark(">")
            return types == STRING
        yield from self._mark('string="')
        string = yield from self._sees("true")
        yield from self._mark("true" if string else "false")
        yield from self._mark('">')
        return string

    def _value_text(self, sink: Sink) -> ParserSteps[None]:
        """Read the text of a value and its closing tag."""
        end = self._tags.value_end.strip()
        if self._tags.padded and (yield from self._peek()) == "\n":
            self._advance(self._at + 1)
        while (piece := (yield from self._until(end))) is not None:
            sink(piece)
        spaces = yield from self._while(_SPACES)
        sink(spaces.removesuffix("\n") if self._tags.padded else spaces)
        yield from self._mark(end)


def shape(tags: CallTags, template: str, single: bool) -> CallShape:
    return CallShape(
        open=tags.open,
        middle=tags.name_end,
        close=tags.close,
        between=tags.between,
        begin=tags.begin,
        end=tags.end,
        mark=tags.first,
        quoted=False,
        arguments=partial(_arguments, tags),
    )


def _arguments(tags: CallTags, lark: LarkGrammar, prefix: str, schema: Schema) -> str:
    """Return an expression for the declared parameters, or for any if none are declared."""
    declared = parameters(schema)
    if not declared:
        least, most = any_parameters(schema)
        if most == 0:
            return ""
        lark.add(r"KEY: /[A-Za-z_][A-Za-z0-9_]*/")
        kinds = (("true", _bare(tags, lark)), ("false", f"{json_rule({})} {lark.literal(tags.value_end)}"))
        values = [f"{lark.literal(_key_end(tags, kind))} {value}" for kind, value in kinds[: 1 + tags.typed]]
        lark.add(f"any_argument: {lark.literal(tags.key)} KEY ({' | '.join(values)})")
        return f"any_argument{{{least},{'' if most is None else most}}}"
    found = []
    for index, parameter in enumerate(declared):
        bare = parameter.is_bare or parameter.words is not None
        string = bare or parameter.types == STRING
        start = lark.literal(tags.key + parameter.name + _key_end(tags, "true" if string else "false"))
        lark.add(f"{prefix}_{index}: {start} {_value(tags, lark, parameter)}")
        found.append(f"{prefix}_{index}" + ("" if parameter.required else "?"))
    return " ".join(found)


def _key_end(tags: CallTags, string: str) -> str:
    return f'{tags.key_end}{string}">' if tags.typed else tags.key_end


def _bare(tags: CallTags, lark: LarkGrammar) -> str:
    """Return an expression for bare text with its closing tag."""
    word = tags.value_end.strip()
    after = lark.literal(tags.value_end[len(word) :])
    return f"{lark.up_to('bare', word)} {after}".strip()


def _value(tags: CallTags, lark: LarkGrammar, parameter: Parameter) -> str:
    end = ("\n" if tags.padded else "") + tags.value_end
    if parameter.words is not None and not any(tags.value_end.strip() in word for word in parameter.words):
        return "(" + " | ".join(lark.literal(word + end) for word in parameter.words) + ")"
    if parameter.is_bare or parameter.types == STRING:
        return _bare(tags, lark)
    return f"{json_rule(parameter.schema)} {lark.literal(end)}"


def has_line_breaks(template: str) -> bool:
    """Return whether a template asks for GLM's format with a line break after each part."""
    return "<tool_call>" in template and re.search(r"<arg_key>[^<]*</arg_key>(\n|\\n)", template) is not None
