"""Formats that write the name of the function and then its arguments as JSON.

DeepSeek V3    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>find
               ```json
               {"city": "Oakford"}
               ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
DeepSeek V3.1  <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>find<｜tool▁sep｜>{...}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
Kimi K2        <|tool_calls_section_begin|><|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>{...}...
gpt-oss        <|channel|>commentary to=functions.find <|constrain|>json<|message|>{...}<|call|>
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from quire.serve.answer.incremental import ParserSteps
from quire.serve.answer.tools.call_grammar import CallShape
from quire.serve.answer.tools.calls import CallOptions, CallParser, PartialCall
from quire.serve.answer.tools.json_reader import MalformedJson

_NAME = re.compile(r"[^\s<>{}\[\]\"]+")
_NUMBERED = re.compile(r"(.+):[0-9]+")


@dataclass(frozen=True, slots=True)
class NameMarks:
    """The text around the parts of a call. White space in it is what models write; parsers take any.

    Attributes:
        open, middle, close: the text before the name, between name and arguments, and after the arguments.
        begin, end: the text around all calls. Parsers do without it.
        between: the text between two calls.
        numbered: whether a colon and a number follow the name, which with the text before it is the id of the call.
        id_start: the text with which such an id starts.
        parallel: whether the model can write several calls.
    """

    open: str
    middle: str
    close: str
    begin: str = ""
    end: str = ""
    between: str = ""
    numbered: bool = False
    id_start: str = ""
    parallel: bool = True

    @property
    def marks(self) -> tuple[str, ...]:
        """Return all words that may be special tokens."""
        texts = (self.begin, self.open, self.middle, self.close, self.end)
        found = (tag for text in texts for tag in re.findall(r"<[^<>]*>", text))
        return tuple(dict.fromkeys(found))


DEEPSEEK_V3 = NameMarks(
    open="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    middle="\n```json\n",
    close="\n```<｜tool▁call▁end｜>",
    begin="<｜tool▁calls▁begin｜>",
    end="<｜tool▁calls▁end｜>",
    between="\n",
)
DEEPSEEK_V31 = NameMarks(
    open="<｜tool▁call▁begin｜>",
    middle="<｜tool▁sep｜>",
    close="<｜tool▁call▁end｜>",
    begin="<｜tool▁calls▁begin｜>",
    end="<｜tool▁calls▁end｜>",
)
KIMI_K2 = NameMarks(
    open="<|tool_call_begin|>functions.",
    middle="<|tool_call_argument_begin|>",
    close="<|tool_call_end|>",
    begin="<|tool_calls_section_begin|>",
    end="<|tool_calls_section_end|>",
    numbered=True,
    id_start="functions.",
)
HARMONY = NameMarks(
    open="<|channel|>commentary to=functions.",
    middle=" <|constrain|>json<|message|>",
    close="<|call|>",
    parallel=False,
)


class NamedJsonParser(CallParser):
    """The parser of formats with a name before the arguments."""

    def __init__(self, marks: NameMarks, options: CallOptions) -> None:
        super().__init__(options)
        self._marks = marks

    def _run(self) -> ParserSteps[None]:
        marks = self._marks
        starts = [text.split()[0] for text in (marks.begin, marks.open) if text]
        while (yield from self._text_until(*starts)):
            yield from self._attempt(self._block())

    def _block(self) -> ParserSteps[None]:
        marks = self._marks
        if marks.begin:
            yield from self._spaces()
            if (yield from self._sees(marks.begin)):
                yield from self._mark(marks.begin)
        more = True
        while more:
            yield from self._named_call()
            self._accept()
            yield from self._spaces()
            more = bool(marks.begin) and (yield from self._sees(marks.open.split()[0]))
        yield from self._marks_if_present(marks.end)

    def _named_call(self) -> ParserSteps[None]:
        marks, written_id = self._marks, ""
        yield from self._mark(marks.open)
        yield from self._spaces()
        name = yield from self._while(_NAME)
        if marks.numbered and (match := _NUMBERED.fullmatch(name)):
            name, written_id = match[1], marks.id_start + name
        call = PartialCall(self._start_call(name, written_id))
        yield from self._between_name_and_arguments()
        if (yield from self._peek()) not in ("{", ""):
            raise MalformedJson
        yield from self._object_of_arguments(call)
        yield from self._marks_if_present(marks.close)

    def _between_name_and_arguments(self) -> ParserSteps[None]:
        yield from self._marks_if_present(self._marks.middle)
        yield from self._spaces()


class HarmonyParser(NamedJsonParser):
    """The parser of calls in the messages of gpt-oss. Its reasoning parser passes them on (harmony.py)."""

    def _between_name_and_arguments(self) -> ParserSteps[None]:
        """Read the rest of the header, in which models name the channel and the type in any order."""
        while (piece := (yield from self._until("<|message|>"))) is not None:
            if "{" in piece:
                raise MalformedJson
        yield from self._mark("<|message|>")
        yield from self._spaces()


def shape(marks: NameMarks, template: str, single: bool) -> CallShape:
    return CallShape(
        open=marks.open,
        middle=marks.middle,
        close=marks.close,
        between=marks.between,
        begin=marks.begin,
        end=marks.end,
        mark=marks.begin or marks.open.split()[0],
        quoted=False,
        numbered=marks.numbered,
        parallel=marks.parallel,
    )
