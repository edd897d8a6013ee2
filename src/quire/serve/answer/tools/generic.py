"""The format for models that define none: the whole answer is a call in JSON, or a list of calls.

    {"name": "get_weather", "arguments": {"city": "Oakford"}}        [{"name": ...}, {"name": ...}]

A Markdown fence around it is dropped. Any JSON answer starts like that, so a call must name a known function and hold
no other keys.
"""

from __future__ import annotations

import re

from quire.serve.answer.incremental import ParserSteps
from quire.serve.answer.tools.call_grammar import CallShape
from quire.serve.answer.tools.calls import CallParser
from quire.serve.answer.tools.json_reader import MalformedJson

_FENCE = "```"
_LANGUAGE = re.compile(r"[a-z_]+")


class GenericParser(CallParser):
    """The parser of the generic format."""

    marked = False

    def _run(self) -> ParserSteps[None]:
        yield from self._attempt(self._block())
        yield from self._all_text()

    def _block(self) -> ParserSteps[None]:
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
    """Return the shape of one object or, unless `single`, of a list."""
    begin, end = ("", "") if single else ("[", "]")
    return CallShape(
        open='{"name": ', middle=', "arguments": ', close="}", between=", ", begin=begin, end=end
    )
