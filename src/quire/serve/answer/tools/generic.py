"""Calls for models without a form of their own: the whole answer is a call in JSON, or a list of calls.

    {"name": "get_weather", "arguments": {"city": "Oakford"}}        [{"name": ...}, {"name": ...}]

A Markdown fence around it is left out. As any JSON answer begins like that, a call must name a function that
there is, and hold nothing else.
"""

from __future__ import annotations

import re

from quire.serve.answer.incremental import Steps
from quire.serve.answer.tools.calls import CallParser
from quire.serve.answer.tools.grammar import CallShape
from quire.serve.answer.tools.json_reader import MalformedJson

_FENCE = "```"
_LANGUAGE = re.compile(r"[a-z_]+")


class GenericParser(CallParser):
    marked = False

    def _run(self) -> Steps[None]:
        yield from self._attempt(self._block())
        yield from self._all_text()

    def _block(self) -> Steps[None]:
        yield from self._spaces()
        fenced = yield from self._sees(_FENCE)
        if fenced:
            self._advance(self._at + len(_FENCE))
            yield from self._while(_LANGUAGE)
            yield from self._spaces()
        if (yield from self._peek()) == "[":
            yield from self._list_of_calls()
        else:
            yield from self._call()
            self._accept()
        if fenced:
            yield from self._spaces()
            if not (yield from self._sees(_FENCE)):
                raise MalformedJson
            self._advance(self._at + len(_FENCE))


def shape(template: str, single: bool) -> CallShape:
    """One object, or a list."""
    begin, end = ("", "") if single else ("[", "]")
    return CallShape(
        open='{"name": ', middle=', "arguments": ', close="}", between=", ", begin=begin, end=end
    )
