"""Calls as Llama 3 writes them: the whole answer, or what follows `<|python_tag|>`, is JSON.

    {"name": "get_weather", "parameters": {"city": "Oakford"}}; {"name": ...}

Any JSON answer begins like that, so a call must name a function that there is, and hold nothing else.
"""

from __future__ import annotations

from quire.serve.answer.incremental import Steps
from quire.serve.answer.tools.calls import CallParser
from quire.serve.answer.tools.grammar import CallShape

MARK = "<|python_tag|>"


def matches(template: str) -> bool:
    return MARK in template or ("<|start_header_id|>" in template and '"parameters"' in template)


class LlamaParser(CallParser):
    marked = False

    def _run(self) -> Steps[None]:
        yield from self._attempt(self._calls_at_once())
        while (yield from self._text_until(MARK)):
            yield from self._attempt(self._calls_at_once())

    def _calls_at_once(self) -> Steps[None]:
        """Calls with nothing but white space and semicolons between them."""
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
