"""The format in which Llama 3 writes calls: the whole answer, or the text after `<|python_tag|>`, is JSON.

    {"name": "get_weather", "parameters": {"city": "Oakford"}}; {"name": ...}

Any JSON answer starts like that, so a call must name a known function and hold no other keys.
"""

from __future__ import annotations

from quire.serve.answer.incremental import ParserSteps
from quire.serve.answer.tools.call_grammar import CallShape
from quire.serve.answer.tools.calls import CallParser

MARK = "<|python_tag|>"


def matches(template: str) -> bool:
    return MARK in template or ("<|start_header_id|>" in template and '"parameters"' in template)


class LlamaParser(CallParser):
    """The parser of Llama's format."""

    marked = False

    def _run(self) -> ParserSteps[None]:
        yield from self._attempt(self._adjacent_calls())
        while (yield from self._text_until(MARK)):
            yield from self._attempt(self._adjacent_calls())

    def _adjacent_calls(self) -> ParserSteps[None]:
        """Read calls that only white space and semicolons separate."""
        yield from self._spaces()
        if (yield from self._sees(MARK)):
            self._advance(self._at + len(MARK))
            yield from self._spaces()
        more = True
        while more:
            yield from self._call()
            self._accept()
            yield from self._spaces()
            more = (yield from self._peek()) == ";"
            if more:
                self._advance(self._at + 1)
                yield from self._spaces()


def shape(template: str, single: bool) -> CallShape:
    return CallShape(open='{"name": ', middle=', "parameters": ', close="}", between="; ")
