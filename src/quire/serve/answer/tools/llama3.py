"""The format in which Llama 3 writes calls: the whole answer, or the text after `<|python_tag|>`, is JSON.

    {"name": "get_weather", "parameters": {"city": "Oakford"}}; {"name": ...}

Models also separate calls by line breaks, or write text before them. Any JSON answer starts like that, so a call must name a known function and hold no other keys.
"""

from __future__ import annotations

import re

from quire.serve.answer.incremental import ParserSteps
from quire.serve.answer.tools.call_grammar import CallShape
from quire.serve.answer.tools.calls import CallOptions, CallParser

MARK = "<|python_tag|>"
_BRACES = re.compile(r"[{}]")


def matches(template: str) -> bool:
    return MARK in template or ("<|start_header_id|>" in template and '"parameters"' in template)


class LlamaParser(CallParser):
    """The parser of Llama's format."""

    marked = False

    def __init__(self, options: CallOptions) -> None:
        super().__init__(options)
        self._depth = 0  # of braces in the content: objects inside other objects are no calls

    def _run(self) -> ParserSteps[None]:
        yield from self._attempt(self._adjacent_calls())
        while (yield from self._text_until(MARK, "{")):
            if self._depth:
                yield from self._spaces(self._content)
            if self._depth and not (yield from self._sees(MARK)):
                self._content(self._advance(self._at + 1))
            else:
                yield from self._attempt(self._adjacent_calls())

    def _content(self, text: str) -> None:
        for brace in _BRACES.findall(text):
            self._depth = max(0, self._depth + (1 if brace == "{" else -1))
        super()._content(text)

    def _adjacent_calls(self) -> ParserSteps[None]:
        """Read calls that only white space and semicolons separate."""
        yield from self._spaces()
        more = True
        while more:
            if (yield from self._sees(MARK)):
                self._advance(self._at + len(MARK))
                yield from self._spaces()
            yield from self._call()
            self._accept()
            yield from self._spaces()
            more = (yield from self._peek()) in (";", "{")
            if (yield from self._peek()) == ";":
                self._advance(self._at + 1)
                yield from self._spaces()


def shape(template: str, single: bool) -> CallShape:
    return CallShape(open='{"name": ', middle=', "parameters": ', close="}", between="; ")
