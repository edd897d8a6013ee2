"""Formats that write calls as JSON, one object or a list, between marks.

Granite 3    <|tool_call|>[{"name": "find", "arguments": {...}}, ...]
Phi-4        functools[{"name": ...}]  or  <|tool_call|>{"name": ...}<|/tool_call|>
Cohere       <|START_ACTION|>[{"tool_call_id": "0", "tool_name": "find", "parameters": {...}}]<|END_ACTION|>
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.serve.answer.incremental import ParserSteps
from quire.serve.answer.tools.call_grammar import CallShape
from quire.serve.answer.tools.calls import CallOptions, CallParser


@dataclass(frozen=True, slots=True)
class JsonMarks:
    """The text around the JSON of calls.

    Attributes:
        begins: texts with which calls start. Models write the first one.
        end: the text with which calls end; parsers do without it.
        name, arguments: the keys of the objects.
    """

    begins: tuple[str, ...]
    end: str = ""
    name: str = "name"
    arguments: str = "arguments"

    @property
    def marks(self) -> tuple[str, ...]:
        return tuple(text for text in (*self.begins, self.end) if text.startswith("<"))


GRANITE = JsonMarks(("<|tool_call|>", "<tool_call>"))
PHI4 = JsonMarks(("functools", "<|tool_call|>"), "<|/tool_call|>")
PHI4_TAGS = JsonMarks(("<|tool_call|>", "functools"), "<|/tool_call|>")
COHERE = JsonMarks(("<|START_ACTION|>", "Action: ```json"), "<|END_ACTION|> ```", "tool_name", "parameters")
COHERE_PLUS = JsonMarks(("Action: ```json\n", "<|START_ACTION|>"), "\n```", "tool_name", "parameters")
APRIEL = JsonMarks(("<tool_calls>",), "</tool_calls>")
NEMOTRON = JsonMarks(("<TOOLCALL>",), "</TOOLCALL>")


class MarkedJsonParser(CallParser):
    """The parser of formats with JSON between marks."""

    def __init__(self, marks: JsonMarks, options: CallOptions) -> None:
        super().__init__(options)
        self._marks, self.name_key = marks, marks.name

    def _run(self) -> ParserSteps[None]:
        while (yield from self._text_until(*(begin.split()[0] for begin in self._marks.begins))):
            yield from self._attempt(self._block())

    def _block(self) -> ParserSteps[None]:
        yield from self._spaces()
        for begin in self._marks.begins:
            if (yield from self._sees(begin.split()[0])):
                yield from self._mark(begin)
                break
        yield from self._spaces()
        if (yield from self._peek()) == "[":
            yield from self._list_of_calls()
        else:
            yield from self._call()
            self._accept()
        yield from self._marks_if_present(self._marks.end)


def shape(marks: JsonMarks, template: str, single: bool) -> CallShape:
    """Return the shape of a list of calls, also for a single one."""
    begin, end = marks.begins[0], marks.end.split()[0] if marks.end else ""
    break_ = "\n" if marks.end.startswith("\n") else ""
    return CallShape(
        open=f'{{"{marks.name}": ',
        middle=f', "{marks.arguments}": ',
        close="}",
        between=", ",
        begin=f"{begin}[",
        end=f"]{break_}{end}",
        mark=begin.split()[0],
    )
